"""What makes a record the child of another: a quorum's signatures, or a recovery by one whom the parent names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.instance import Vote, is_certified, settled_votes
from averaging.messages import LogEntry
from averaging.record import (
    GENESIS,
    NO_BALLOT,
    NORMAL,
    Ballot,
    Certificate,
    Hash,
    Member,
    Record,
    acceptance_message,
    recovery_message,
)
from network.identity import Identity
from simulator.toy import ToySigner
from tests.averaging.strategies import (
    SIGNERS,
    certificate_of,
    chain_with,
    child_of,
    first,
    forked,
    grown,
    recovery_of,
    signer_of,
)

HEAD = first(3)
ROUND, OFFERS = grown(1)[0]
ONE, TWO, THREE, STRANGER = SIGNERS[:4]


def is_child(entry: LogEntry, previous: Record = HEAD) -> bool:
    return is_certified(previous, entry.record, entry.certificate, ONE)


# Rounds.


def wrong_rounds() -> dict[str, LogEntry]:
    record, good = ROUND.record, ROUND.certificate
    other, _ = grown(2)[1]
    follower = next(s for s in SIGNERS[:3] if s.peer_id != HEAD.lead)
    skipping = replace(child_of(HEAD, OFFERS), round=2)
    recovery = recovery_of(HEAD, [ONE]).record
    return {
        "one of three": replace(ROUND, certificate=certificate_of(HEAD, record, [follower])),
        "nobody": replace(ROUND, certificate=Certificate(good.ballot, {})),
        "strangers": replace(ROUND, certificate=certificate_of(HEAD, record, SIGNERS[3:9])),
        "of another instance": replace(ROUND, certificate=certificate_of(other.record, record, SIGNERS[:3])),
        "of another ballot": replace(ROUND, certificate=replace(good, ballot=Ballot(1, good.ballot.owner))),
        "of another record": replace(ROUND, certificate=other.certificate),
        "forged": replace(ROUND, certificate=Certificate(good.ballot, dict.fromkeys(good.signatures, bytes(64)))),
        "skips a round": LogEntry(skipping, certificate_of(HEAD, skipping, SIGNERS[:3]), 1),
        "is of another chain": other,
        "is a genesis": LogEntry(
            g := replace(record, kind=GENESIS, members=()), certificate_of(HEAD, g, SIGNERS[:3]), 0
        ),
        "is a recovery by vote": LogEntry(recovery, certificate_of(HEAD, recovery, SIGNERS[:3]), 0),
        "is signed as a recovery": replace(
            ROUND, certificate=Certificate(good.ballot, {s.peer_id: s.sign(recovery_message(record)) for s in SIGNERS})
        ),
    }


def test_a_round_is_certified_by_a_quorum_at_one_ballot() -> None:
    assert is_child(ROUND)
    lead = signer_of(HEAD.lead)
    follower = next(s for s in SIGNERS[:3] if s is not lead)
    assert is_child(replace(ROUND, certificate=certificate_of(HEAD, ROUND.record, [lead, follower, STRANGER])))
    later = Ballot(7, follower.peer_id)
    assert is_child(replace(ROUND, certificate=certificate_of(HEAD, ROUND.record, SIGNERS[:3], later)))


@pytest.mark.parametrize("wrong", sorted(wrong_rounds()))
def test_nothing_else_certifies_a_round(wrong: str) -> None:
    assert not is_child(wrong_rounds()[wrong])


# Recoveries.


def signed(record: Record, signer: ToySigner | None = None) -> LogEntry:
    signer = signer or signer_of(record.origin)
    signature = signer.sign(recovery_message(record))
    return LogEntry(record, Certificate(Ballot(0, record.origin), {record.origin: signature}), 0)


@given(st.sets(st.sampled_from(SIGNERS), min_size=1), st.data())
def test_any_of_those_that_go_on_may_sign_for_all_of_them(named: set[ToySigner], data: st.DataObject) -> None:
    """Even if the parent names none of them: all whom it names may be gone for good."""
    survivors = sorted(named, key=lambda s: s.peer_id)
    assert is_child(recovery_of(HEAD, survivors, data.draw(st.sampled_from(survivors))))


def test_a_recovery_can_follow_a_recovery_with_fewer() -> None:
    before = recovery_of(HEAD, [ONE, TWO]).record
    assert is_child(recovery_of(before, [TWO]), before)
    again = recovery_of(before, [TWO]).record
    assert is_child(grown(1, head=again, signers=[TWO])[0][0], again)
    assert not is_child(grown(1, head=again, signers=[TWO])[0][0], before)


GOOD = recovery_of(HEAD, [ONE, TWO])
LAWLESS = {
    "more tokens": replace(GOOD.record, tokens=HEAD.tokens + 1),
    "fewer tokens": replace(recovery_of(ROUND.record, [ONE, TWO]).record, tokens=0),
    "an attempt": replace(GOOD.record, attempt=1),
    "an origin that does not go on": replace(GOOD.record, origin=THREE.peer_id),
    "a stranger as origin": replace(GOOD.record, origin=STRANGER.peer_id),
    "another parent": replace(GOOD.record, prev=ROUND.record.hash),
    "a round left out": replace(GOOD.record, round=2),
    "a round": replace(GOOD.record, kind=NORMAL, members=(Member(ONE.peer_id, 0, Hash(bytes(32))),)),
}


@pytest.mark.parametrize("what", sorted(LAWLESS))
def test_a_recovery_that_says_anything_else_is_refused_though_it_is_signed(what: str) -> None:
    record = LAWLESS[what]
    for previous in (HEAD, ROUND.record):
        assert not is_child(signed(record), previous)


def test_only_the_origins_own_signature_of_these_very_bytes_counts() -> None:
    record, ballot = GOOD.record, GOOD.certificate.ballot
    assert is_child(GOOD)
    vote = ONE.sign(acceptance_message(HEAD.hash, ballot, record.hash))
    wrong = [
        {},
        {ONE.peer_id: bytes(64)},
        {ONE.peer_id: TWO.sign(recovery_message(record))},
        {TWO.peer_id: TWO.sign(recovery_message(record))},
        {ONE.peer_id: ONE.sign(recovery_message(replace(record, voters=(ONE.peer_id,))))},
        {ONE.peer_id: vote},
    ]
    for signatures in wrong:
        assert not is_child(replace(GOOD, certificate=Certificate(ballot, signatures)))


def test_real_keys_sign_recoveries_too() -> None:
    me, other = Identity(bytes(32)), Identity(bytes([1] * 32))
    head = replace(HEAD, voters=tuple(sorted([me.peer_id, other.peer_id])))
    record = replace(GOOD.record, prev=head.hash, origin=me.peer_id, voters=(me.peer_id,))
    for signer, lawful in ((me, True), (other, False)):
        certificate = Certificate(Ballot(0, me.peer_id), {me.peer_id: signer.sign(recovery_message(record))})
        assert is_certified(head, record, certificate, other) == lawful


# What was decided stays decided on leaving its chain.


def test_a_vote_stands_for_each_decided_round_and_none_for_a_recovery() -> None:
    rounds = grown(3)
    side = forked(rounds[-1][0].record, SIGNERS[:2], 2)
    chain = chain_with(HEAD, rounds, side)
    settled = settled_votes(chain.records, chain.certificates, {})
    decided = [entry for entry, _ in [*rounds, *side[1:]]]
    assert settled == {e.record.prev: Vote(e.certificate.ballot, e.certificate.ballot, e.record) for e in decided}
    assert rounds[-1][0].record.hash not in settled, "what the recovery follows may be decided elsewhere"


ballots = st.just(NO_BALLOT) | st.builds(Ballot, st.integers(0, 3), st.sampled_from([s.peer_id for s in SIGNERS[:3]]))


@given(ballots, ballots, ballots.filter(lambda ballot: ballot != NO_BALLOT))
def test_a_settled_vote_takes_back_neither_promise_nor_acceptance(one: Ballot, two: Ballot, decided: Ballot) -> None:
    accepted, promised = sorted([one, two])
    before = Vote(promised, accepted, ROUND.record if accepted != NO_BALLOT else None)
    certificate = certificate_of(HEAD, ROUND.record, SIGNERS[:3], decided)
    after = {HEAD.hash: before} | settled_votes([ROUND.record], [certificate], {HEAD.hash: before})
    vote = after[HEAD.hash]
    assert vote.accepted == ROUND.record
    assert vote.promised >= max(promised, decided) or vote == before
    assert vote.accepted_ballot == max(accepted, decided)
    assert vote.promised >= vote.accepted_ballot
