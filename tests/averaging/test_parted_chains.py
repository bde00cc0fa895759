"""Catching up with a chain that parted from one's own (R9): the better one is kept whole, the worse dropped."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.catch_up import DOUBT_SECONDS, CatchUp
from averaging.chain import Chain
from averaging.instance import Instance, Vote
from averaging.messages import GetLog, Log, LogEntry
from averaging.record import Certificate, Record, sha256
from averaging.serving import asked_for
from tests.averaging.strategies import SIGNERS, Grown, chain_with, first, forked, grown, recovery_of

HEAD = first(3)
COMMON = grown(4)
PARTING = COMMON[-1][0].record
MINE = forked(PARTING, SIGNERS[:1], 3)
"""30 tokens more than at the parting, in four rounds."""
BETTER = grown(3, head=PARTING)
WORSE = forked(PARTING, SIGNERS[1:2], 2)
ME, OTHER, THIRD = (s.peer_id for s in SIGNERS[:3])


def own_chain() -> Chain:
    return chain_with(HEAD, COMMON, MINE)


def entries(piece: Grown) -> list[LogEntry]:
    return [entry for entry, _ in piece]


def page(piece: Sequence[LogEntry], after: Record = PARTING, number: int | None = None) -> Log:
    return Log(after.hash, piece[-1].record.round if number is None else number, tuple(piece))


def catch_up(snapshot_bytes: int = 10**9) -> CatchUp:
    following = CatchUp(SIGNERS[0], snapshot_bytes)
    following.notice(OTHER, 100, 0.0)
    following.notice(THIRD, 100, 0.0)
    return following


def ahead(following: CatchUp) -> list[str]:
    """Who is believed to know more."""
    return sorted(following._ahead)


# Better and worse.


def test_a_better_chain_is_pending_from_where_it_parted() -> None:
    following, own = catch_up(), own_chain()
    assert following.receive(OTHER, page(entries(BETTER)), own) is None
    assert following.base == PARTING.hash
    assert following.pending == entries(BETTER)
    assert not following.follows(own.head) and following.leads_away(own.head)
    assert following.next(own, 0.0) == BETTER[0][0]
    assert following.lacking(3) == [c.digest for _, contributions in BETTER for c in contributions]
    assert ahead(following) == [THIRD]


def test_a_worse_chain_is_dropped() -> None:
    following, own = catch_up(), own_chain()
    assert following.receive(OTHER, page(entries(WORSE)), own) is None
    assert not following.pending and following.base is None
    assert not following.leads_away(own.head)
    assert ahead(following) == [THIRD]


def test_who_told_of_a_worse_chain_is_asked_again_though_it_never_says_how_far_it_has_come() -> None:
    following, own = catch_up(), own_chain()
    following.receive(OTHER, page(entries(WORSE)), own)
    following.lost(THIRD, own.head)
    assert ahead(following) == []
    for at in range(20):  # Its offers and votes name records, not rounds.
        following.notice(OTHER, 0, float(at))
        assert (ahead(following) == [OTHER]) == (at >= DOUBT_SECONDS)
    following.receive(OTHER, page(entries(WORSE)), own)
    following.notice(OTHER, 0, 20.0)
    assert ahead(following) == [], "it has come no further"
    following.notice(OTHER, WORSE[-1][0].record.round, 10**9)
    assert ahead(following) == [], "that is known to be worse"
    following.notice(OTHER, WORSE[-1][0].record.round + 1, 21.0)
    assert ahead(following) == [OTHER]


def test_of_two_chains_with_equal_tokens_the_lower_hash_is_better() -> None:
    equal = forked(PARTING, SIGNERS[1:2], 3)
    own = own_chain()
    assert equal[-1][0].record.tokens == own.head.tokens
    following = catch_up()
    following.receive(OTHER, page(entries(equal)), own)
    assert following.leads_away(own.head) == (equal[-1][0].record.hash < own.head.hash)
    other = chain_with(HEAD, COMMON, equal)
    back = catch_up()
    back.receive(OTHER, page(entries(MINE)), other)
    assert back.leads_away(other.head) != following.leads_away(own.head), "exactly one of the two moves"


def test_a_chain_that_grows_page_by_page_is_judged_when_all_of_it_is_here() -> None:
    following, own = catch_up(), own_chain()
    first_page, rest = entries(BETTER)[:1], entries(BETTER)[1:]
    last = BETTER[-1][0].record.round
    assert following.receive(OTHER, page(first_page, number=last), own) is None
    assert following.pending == first_page
    assert not following.leads_away(own.head), "it is not the better one yet"
    assert OTHER in ahead(following)
    assert following.known(own)[0] == first_page[0].record.hash
    assert following.receive(OTHER, page(rest, after=first_page[0].record), own) is None
    assert following.pending == entries(BETTER)
    assert following.leads_away(own.head)


def test_a_chain_that_proves_worse_at_its_end_is_dropped_then() -> None:
    following, own = catch_up(), own_chain()
    last = WORSE[-1][0].record.round
    following.receive(OTHER, page(entries(WORSE)[:2], number=last), own)
    assert following.pending == entries(WORSE)[:2]
    following.receive(OTHER, page(entries(WORSE)[2:], after=WORSE[1][0].record), own)
    assert not following.pending and ahead(following) == [THIRD]


def test_of_two_certified_chains_the_better_one_is_kept() -> None:
    best = grown(3, head=PARTING, weight=20)
    assert best[-1][0].record.is_better(BETTER[-1][0].record)
    for first_heard, second in ((best, BETTER), (BETTER, best)):
        following, own = catch_up(), own_chain()
        assert following.receive(OTHER, page(entries(first_heard)), own) is None
        assert following.receive(THIRD, page(entries(second)), own) is None
        assert following.pending == entries(best)
        assert following.base == PARTING.hash


def test_of_two_that_parted_at_different_records_too() -> None:
    earlier = COMMON[1][0].record
    best = grown(5, head=earlier, weight=30)
    for first_heard, second in ((best, BETTER), (BETTER, best)):
        following, own = catch_up(), own_chain()
        for source, piece in ((OTHER, first_heard), (THIRD, second)):
            after = earlier if piece is best else PARTING
            assert following.receive(source, page(entries(piece), after), own) is None
        assert following.pending == entries(best)
        assert following.base == earlier.hash


def test_a_better_chain_takes_the_place_of_a_gap_on_ones_own() -> None:
    own, gap = own_chain(), entries(grown(1, head=MINE[-1][0].record, signers=SIGNERS[:1]))
    following = catch_up()
    following.receive(OTHER, page(gap, own.head), own)
    assert following.follows(own.head)
    following.receive(THIRD, page(entries(BETTER)), own)
    assert following.pending == entries(BETTER) and following.leads_away(own.head)
    following.receive(OTHER, page(gap, own.head), own)
    assert following.pending == entries(BETTER)


def test_ones_own_chain_as_others_tell_it_is_no_other_chain() -> None:
    following, own = catch_up(), own_chain()
    assert following.receive(OTHER, page(entries(MINE)), own) is None
    assert not following.pending and ahead(following) == [THIRD]


def test_a_lie_about_another_chain_is_named() -> None:
    following, own = catch_up(), own_chain()
    lie = replace(BETTER[1][0], certificate=Certificate(BETTER[1][0].certificate.ballot, {}))
    assert following.receive(OTHER, page([BETTER[0][0], lie, BETTER[2][0]]), own) is not None
    assert following.pending == entries(BETTER)[:1]
    foreign = replace(recovery_of(PARTING, [SIGNERS[1]]), certificate=MINE[0][0].certificate)
    assert catch_up().receive(OTHER, page([foreign]), own) is not None


def test_a_recovery_after_ones_own_head_follows_it() -> None:
    own = chain_with(HEAD, COMMON)
    following = catch_up()
    following.receive(OTHER, page(entries(WORSE)), own)
    assert following.follows(own.head) and not following.leads_away(own.head)
    assert following.pending == entries(WORSE), "nothing of one's own is better"


def test_a_commit_of_ones_own_makes_the_gap_another_chain() -> None:
    own = chain_with(HEAD, COMMON)
    following = catch_up()
    following.receive(OTHER, page(entries(WORSE)), own)
    entry, contributions = BETTER[0]
    own.append(entry.record, entry.certificate, contributions)
    following.applied(own.head)
    assert following.pending == entries(WORSE) and following.base == PARTING.hash
    assert not following.leads_away(own.head)
    assert following.receive(OTHER, page(entries(WORSE)), own) is None
    assert not following.pending, "now that all of it is here it is judged"


# Conversations.


@given(st.integers(0, 4), st.integers(0, 6), st.integers(0, 6), st.integers(1, 4), st.sampled_from([10, 25]))
def test_two_peers_that_tell_each_other_all_agree_on_the_better_chain(
    parted: int, mine: int, others: int, limit: int, weight: int
) -> None:
    """However few records a page holds, and wherever the chains parted."""
    parting = chain_with(HEAD, COMMON[:parted]).head
    one = chain_with(HEAD, COMMON[:parted], forked(parting, SIGNERS[:2], mine))
    other = chain_with(HEAD, COMMON[:parted], grown(others, head=parting, weight=weight))
    better = other if other.head.is_better(one.head) else one
    for own, far in ((one, other), (other, one)):
        following = CatchUp(SIGNERS[0], 10**9)
        following.notice(OTHER, far.head.round, 0.0)
        while following.behind_since is not None:
            assert following.whom_to_ask(own.head, 0.0) == OTHER
            after = far.first_known(following.known(own))
            assert after is not None
            found = far.after(after, limit)
            assert found is not None
            if not found:
                following.lost(OTHER, own.head)
                break
            assert following.receive(OTHER, Log(after, far.head.round, tuple(found)), own) is None
        moves = following.leads_away(own.head) or (following.follows(own.head) and bool(following.pending))
        descends, is_news = own.head.hash in far, far.head.hash not in own
        assert moves == (is_news and (far is better or descends))
        if moves:
            assert following.pending[-1].record == far.head


def conversation(mine: Chain, other: Chain, questions: int) -> tuple[CatchUp, int]:
    """Asks until the whole of the other chain is pending; and how often that was."""
    following = CatchUp(SIGNERS[0], 10**9)
    for number in range(1, questions + 1):
        for log in asked_for(GetLog(following.known(mine)), other, Instance(other.head, Vote())):
            assert isinstance(log, Log)
            assert following.receive(OTHER, log, mine) is None
        if following.pending and following.pending[-1].record == other.head:
            return following, number
    raise AssertionError(f"not found in {questions} questions; {len(following.pending)} are pending")


LONG = grown(450)


@pytest.mark.parametrize("ago", [40, 130, 260, 300, 400])
def test_a_parting_long_ago_is_found_though_one_page_may_hold_nothing_new(ago: int) -> None:
    common = LONG[: 450 - ago]
    parting = common[-1][0].record
    mine = chain_with(HEAD, common, forked(parting, SIGNERS[:1], ago))
    found, questions = conversation(mine, chain_with(HEAD, LONG, grown(3, head=LONG[-1][0].record)), 12)
    assert found.base == parting.hash and found.leads_away(mine.head)
    assert questions <= 2 + 2 * ago / 128 + 2


def test_a_side_whose_teller_went_away_does_not_keep_out_a_better_one() -> None:
    """Not even one that is better as a whole and not in its first page."""
    parting = LONG[2][0].record
    mine = chain_with(HEAD, LONG[:3], forked(parting, SIGNERS[:1], 300, weight=30))
    better = chain_with(HEAD, LONG)
    stale = forked(parting, SIGNERS[1:2], 200, weight=40)
    following = CatchUp(SIGNERS[0], 10**9)
    following.receive(OTHER, page(entries(stale), parting, number=900), mine)
    assert following.pending == entries(stale) and not following.leads_away(mine.head)
    following.lost(OTHER, mine.head)
    for _ in range(9):
        for log in asked_for(GetLog(following.known(mine)), better, Instance(better.head, Vote())):
            assert isinstance(log, Log)
            following.receive(THIRD, log, mine)
    assert following.pending[-1].record == better.head


def test_whoever_is_asked_for_the_log_answers_from_the_newest_common_record() -> None:
    own, far = own_chain(), chain_with(HEAD, COMMON, BETTER)
    instance = Instance(far.head, Vote())
    (answer,) = asked_for(GetLog(own.known()), far, instance)
    assert answer == page(entries(BETTER))
    assert asked_for(GetLog(far.known()), far, instance) == []
    assert asked_for(GetLog((sha256(b"elsewhere"),)), far, instance) == []


# The state.


def moving(kept_from: int, piece: Grown = BETTER, snapshot_bytes: int = 10**9) -> tuple[CatchUp, Chain]:
    following, own = catch_up(snapshot_bytes), own_chain()
    own.forget_before(kept_from)
    following.receive(OTHER, page(entries(piece)), own)
    following.lost(OTHER, own.head)
    following.lost(THIRD, own.head)
    return following, own


@pytest.mark.parametrize("kept_from", range(1, 9))
def test_a_state_older_than_all_that_is_kept_must_be_fetched(kept_from: int) -> None:
    """The state at the parting is worked out from a snapshot before round `kept_from`."""
    following, own = moving(kept_from)
    is_old = PARTING.round < kept_from - 1
    assert following.wants_snapshot(own) == is_old
    assert (following.next(own, 0.0) is None) == is_old


def test_a_chain_that_is_not_better_yet_is_no_reason_to_fetch_a_state() -> None:
    following, own = moving(8, BETTER[:1])
    assert not following.wants_snapshot(own)
    assert not moving(1, BETTER[:1], snapshot_bytes=1)[0].wants_snapshot(own)


def test_a_heavy_move_is_a_jump_unless_nobody_has_the_state() -> None:
    following, own = moving(1, snapshot_bytes=1)
    assert following.wants_snapshot(own) and following.next(own, 0.0) is None
    following.snapshot_failed()
    assert not following.wants_snapshot(own)
    assert following.next(own, 0.0) == BETTER[0][0]


def test_a_move_whose_contributions_are_gone_is_a_jump_or_is_given_up() -> None:
    gone = [replace(entry, payload_bytes=0) for entry in entries(BETTER)]
    following, own = catch_up(), own_chain()
    following.receive(OTHER, page(gone), own)
    following.lost(THIRD, own.head)
    assert following.wants_snapshot(own)
    following.snapshot_failed()
    assert not following.pending and following.base is None
    assert not following.wants_snapshot(own)


def test_a_recovery_has_no_contributions_that_could_be_gone() -> None:
    far = forked(PARTING, SIGNERS[1:3], 3)
    following, own = moving(1, far)
    assert far[0][0].payload_bytes == 0
    assert not following.wants_snapshot(own)
    assert following.next(own, 1e6) == far[0][0]
    assert following.next(own, 2e6) == far[0][0], "there is nothing to wait for"


def test_a_state_on_the_better_chain_or_before_the_parting_is_attested_and_no_other() -> None:
    following, own = moving(8)
    assert following.child_of(HEAD.hash, own) == COMMON[0][0].record
    for (entry, _), (child, _) in itertools.pairwise(COMMON):
        assert following.child_of(entry.record.hash, own) == child.record
    assert following.child_of(PARTING.hash, own) == BETTER[0][0].record
    assert following.child_of(BETTER[1][0].record.hash, own) == BETTER[2][0].record
    assert following.child_of(BETTER[-1][0].record.hash, own) is None, "nothing follows it yet"
    for entry, _ in MINE:
        assert following.child_of(entry.record.hash, own) is None, "that chain is to be left"
    assert following.up_to(BETTER[1][0].record.hash) == entries(BETTER)[:2]
    assert following.up_to(PARTING.hash) == []


def test_while_a_chain_is_not_better_it_attests_nothing() -> None:
    following, own = moving(8, BETTER[:1])
    heads = [HEAD, *(entry.record for entry, _ in [*COMMON, *MINE, *BETTER])]
    assert [following.child_of(head.hash, own) for head in heads] == [None] * len(heads)


def test_what_was_replayed_of_the_better_chain_is_no_longer_pending() -> None:
    following, own = moving(1)
    own.back_to(PARTING.round)
    for number, (entry, contributions) in enumerate(BETTER):
        own.append(entry.record, entry.certificate, contributions)
        following.applied(own.head)
        assert following.pending == entries(BETTER)[number + 1 :]
        assert following.next(own, 0.0) == (BETTER[number + 1][0] if number < 2 else None)
    assert following.base is None
