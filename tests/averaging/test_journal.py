"""What is on disk says the same as what was in memory: chain, votes, contributions, through every rewriting."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging import journal
from averaging.chain import Chain
from averaging.instance import Vote
from averaging.journal import DamagedJournal, Restored
from averaging.messages import LogEntry
from averaging.record import NO_BALLOT, Ballot, Hash, Record
from tests.averaging.strategies import (
    SIGNERS,
    Grown,
    chain_with,
    child_of,
    first,
    forked,
    grown,
    offer_of,
    signer_of,
)

HEAD = first(3)
CHAIN = grown(12)
ME = SIGNERS[0]


def chain_of(rounds: int, kept_from: int = 1) -> Chain:
    chain = Chain(HEAD)
    for entry, contributions in CHAIN[:rounds]:
        chain.append(entry.record, entry.certificate, contributions)
    chain.forget_before(kept_from)
    return chain


def log_of(rounds: int) -> list[bytes]:
    return [journal.encode_commit(entry.record, entry.certificate) for entry, _ in CHAIN[:rounds]]


def restore(log: list[bytes], entries: list[bytes]) -> Restored:
    return journal.restore(HEAD, log, entries, ME, 1000)


def vote_on(head: Record, attempt: int) -> Vote:
    record = child_of(head, [offer_of(s, head) for s in SIGNERS[:3]])
    return Vote(Ballot(attempt + 1, ME.peer_id), Ballot(attempt, ME.peer_id), record)


# On disk.


@given(st.integers(0, 12), st.integers(1, 13), st.booleans(), st.integers(0, 3))
def test_a_journal_begun_anew_restores_what_was(rounds: int, kept_from: int, voted: bool, held: int) -> None:
    chain = chain_of(rounds, min(kept_from, rounds + 1))
    vote = vote_on(chain.head, 1) if voted else Vote()
    offers = [offer_of(s, chain.head) for s in SIGNERS[:held]]
    entries = journal.compacted(chain, {chain.head.hash: vote}, {o.digest: o for o in offers})
    restored = restore(log_of(rounds), entries)
    assert restored.chain.records == chain.records
    assert restored.chain.certificates == chain.certificates
    assert restored.chain.oldest == min(chain.oldest, rounds) or rounds == 0
    assert restored.chain.retained() == chain.retained()
    assert restored.votes.get(chain.head.hash, Vote()) == vote
    assert list(restored.undecided) == offers


@given(st.integers(0, 12), st.integers(0, 200))
def test_any_prefix_of_the_writes_restores_a_prefix(rounds: int, cut: int) -> None:
    """Entries are written journal before log: no cut leaves a record without its contributions."""
    writes: list[tuple[str, bytes]] = []
    for entry, contributions in CHAIN[:rounds]:
        writes += [("journal", journal.encode_packet(c)) for c in contributions]
        writes += [("journal", journal.encode_vote(entry.record.prev, vote_on(HEAD, 0)))]
        writes += [("log", journal.encode_commit(entry.record, entry.certificate))]
    kept = writes[:cut]
    restored = restore([d for f, d in kept if f == "log"], [d for f, d in kept if f == "journal"])
    assert restored.chain.records == chain_of(sum(f == "log" for f, _ in kept)).records
    assert restored.chain.oldest == 1


def test_the_last_vote_on_a_record_counts() -> None:
    entries = [journal.encode_vote(HEAD.hash, vote_on(HEAD, attempt)) for attempt in (0, 1, 2)]
    assert restore([], entries).votes[HEAD.hash] == vote_on(HEAD, 2)


def test_records_that_were_fetched_again_are_read_once() -> None:
    restored = restore([*log_of(8), *log_of(12)[3:]], [])
    assert restored.chain.records == chain_of(12).records


def compacted(restored: Restored) -> list[bytes]:
    return journal.compacted(restored.chain, restored.votes, {c.digest: c for c in restored.undecided})


def cast_on(entry: LogEntry) -> Vote:
    """As if this peer had voted for a record that was decided."""
    return Vote(entry.certificate.ballot, entry.certificate.ballot, entry.record)


def test_a_chain_goes_back_and_keeps_its_votes_even_through_a_rewriting() -> None:
    late = vote_on(CHAIN[7][0].record, 3)
    packets = [journal.encode_packet(c) for _, contributions in CHAIN[:3] for c in contributions]
    waiting = offer_of(ME, CHAIN[7][0].record)
    written = [*packets, journal.encode_packet(waiting), journal.encode_vote(CHAIN[7][0].record.hash, late)]
    back = restore(log_of(8), written).back_to(3)
    assert back.chain.records == chain_of(3).records
    assert back.votes[CHAIN[7][0].record.hash] == late
    again = restore(log_of(8), compacted(back))
    assert again.votes == {CHAIN[7][0].record.hash: late}
    assert waiting in again.undecided


def test_what_was_decided_after_the_round_gone_back_to_is_voted_for_even_if_the_log_is_cut() -> None:
    back = restore(log_of(8), []).back_to(3)
    settled = {entry.record.prev: cast_on(entry) for entry, _ in CHAIN[3:8]}
    assert back.votes == settled
    assert restore(log_of(3), compacted(back)).votes == settled
    assert restore(log_of(8), compacted(back)).votes == {}, "the log says it already"


# Forks.

TRUNK = CHAIN[:6]
PARTING = CHAIN[5][0].record
OWN_SIDE = CHAIN[6:9]
OTHER_SIDE = forked(PARTING, SIGNERS[1:3], 4, weight=50)


def commits(*pieces: Grown) -> list[bytes]:
    return [journal.encode_commit(e.record, e.certificate) for piece in pieces for e, _ in piece]


def packets_of(*pieces: Grown) -> list[bytes]:
    return [journal.encode_packet(c) for piece in pieces for _, contributions in piece for c in contributions]


def test_a_log_that_forked_ends_on_the_chain_that_was_moved_to() -> None:
    restored = restore(commits(TRUNK, OWN_SIDE, OTHER_SIDE), packets_of(TRUNK, OWN_SIDE, OTHER_SIDE))
    expected = chain_with(HEAD, TRUNK, OTHER_SIDE)
    assert restored.chain.records == expected.records
    assert restored.chain.certificates == expected.certificates
    assert [restored.chain.contributions_of(e.record) for e, _ in OTHER_SIDE] == [c for _, c in OTHER_SIDE]


def test_what_was_decided_on_the_chain_that_was_left_is_voted_for() -> None:
    low = Vote(NO_BALLOT, NO_BALLOT, None)
    ahead = vote_on(OWN_SIDE[-1][0].record, 2)
    written = [journal.encode_vote(PARTING.hash, low), journal.encode_vote(OWN_SIDE[-1][0].record.hash, ahead)]
    restored = restore(commits(TRUNK, OWN_SIDE, OTHER_SIDE), written)
    left = {entry.record.prev: cast_on(entry) for entry, _ in OWN_SIDE}
    assert restored.votes == left | {OWN_SIDE[-1][0].record.hash: ahead}


def test_on_going_back_to_the_normal_chain_its_rounds_are_decided_again_and_the_forks_are_not_forgotten() -> None:
    back = commits(OWN_SIDE, grown(2, head=OWN_SIDE[-1][0].record))
    restored = restore(commits(TRUNK, OWN_SIDE, OTHER_SIDE) + back, [])
    assert restored.chain.head.round == 11
    assert restored.votes == {entry.record.prev: cast_on(entry) for entry, _ in OTHER_SIDE[1:]}


@given(st.data())
def test_a_log_of_any_moves_ends_on_the_last_and_forgets_no_decision(data: st.DataObject) -> None:
    """Every normal record that any of the chains had is either in the chain at the end, or voted for."""
    log: list[bytes] = []
    chain = Chain(HEAD)
    decided: dict[Hash, LogEntry] = {}
    forks: set[Hash] = set()
    for _ in range(data.draw(st.integers(1, 6))):
        head = chain.records[data.draw(st.integers(0, chain.head.round))]
        survivors = data.draw(st.permutations([signer_of(p) for p in sorted(head.peers)]))
        piece = forked(head, survivors[: data.draw(st.integers(1, 3))], data.draw(st.integers(0, 3)))
        if piece[0][0].record.hash in forks or not piece[-1][0].record.is_better(chain.head):
            continue  # Nobody moves to a chain that is not better.
        forks.add(piece[0][0].record.hash)
        chain.back_to(head.round)
        for entry, contributions in piece:
            chain.append(entry.record, entry.certificate, contributions)
        log += commits(piece)
        decided |= {e.record.prev: e for e, _ in piece[1:]}
    restored = restore(log, [])
    assert restored.chain.records == chain.records
    for prev, entry in decided.items():
        assert entry.record.hash in restored.chain or restored.votes[prev] == cast_on(entry)


def test_of_the_chain_that_was_left_no_contribution_is_kept_but_what_waits_for_a_decision_is() -> None:
    waiting = offer_of(ME, OWN_SIDE[-1][0].record)
    entries = [*packets_of(TRUNK, OWN_SIDE, OTHER_SIDE), journal.encode_packet(waiting)]
    restored = restore(commits(TRUNK, OWN_SIDE, OTHER_SIDE), entries)
    left = {c.digest for _, contributions in OWN_SIDE for c in contributions}
    assert waiting in restored.undecided
    assert not left & {c.digest for c in restored.chain.retained()}


def test_own_contributions_are_restored_without_those_of_the_others() -> None:
    chain = chain_with(HEAD, CHAIN)
    chain.keep_own(ME.peer_id, 10**9)
    chain.forget_before(10)
    restored = restore(commits(CHAIN), journal.compacted(chain, {}, {}))
    assert restored.chain.oldest == 10
    assert [restored.chain.own(entry.record) for entry, _ in CHAIN] == [chain.own(entry.record) for entry, _ in CHAIN]
    assert all(restored.chain.own(entry.record) is not None for entry, _ in CHAIN)


# The way to a snapshot on another chain.


@given(st.integers(0, 9))
def test_a_bridge_holds_all_that_the_log_may_lack(number: int) -> None:
    chain = chain_with(HEAD, CHAIN[:9])
    assert journal.read_list(journal.encode_bridge(chain, number)) == log_of(9)[number:]


def test_a_log_that_ends_on_the_chain_that_was_left_is_completed_by_the_bridge() -> None:
    chain = chain_with(HEAD, TRUNK, OTHER_SIDE)
    bridge = journal.read_list(journal.encode_bridge(chain, PARTING.round))
    assert restore([*commits(TRUNK, OWN_SIDE), *bridge], []).chain.records == chain.records
    later = grown(2, head=chain.head, signers=SIGNERS[1:3])
    whole = restore([*commits(TRUNK, OWN_SIDE, OTHER_SIDE, later), *bridge], [])
    assert whole.chain.head == later[-1][0].record, "it does not undo what the log has since"


@given(st.binary(max_size=40))
def test_a_damaged_bridge_is_named(data: bytes) -> None:
    try:
        bridge = journal.read_list(data)
    except DamagedJournal:
        return
    assert data == msgpack.packb(bridge) or msgpack.unpackb(data) == bridge


# Damage.


@given(st.lists(st.binary(max_size=60), max_size=3), st.lists(st.binary(max_size=60), max_size=3))
def test_damage_is_named(log: list[bytes], entries: list[bytes]) -> None:
    try:
        restore(log, entries)
    except DamagedJournal:
        return
    assert not log and not entries


leaves = st.none() | st.integers(0, 3) | st.binary(max_size=40) | st.lists(st.integers(0, 3), max_size=2)


@given(st.lists(leaves, max_size=6))
def test_damage_inside_an_entry_is_named(fields: list[object]) -> None:
    with pytest.raises(DamagedJournal):
        restore([], [msgpack.packb(fields)])


def test_a_log_with_a_hole_or_of_another_run_is_damage() -> None:
    with pytest.raises(DamagedJournal, match="does not follow"):
        restore(log_of(5)[1:], [])
    with pytest.raises(DamagedJournal):
        journal.restore(first(2), log_of(5), [], ME, 1000)
