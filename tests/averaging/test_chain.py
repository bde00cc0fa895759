"""The log in memory: pages for others, going back, where two chains parted, and which contributions stay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.chain import Chain, Left
from averaging.contribution import Contribution
from averaging.messages import KNOWN_MAX, LOG_BYTES_MAX, LOG_ENTRIES_MAX
from averaging.record import NORMAL, RECOVERY, Ballot, Certificate, Record, sha256
from tests.averaging.strategies import BASE, SIGNERS, chain_with, child_of, first, forked, grown, offer_of

HEAD = first(3)
ROUNDS = 12
TRUNK = grown(ROUNDS)
ME = SIGNERS[0]
MINE = [next(c for c in contributions if c.owner == ME.peer_id) for _, contributions in TRUNK]


def trunk(rounds: int = ROUNDS, kept_from: int = 1) -> Chain:
    chain = chain_with(HEAD, TRUNK[:rounds])
    chain.forget_before(kept_from)
    return chain


def own_trunk(bytes_max: int = 10**9) -> Chain:
    chain = trunk()
    chain.keep_own(ME.peer_id, bytes_max)
    return chain


# Pages.


def test_a_chain_gives_what_follows_a_record_page_by_page() -> None:
    chain = trunk()
    assert chain.after(HEAD.hash) == [entry for entry, _ in TRUNK]
    assert chain.after(HEAD.hash, limit=5) == [entry for entry, _ in TRUNK[:5]]
    assert chain.after(chain.head.hash) == []
    assert chain.after(child_of(HEAD, [offer_of(ME, HEAD)]).hash) is None
    assert chain.entries_after(4) == [entry for entry, _ in TRUNK[4:]]
    assert chain.rounds_after(TRUNK[4][0].record.hash) == [entry.record for entry, _ in TRUNK[5:]]
    assert all(chain.round_of(entry.record.hash) == entry.record.round for entry, _ in TRUNK)


def test_a_page_is_no_larger_than_a_message_may_be_and_never_empty() -> None:
    chain = Chain(HEAD)
    heavy = {s.peer_id: bytes(64) for s in SIGNERS}
    for _ in range(LOG_ENTRIES_MAX + 1):
        record = bare(chain.head)
        chain.append(record, Certificate(Ballot(0, ME.peer_id), heavy), [])
    page = chain.after(HEAD.hash)
    assert page is not None and 1 < len(page) < LOG_ENTRIES_MAX
    assert sum(entry.bytes_about for entry in page) <= LOG_BYTES_MAX
    following = chain.after(page[-1].record.hash)
    assert following is not None and following[0].record.prev == page[-1].record.hash


# Contributions.


@given(st.integers(0, 14), st.integers(0, 14))
def test_forgotten_contributions_are_announced_as_gone(one: int, other: int) -> None:
    chain = trunk()
    chain.forget_before(one)
    chain.forget_before(other)
    oldest = max(one, other, 1)
    assert chain.oldest == oldest
    entries = chain.after(HEAD.hash)
    assert entries is not None
    for entry, (whole, contributions) in zip(entries, TRUNK, strict=True):
        # The head can only be replayed as long as nothing certifies a snapshot of it.
        kept = entry.record.round >= min(oldest, ROUNDS)
        assert entry.payload_bytes == (whole.payload_bytes if kept else 0)
        assert chain.contributions_of(entry.record) == (contributions if kept else None)
        assert all((chain.contribution(c.digest) is not None) == kept for c in contributions)
    assert len(chain.retained()) == 3 * max(1, ROUNDS + 1 - oldest)


def test_what_the_head_merged_is_forgotten_once_it_is_the_head_no_more() -> None:
    chain = trunk(5)
    chain.forget_before(6)
    assert chain.oldest == 6 and chain.retained() == TRUNK[4][1]
    entry, contributions = TRUNK[5]
    chain.append(entry.record, entry.certificate, contributions)
    chain.forget_before(6)
    assert chain.retained() == contributions


def test_a_round_without_contributions_makes_all_before_it_forgotten() -> None:
    chain = trunk(5)
    entry, _ = TRUNK[5]
    chain.append(entry.record, entry.certificate, None)
    assert chain.oldest == 7
    assert chain.retained() == []


def test_ones_own_contributions_outlive_those_of_others() -> None:
    chain = own_trunk()
    chain.forget_before(ROUNDS + 1)
    assert [chain.own(entry.record) for entry, _ in TRUNK] == MINE
    assert chain.retained() == [*MINE[:-1], *TRUNK[-1][1]]
    for entry, contributions in TRUNK[:-1]:
        assert chain.contributions_of(entry.record) is None, "others must not take the round for whole"
        assert [chain.contribution(c.digest) for c in contributions if c.owner != ME.peer_id] == [None, None]


def test_who_does_not_say_who_it_is_keeps_nothing_of_its_own() -> None:
    chain = trunk(kept_from=ROUNDS + 1)
    assert [chain.own(entry.record) for entry, _ in TRUNK] == [None] * ROUNDS


@given(st.integers(0, ROUNDS + 1), st.lists(st.integers(1, ROUNDS + 1), max_size=4))
def test_of_ones_own_the_newest_that_fit_are_kept(count: int, forgotten: list[int]) -> None:
    size = len(MINE[0].encoded)
    assert {len(mine.encoded) for mine in MINE} == {size}
    chain = own_trunk(bytes_max=count * size + size // 2)
    for number in forgotten:
        chain.forget_before(number)
    old = min(chain.oldest, ROUNDS) - 1
    own = [chain.own(entry.record) for entry, _ in TRUNK]
    lost = max(0, old - count)
    assert own == [None] * lost + MINE[lost:], "beyond the oldest round as many as fit, from it on all"


# Going back.


@given(st.integers(0, ROUNDS), st.integers(1, ROUNDS + 1))
def test_going_back_forgets_what_came_after_and_gives_back_what_was_said(number: int, kept_from: int) -> None:
    chain = own_trunk()
    chain.forget_before(kept_from)
    kept_from = min(kept_from, ROUNDS)
    left = chain.back_to(number)
    assert left == [Left(entry.record, mine) for (entry, _), mine in zip(TRUNK[number:], MINE[number:], strict=True)]
    assert chain.records == [HEAD, *(entry.record for entry, _ in TRUNK[:number])]
    assert len(chain.certificates) == number + 1
    for entry, contributions in TRUNK[number:]:
        assert entry.record.hash not in chain
        assert all(chain.contribution(c.digest) is None for c in contributions)
    for entry, contributions in TRUNK[:number]:
        whole = entry.record.round >= kept_from
        assert chain.contributions_of(entry.record) == (contributions if whole else None)
    assert chain.own(TRUNK[0][0].record) == (MINE[0] if number else None)
    assert len(chain.retained()) == number + 2 * max(0, number + 1 - kept_from)


def test_after_going_back_another_chain_grows() -> None:
    chain = own_trunk()
    chain.forget_before(9)
    chain.back_to(5)
    branch = forked(chain.head, SIGNERS[:2], 3)
    for entry, contributions in branch:
        chain.append(entry.record, entry.certificate, contributions)
    assert chain.head == branch[-1][0].record
    assert [entry.payload_bytes > 0 for entry in chain.entries_after(0)] == [False] * 6 + [True] * 3
    assert chain.contributions_of(branch[-1][0].record) == branch[-1][1]
    assert [left.record for left in chain.back_to(5)] == [entry.record for entry, _ in branch]


def test_what_was_said_and_is_no_longer_here_is_left_without_its_bytes() -> None:
    chain = own_trunk(bytes_max=0)
    chain.forget_before(ROUNDS)
    assert [left.mine for left in chain.back_to(ROUNDS - 2)] == [None, MINE[-1]]


# What is decided.


def test_a_round_is_decided_by_a_normal_record_and_not_by_a_recovery() -> None:
    side = forked(TRUNK[3][0].record, SIGNERS[:2], 2)
    chain = chain_with(HEAD, TRUNK[:4], side)
    heads = [HEAD, *(entry.record for entry, _ in [*TRUNK[:4], *side])]
    decided = [chain.is_decided(head.hash) for head in heads]
    assert decided == [True] * 4 + [False, True, True, False]
    assert [r.kind for r in chain.records[-3:]] == [RECOVERY, NORMAL, NORMAL]
    assert not chain.is_decided(TRUNK[4][0].record.hash), "what it does not know may still be decided"


# Where two chains parted.


def bare(head: Record, salt: int = 0) -> Record:
    """Any record after `head`: its certificate is not looked at here."""
    return Record(RECOVERY, head.hash, head.round + 1, ME.peer_id, salt, (), (ME.peer_id,), BASE, head.tokens)


def bare_chain(records: list[Record]) -> Chain:
    chain = Chain(records[0])
    for record in records[1:]:
        chain.append(record, Certificate(Ballot(0, ME.peer_id), {}), [])
    return chain


def bare_records(start: Record, count: int, salt: int = 0) -> list[Record]:
    return list(itertools.accumulate(range(count), lambda head, _: bare(head, salt), initial=start))


LONG = bare_records(HEAD, 600)


@given(st.integers(0, 600))
def test_the_known_are_the_newest_and_then_ever_sparser_ones(rounds: int) -> None:
    chain = bare_chain(LONG[: rounds + 1])
    known = [chain.round_of(digest) for digest in chain.known()]
    assert known == sorted(known, reverse=True)
    assert known[:8] == list(range(rounds, -1, -1))[:8] and known[-1] == 0
    assert len(known) <= KNOWN_MAX
    for newer, older in itertools.pairwise(known):
        assert newer - older <= max(1, rounds - newer), "no gap is longer than what is already known of"


@given(st.integers(0, 600), st.integers(0, 600), st.integers(1, 40), st.booleans())
def test_two_chains_find_a_record_that_both_have_not_far_below_where_they_parted(
    rounds: int, parted: int, length: int, asks: bool
) -> None:
    parted = min(parted, rounds)
    one = bare_chain(LONG[: rounds + 1])
    other = bare_chain([*LONG[:parted], *bare_records(LONG[parted], length, salt=1)])
    asking, asked = (one, other) if asks else (other, one)
    found = asked.first_known(asking.known())
    assert found is not None and found in asking and found in asked
    ago = len(asking.records) - 1 - parted
    assert parted - asked.round_of(found) <= max(0, ago)
    if ago <= LOG_ENTRIES_MAX:
        page = asked.after(found)
        assert page is not None
        common = [HEAD.hash, found, *(entry.record.hash for entry in page if entry.record.hash in asking)]
        assert LONG[parted].hash in common, "one question is enough"


def test_who_shares_no_record_finds_none() -> None:
    assert bare_chain(LONG[:9]).first_known([sha256(b"elsewhere")]) is None
    assert bare_chain(LONG[:9]).first_known(()) is None


@pytest.mark.parametrize("bytes_max", [0, 10**9])
def test_an_own_contribution_can_be_remembered_without_its_round(bytes_max: int) -> None:
    chain = Chain(HEAD)
    chain.keep_own(ME.peer_id, bytes_max)
    entry, contributions = TRUNK[0]
    chain.append(entry.record, entry.certificate, None)
    chain.remember_own(MINE[0])
    kept: list[Contribution] = [MINE[0]] if bytes_max else []
    assert chain.retained() == kept
    assert chain.own(entry.record) == (MINE[0] if bytes_max else None)
    assert chain.contributions_of(entry.record) is None
    assert len(contributions) == 3
