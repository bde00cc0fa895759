"""R3 and R6 one by one: what a voter accepts, what is on its disk before it says so, what is committed; and lies."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from averaging import journal
from averaging.instance import PROPOSALS_MAX, Instance, Proposal, Vote
from averaging.messages import Accepted, Get, Log, Nack, Prepare, Promise
from averaging.outbox import Commit
from averaging.record import NO_BALLOT, Ballot, Member, sha256
from tests.averaging.one_peer import (
    HEAD,
    LEAD,
    OFFERS,
    ONE,
    OTHER_BASE,
    RECORD,
    STRANGER,
    TWO,
    ZERO,
    Peer,
    accepted,
    ballot_of,
    proposal,
    said,
    unsigned,
)
from tests.averaging.strategies import BASE, SIGNERS, child_of, offer_of, signer_of

# R3: accepting.


def test_r3_a_voter_accepts_what_it_holds_and_says_so_only_with_its_vote_on_disk() -> None:
    peer = Peer(ONE)
    peer.hold()
    actions = peer.hear(LEAD, proposal(RECORD, ZERO))
    assert said(actions, Accepted) == [accepted(ONE, ZERO, RECORD)]
    assert actions.entries[-1] == journal.encode_vote(HEAD.hash, Vote(ZERO, ZERO, RECORD))
    assert {journal.encode_packet(o) for o in OFFERS} <= set(actions.entries)


def test_r3_a_voter_fetches_what_it_lacks_before_it_accepts() -> None:
    peer = Peer(ONE)
    peer.hold(OFFERS[:1])
    actions = peer.hear(LEAD, proposal(RECORD, ZERO))
    assert not said(actions, Accepted) and not actions.entries
    peer.engine.tick(1.06)
    asked = {d for m in said(peer.drain(), Get) if isinstance(m, Get) for d in m.digests}
    assert asked == {o.digest for o in OFFERS[1:]}
    assert not said(peer.hold(OFFERS[1:2], 1.07), Accepted)
    assert peer.vote_on_disk().accepted is None
    assert said(peer.hold(OFFERS[2:], 1.08), Accepted)
    assert peer.vote_on_disk().accepted == RECORD
    with pytest.raises(AssertionError):
        Instance(HEAD, Vote(), BASE).accept(ZERO, RECORD)


def test_r3_below_the_promise_nothing_is_accepted() -> None:
    peer = Peer(ONE)
    peer.hold()
    promised = ballot_of(TWO, 3)
    assert said(peer.hear(TWO, Prepare(HEAD.hash, promised)), Promise)
    actions = peer.hear(LEAD, proposal(RECORD, ZERO))
    assert not said(actions, Accepted)
    assert said(actions, Nack) == [Nack(HEAD.hash, promised, False)]
    assert peer.vote_on_disk() == Vote(promised)


def test_r3_at_the_promised_ballot_and_above_it_is_accepted() -> None:
    for attempt in (3, 4):
        peer = Peer(ONE)
        peer.hold()
        peer.hear(TWO, Prepare(HEAD.hash, ballot_of(TWO, 3)))
        record = child_of(HEAD, OFFERS, TWO.peer_id, attempt)
        assert said(peer.hear(TWO, proposal(record, ballot_of(TWO, attempt))), Accepted)
        assert peer.vote_on_disk() == Vote(ballot_of(TWO, attempt), ballot_of(TWO, attempt), record)


def test_r3_one_ballot_is_accepted_once() -> None:
    instance = Instance(HEAD, Vote(ZERO, ZERO, RECORD), BASE)
    assert not instance.may_accept(ZERO)
    assert instance.may_accept(ballot_of(ONE))


def test_r3_a_fresh_proposal_from_another_anchor_is_refused_but_a_carried_one_is_not() -> None:
    offers = [offer_of(s, HEAD, base=OTHER_BASE) for s in SIGNERS[:3]]
    for carried in (False, True):
        peer = Peer(ONE)
        peer.hold(offers)  # Its own too: what it said before its anchor changed.
        origin, attempt = (LEAD.peer_id, 0) if carried else (TWO.peer_id, 1)
        record = child_of(HEAD, offers, origin, attempt)
        actions = peer.hear(TWO, proposal(record, ballot_of(TWO), carried))
        assert bool(said(actions, Accepted)) == carried
        assert said(actions, Nack) == ([] if carried else [Nack(HEAD.hash, NO_BALLOT, True)])


def test_r3_who_is_no_voter_accepts_nothing() -> None:
    peer = Peer(SIGNERS[4])
    peer.hold()
    actions = peer.hear(LEAD, proposal(RECORD, ZERO))
    assert not said(actions, Accepted) and peer.vote_on_disk() == Vote()


def test_r3_only_the_owner_of_a_ballot_may_propose_at_it() -> None:
    fresh = child_of(HEAD, OFFERS, ONE.peer_id, 1)
    usurped = [
        (TWO, proposal(RECORD, ZERO)),  # The lead's own words, from another mouth.
        (ONE, proposal(child_of(HEAD, OFFERS, ONE.peer_id), Ballot(0, ONE.peer_id))),
        (STRANGER, proposal(RECORD, ballot_of(STRANGER), True)),
        (TWO, proposal(fresh, ballot_of(TWO))),  # Another's record is never fresh.
        (LEAD, proposal(RECORD, ZERO, True)),
    ]
    for source, propose in usurped:
        peer = Peer(signer_of(next(v for v in HEAD.voters if v not in {source.peer_id, LEAD.peer_id})))
        peer.hold()
        actions = peer.hear(source, propose)
        assert not said(actions, Accepted), source
        assert [r.peer for r in actions.refusals] == [source.peer_id]


def test_r3_an_acceptance_with_a_wrong_signature_does_not_count() -> None:
    peer = Peer(ONE)
    peer.hold()
    peer.hear(LEAD, unsigned(proposal(RECORD, ZERO)))
    peer.hear(TWO, replace(accepted(TWO, ZERO, RECORD), signature=bytes(64)))
    peer.hear(TWO, accepted(TWO, ballot_of(TWO), RECORD))
    peer.hear(STRANGER, accepted(STRANGER, ZERO, RECORD))
    assert peer.engine.head == HEAD
    peer.hear(TWO, accepted(TWO, ZERO, RECORD))
    assert peer.engine.head == RECORD


# R6: committing.


def test_r6_a_quorum_at_one_ballot_commits_and_a_mixture_of_ballots_does_not() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    for ballot, signer in ((ZERO, LEAD), (ballot_of(ONE), ONE), (ballot_of(TWO), TWO)):
        instance.accepted_by(signer.peer_id, ballot, RECORD.hash, bytes(64))
        assert instance.decided() is None
    instance.accepted_by(TWO.peer_id, ZERO, RECORD.hash, bytes(64))
    decided = instance.decided()
    assert decided is not None and decided[0] == RECORD.hash and decided[1].ballot == ZERO


def test_r6_a_decided_record_is_not_committed_before_its_contributions_are_here() -> None:
    peer = Peer(SIGNERS[4])  # No voter: it only watches.
    peer.hold(OFFERS[:2])
    peer.hear(LEAD, proposal(RECORD, ZERO))
    peer.hear(ONE, accepted(ONE, ZERO, RECORD))
    assert peer.engine.head == HEAD
    actions = peer.hold(OFFERS[2:])
    assert peer.engine.head == RECORD
    assert actions.commits == [Commit(RECORD, tuple(sorted(OFFERS, key=lambda c: c.owner)))]


def test_r6_who_speaks_of_a_decided_round_is_told_what_was_decided() -> None:
    peer = Peer(SIGNERS[4])
    peer.hold()
    peer.hear(LEAD, proposal(RECORD, ZERO))
    peer.hear(ONE, accepted(ONE, ZERO, RECORD))
    (log,) = said(peer.hear(TWO, Prepare(HEAD.hash, ballot_of(TWO))), Log)
    assert isinstance(log, Log)
    assert [e.record for e in log.entries] == [RECORD]


def test_r6_old_acceptances_give_way_to_new_ballots() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    for attempt in range(2 * PROPOSALS_MAX):
        instance.accepted_by(ONE.peer_id, ballot_of(ONE, attempt), RECORD.hash, bytes(64))
    assert len(instance.acceptances) == PROPOSALS_MAX
    newest = ballot_of(ONE, 2 * PROPOSALS_MAX - 1)
    for signer in (LEAD, TWO):
        instance.accepted_by(signer.peer_id, newest, RECORD.hash, bytes(64))
    assert instance.decided() is not None


# Lies about a record.


def other_member(member: Member, **changes: object) -> tuple[Member, ...]:
    changed = replace(member, **changes)  # type: ignore[arg-type]
    return tuple(sorted([changed, *(m for m in RECORD.members if m != member)], key=lambda m: m.peer))


MINE = RECORD.members[0]
LIES = {
    "another head": replace(RECORD, prev=sha256(b"elsewhere")),
    "another round": replace(RECORD, round=RECORD.round + 1),
    "a genesis": replace(RECORD, kind=0),
    "a stranger's": replace(RECORD, origin=STRANGER.peer_id),
    "a voter who contributed nothing": replace(RECORD, voters=tuple(sorted([*RECORD.voters, STRANGER.peer_id]))),
    "too many tokens": replace(RECORD, tokens=RECORD.tokens + 1),
    "another weight": replace(RECORD, members=other_member(MINE, weight=MINE.weight + 5), tokens=RECORD.tokens + 5),
    "another owner": replace(
        RECORD,
        members=other_member(MINE, peer=STRANGER.peer_id),
        voters=tuple(sorted({STRANGER.peer_id, *RECORD.voters} - {MINE.peer})),
    ),
    "another base": replace(RECORD, base=OTHER_BASE),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_every_lie_about_a_record_is_named_and_never_accepted(lie: str) -> None:
    instance = Instance(HEAD, Vote(), BASE)
    for offer in OFFERS:
        instance.hold(offer)
    assert instance.flaw(RECORD) is None
    assert instance.flaw(LIES[lie]) is not None
    for carried in (False, True):
        peer = Peer(ONE)
        peer.hold()
        actions = peer.hear(TWO, proposal(LIES[lie], ballot_of(TWO), carried))
        assert not said(actions, Accepted)
        assert peer.vote_on_disk() == Vote()


def test_a_lie_that_shows_only_when_the_contribution_comes_is_not_accepted_either() -> None:
    lie = replace(RECORD, members=other_member(MINE, weight=MINE.weight + 5), tokens=RECORD.tokens + 5)
    peer = Peer(ONE)
    peer.hold(OFFERS[1:] if OFFERS[0].owner == MINE.peer else [o for o in OFFERS if o.owner != MINE.peer])
    actions = peer.hear(LEAD, proposal(lie, ZERO))
    assert not actions.refusals, "nothing is known against it yet"
    actions = peer.hold([o for o in OFFERS if o.owner == MINE.peer])
    assert [r.peer for r in actions.refusals] == [LEAD.peer_id]
    assert peer.vote_on_disk() == Vote()


def test_a_newer_proposal_replaces_one_that_still_waits() -> None:
    peer = Peer(ONE)
    peer.hold(OFFERS[:1])
    peer.hear(LEAD, proposal(RECORD, ZERO))
    newer = child_of(HEAD, OFFERS[:2], TWO.peer_id, 2)
    peer.hear(TWO, proposal(newer, ballot_of(TWO, 2)))
    assert peer.engine.instance.proposal == Proposal(ballot_of(TWO, 2), newer, False, TWO.peer_id)
    peer.hear(LEAD, proposal(RECORD, ZERO))
    assert peer.engine.instance.proposal == Proposal(ballot_of(TWO, 2), newer, False, TWO.peer_id)


def test_the_same_inputs_give_the_same_outputs() -> None:
    def run() -> bytes:
        peer = Peer(ONE)
        trace = hashlib.sha256()
        for actions in (
            peer.hold(),
            peer.hear(LEAD, proposal(RECORD, ZERO)),
            peer.hear(TWO, accepted(TWO, ZERO, RECORD)),
        ):
            trace.update(repr(actions).encode())
        return trace.digest()

    assert run() == run()
