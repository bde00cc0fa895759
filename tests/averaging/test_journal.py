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
from averaging.record import Ballot, Record
from tests.averaging.strategies import SIGNERS, child_of, first, grown, offer_of

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


# The chain in memory.


def test_a_chain_gives_what_follows_a_record_page_by_page() -> None:
    chain = chain_of(12)
    assert chain.after(HEAD.hash) == [entry for entry, _ in CHAIN]
    assert chain.after(HEAD.hash, limit=5) == [entry for entry, _ in CHAIN[:5]]
    assert chain.after(chain.head.hash) == []
    assert chain.after(child_of(HEAD, [offer_of(ME, HEAD)]).hash) is None
    assert all(chain.round_of(entry.record.hash) == entry.record.round for entry, _ in CHAIN)


@given(st.integers(0, 14), st.integers(0, 14))
def test_forgotten_contributions_are_announced_as_gone(one: int, other: int) -> None:
    chain = chain_of(12)
    chain.forget_before(one)
    chain.forget_before(other)
    oldest = max(one, other, 1)
    assert chain.oldest == oldest
    entries = chain.after(HEAD.hash)
    assert entries is not None
    for entry, (whole, contributions) in zip(entries, CHAIN, strict=True):
        kept = entry.record.round >= oldest
        assert entry.payload_bytes == (whole.payload_bytes if kept else 0)
        assert chain.contributions_of(entry.record) == (contributions if kept else None)
        assert all((chain.contribution(c.digest) is not None) == kept for c in contributions)
    assert len(chain.retained()) == 3 * max(0, 13 - oldest)


def test_a_round_without_contributions_makes_all_before_it_forgotten() -> None:
    chain = chain_of(5)
    entry, _ = CHAIN[5]
    chain.append(entry.record, entry.certificate, None)
    assert chain.oldest == 7
    assert chain.retained() == []


# On disk.


@given(st.integers(0, 12), st.integers(1, 13), st.booleans(), st.integers(0, 3))
def test_a_journal_begun_anew_restores_what_was(rounds: int, kept_from: int, voted: bool, held: int) -> None:
    chain = chain_of(rounds, min(kept_from, rounds + 1))
    vote = vote_on(chain.head, 1) if voted else Vote()
    offers = [offer_of(s, chain.head) for s in SIGNERS[:held]]
    entries = journal.compacted(chain, vote, offers, restore([], []))
    restored = restore(log_of(rounds), entries)
    assert restored.chain.records == chain.records
    assert restored.chain.certificates == chain.certificates
    assert restored.chain.oldest == chain.oldest or rounds == 0
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


def test_a_chain_goes_back_and_keeps_its_votes_even_through_a_rewriting() -> None:
    late = vote_on(CHAIN[7][0].record, 3)
    packets = [journal.encode_packet(c) for _, contributions in CHAIN[:3] for c in contributions]
    waiting = offer_of(ME, CHAIN[7][0].record)
    written = [*packets, journal.encode_packet(waiting), journal.encode_vote(CHAIN[7][0].record.hash, late)]
    back = restore(log_of(8), written).back_to(3)
    assert back.chain.records == chain_of(3).records
    assert back.votes[CHAIN[7][0].record.hash] == late
    again = restore(log_of(8), journal.compacted(back.chain, Vote(), [], back))
    assert again.votes[CHAIN[7][0].record.hash] == late
    assert waiting in again.undecided


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
