"""R1, R2, R4 and R5 one by one: what may be offered, proposed, taken over and carried on, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from averaging import journal
from averaging.engine import Engine
from averaging.instance import OFFERS_PER_PEER_MAX, Instance, Vote
from averaging.messages import Get, Nack, Offer, Prepare, Promise, Propose
from averaging.record import NO_BALLOT, Ballot
from network.seam import PeerID
from tests.averaging.one_peer import (
    CONFIG,
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

# R1: offers.


def test_r1_an_offer_is_bound_to_its_head() -> None:
    peer = Peer(ONE)
    elsewhere = offer_of(TWO, RECORD)
    peer.hold([elsewhere])
    assert not peer.engine.instance.offers
    with pytest.raises(AssertionError):
        Instance(HEAD, Vote(), BASE).hold(elsewhere)


def test_r1_the_offers_of_one_peer_are_alternatives() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    earlier, later = offer_of(ONE, HEAD, payload=b"earlier"), offer_of(ONE, HEAD, payload=b"later")
    assert instance.hold(earlier) and instance.hold(later)
    assert not instance.hold(earlier)
    assert instance.usable() == [later]
    assert set(instance.held) == {earlier.digest, later.digest}
    record = instance.fresh(LEAD.peer_id, 0, lambda peer: True)
    assert [m.digest for m in record.members] == [later.digest]


def test_r1_one_peer_cannot_fill_the_memory() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    kept = [instance.hold(offer_of(ONE, HEAD, payload=bytes([n]))) for n in range(OFFERS_PER_PEER_MAX + 3)]
    assert sum(kept) == OFFERS_PER_PEER_MAX
    assert instance.hold(offer_of(TWO, HEAD))


def test_r1_an_offer_made_early_counts_once_the_head_is_reached() -> None:
    peer = Peer(ONE)
    early = offer_of(TWO, RECORD)
    peer.hear(TWO, Offer(early.encoded))
    peer.hold()
    peer.hear(LEAD, proposal(RECORD, ZERO))
    peer.hear(TWO, accepted(TWO, ZERO, RECORD))
    assert peer.engine.head == RECORD
    assert peer.engine.instance.held == {early.digest: early}


def test_r1_an_offer_made_early_goes_with_its_link() -> None:
    peer = Peer(ONE)
    peer.hear(TWO, Offer(offer_of(TWO, RECORD).encoded))
    peer.engine.disconnected(TWO.peer_id)
    peer.engine.connected(TWO.peer_id, 1.0)
    peer.hold()
    peer.hear(LEAD, proposal(RECORD, ZERO))
    peer.hear(TWO, accepted(TWO, ZERO, RECORD))
    assert peer.engine.head == RECORD
    assert not peer.engine.instance.held


def test_r1_a_payload_that_cannot_be_merged_is_refused() -> None:
    def check(payload: bytes) -> None:
        if payload == b"poison":
            raise ValueError("poison")

    restored = journal.restore(HEAD, [], [], ONE, 1000)
    engine = Engine(ONE, CONFIG, restored, check=check, nonce=1, now=0.0)
    engine.connected(TWO.peer_id, 0.0)
    heavy = offer_of(TWO, HEAD, weight=CONFIG.weight_max + 1)
    empty = offer_of(TWO, HEAD, weight=0)
    for bad in (offer_of(TWO, HEAD, payload=b"poison"), heavy, empty):
        engine.receive(TWO.peer_id, Offer(bad.encoded), 1.0)
        assert [r.peer for r in engine.drain().refusals] == [TWO.peer_id]
    assert not engine.instance.held


# R2: the lead's own ballot.


def test_r2_the_lead_proposes_when_the_group_closes_and_nobody_else_does() -> None:
    for signer in (LEAD, ONE, TWO):
        peer = Peer(signer)
        actions = peer.hold()
        assert bool(said(actions, Propose)) == (signer is LEAD)
    actions = Peer(LEAD).hold()
    (propose,) = said(actions, Propose)
    assert isinstance(propose, Propose)
    assert (propose.ballot, propose.carried) == (ZERO, False)
    assert [m.peer for m in propose.record.members] == sorted(s.peer_id for s in SIGNERS[:3])
    assert {target for target, m in actions.sends if m is propose} >= {ONE.peer_id, TWO.peer_id}


def test_r2_the_lead_owns_ballot_zero_only_if_it_promised_nothing() -> None:
    assert Instance(HEAD, Vote()).may_propose_at_zero(LEAD.peer_id)
    assert not Instance(HEAD, Vote()).may_propose_at_zero(ONE.peer_id)
    assert not Instance(HEAD, Vote(promised=ballot_of(ONE))).may_propose_at_zero(LEAD.peer_id)
    assert not Instance(HEAD, Vote(ZERO, ZERO, RECORD)).may_propose_at_zero(LEAD.peer_id)
    peer = Peer(LEAD)
    peer.hear(ONE, Prepare(HEAD.hash, ballot_of(ONE)))
    assert not said(peer.hold(), Propose)


def test_r2_a_restarted_lead_proposes_nothing_else_at_ballot_zero() -> None:
    before = Peer(LEAD)
    assert said(before.hold(), Propose)
    after = Peer(LEAD, before.disk)
    assert after.engine.instance.vote.accepted is not None
    others = [offer_of(s, HEAD, payload=b"new") for s in SIGNERS[:3]]
    assert not said(after.hold(others), Propose)


def test_r2_only_offers_from_the_same_anchor_are_named() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    for offer in (OFFERS[0], offer_of(SIGNERS[1], HEAD, base=OTHER_BASE)):
        instance.hold(offer)
    record = instance.fresh(LEAD.peer_id, 0, lambda peer: True)
    assert [m.peer for m in record.members] == [SIGNERS[0].peer_id]
    assert record.base == BASE


def test_r2_the_next_voters_are_willing_and_alive_if_there_are_such() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    for offer in (OFFERS[0], OFFERS[1], offer_of(SIGNERS[2], HEAD, willing=False)):
        instance.hold(offer)
    zero, one, two = (s.peer_id for s in SIGNERS[:3])

    def voters(*alive: PeerID) -> set[PeerID]:
        return set(instance.fresh(LEAD.peer_id, 0, alive.__contains__).voters)

    assert voters(zero, one, two) == {zero, one}
    assert voters(zero, two) == {zero}
    assert voters(two) == {two}, "nobody alive is willing"
    assert voters() == {zero, one, two}


# R4: taking over.


def test_r4_a_promise_is_on_disk_before_it_is_said_and_tells_what_was_accepted() -> None:
    peer = Peer(ONE)
    peer.hold()
    peer.hear(LEAD, unsigned(proposal(RECORD, ZERO)))
    actions = peer.hear(TWO, Prepare(HEAD.hash, ballot_of(TWO)))
    assert said(actions, Promise) == [Promise(HEAD.hash, ballot_of(TWO), ZERO, RECORD)]
    assert actions.entries == [journal.encode_vote(HEAD.hash, Vote(ballot_of(TWO), ZERO, RECORD))]


def test_r4_a_lower_or_equal_ballot_gets_no_promise() -> None:
    peer = Peer(ONE)
    peer.hear(TWO, Prepare(HEAD.hash, ballot_of(TWO, 5)))
    for ballot in (ballot_of(TWO, 5), ballot_of(TWO, 4), ballot_of(LEAD, 4)):
        actions = peer.hear(signer_of(ballot.owner), Prepare(HEAD.hash, ballot))
        assert not said(actions, Promise) and not actions.entries
        assert said(actions, Nack) == [Nack(HEAD.hash, ballot_of(TWO, 5), False)]


def test_r4_only_voters_prepare_and_only_at_their_own_ballots() -> None:
    peer = Peer(ONE)
    for source, ballot in ((STRANGER, ballot_of(STRANGER)), (TWO, ballot_of(LEAD))):
        actions = peer.hear(source, Prepare(HEAD.hash, ballot))
        assert not said(actions, Promise) and not actions.entries
    assert not Peer(SIGNERS[4]).hear(TWO, Prepare(HEAD.hash, ballot_of(TWO))).entries


def test_r4_when_the_lead_is_silent_a_voter_takes_a_ballot_above_all_it_has_seen() -> None:
    peer = Peer(ONE)
    peer.hear(TWO, Prepare(HEAD.hash, ballot_of(TWO, 4)))
    peer.engine.tick(1000.0)
    actions = peer.drain()
    assert said(actions, Prepare) == [Prepare(HEAD.hash, ballot_of(ONE, 5))]
    assert actions.entries == [journal.encode_vote(HEAD.hash, Vote(ballot_of(ONE, 5)))]


# R5: carrying on.


def take_over(peer: Peer, now: float = 1000.0) -> Ballot:
    peer.engine.tick(now)
    (prepare,) = said(peer.drain(), Prepare)
    assert isinstance(prepare, Prepare)
    return prepare.ballot


def test_r5_what_was_accepted_at_the_highest_ballot_is_carried_on_as_it_is() -> None:
    peer = Peer(ONE)
    peer.hold()
    ballot = take_over(peer)
    low = child_of(HEAD, OFFERS[:2], LEAD.peer_id, 0)
    actions = peer.hear(LEAD, Promise(HEAD.hash, ballot, ZERO, low), 1001.0)
    (propose,) = said(actions, Propose)
    assert isinstance(propose, Propose)
    assert (propose.ballot, propose.record, propose.carried) == (ballot, low, True)
    assert actions.entries[-1] == journal.encode_vote(HEAD.hash, Vote(ballot, ballot, low))


def test_r5_the_highest_of_several_accepted_ballots_counts() -> None:
    instance = Instance(HEAD, Vote(), BASE)
    instance.ballot = ballot_of(ONE, 9)
    low, high = child_of(HEAD, OFFERS[:2]), child_of(HEAD, OFFERS, TWO.peer_id, 3)
    votes = {
        LEAD.peer_id: (ZERO, low),
        TWO.peer_id: (ballot_of(TWO, 3), high),
        ONE.peer_id: (NO_BALLOT, None),
    }
    for order in (list(votes), list(votes)[::-1]):
        instance.promises = {p: Promise(HEAD.hash, ballot_of(ONE, 9), *votes[p]) for p in order}
        assert instance.carried() == high
    instance.promises = {ONE.peer_id: Promise(HEAD.hash, ballot_of(ONE, 9), NO_BALLOT, None)}
    assert instance.carried() is None


def test_r5_without_a_quorum_of_promises_nothing_is_proposed() -> None:
    peer = Peer(ONE)
    peer.hold()
    ballot = take_over(peer)
    wrong = [
        (LEAD, Promise(HEAD.hash, ballot_of(ONE, ballot.attempt + 1), NO_BALLOT, None)),
        (STRANGER, Promise(HEAD.hash, ballot, NO_BALLOT, None)),
    ]
    for source, promise in wrong:
        assert not said(peer.hear(source, promise, 1001.0), Propose)
    assert said(peer.hear(LEAD, Promise(HEAD.hash, ballot, NO_BALLOT, None), 1001.0), Propose)


def test_r5_its_own_earlier_acceptance_is_carried_on_too() -> None:
    peer = Peer(ONE)
    peer.hold()
    peer.hear(LEAD, unsigned(proposal(RECORD, ZERO)))
    ballot = take_over(peer)
    (propose,) = said(peer.hear(TWO, Promise(HEAD.hash, ballot, NO_BALLOT, None), 1001.0), Propose)
    assert isinstance(propose, Propose)
    assert propose.record == RECORD and propose.carried


def test_r5_what_is_carried_on_is_fetched_from_who_accepted_it() -> None:
    peer = Peer(ONE)
    peer.hold(OFFERS[:2])
    ballot = take_over(peer)
    actions = peer.hear(TWO, Promise(HEAD.hash, ballot, ZERO, RECORD), 1000.1)
    assert not said(actions, Propose)
    peer.engine.tick(1000.1)
    asked = [(p, m.digests) for p, m in peer.drain().sends if isinstance(m, Get)]
    assert asked == [(TWO.peer_id, (OFFERS[2].digest,))]
    (propose,) = said(peer.hold(OFFERS[2:], 1000.1), Propose)
    assert isinstance(propose, Propose) and propose.record == RECORD


def test_r5_a_prepared_ballot_that_was_overtaken_is_not_proposed_at() -> None:
    peer = Peer(ONE)
    peer.hold()
    ballot = take_over(peer)
    peer.hear(TWO, Prepare(HEAD.hash, ballot_of(TWO, ballot.attempt + 1)), 1001.0)
    assert not said(peer.hear(LEAD, Promise(HEAD.hash, ballot, NO_BALLOT, None), 1001.0), Propose)


def test_r5_a_promise_with_a_record_that_cannot_follow_is_refused() -> None:
    peer = Peer(ONE)
    peer.hold()
    ballot = take_over(peer)
    lie = replace(RECORD, tokens=RECORD.tokens + 1)
    actions = peer.hear(LEAD, Promise(HEAD.hash, ballot, ZERO, lie), 1001.0)
    assert [r.peer for r in actions.refusals] == [LEAD.peer_id]
    assert not said(actions, Propose)


def test_r2_what_a_journal_held_counts_once_its_owner_pushes_it_again() -> None:
    """A lead that crashed in the middle of its first vote would else wait for these offers for ever."""
    instance = Instance(HEAD, Vote(), BASE)
    instance.held[OFFERS[0].digest] = OFFERS[0]
    assert instance.usable() == []
    assert instance.hold(OFFERS[0])
    assert instance.usable() == [OFFERS[0]]
    assert not instance.hold(OFFERS[0])
