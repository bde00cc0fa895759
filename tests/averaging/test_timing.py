"""Deadlines: bounded whatever was observed, longer after failures, and nobody is waited for in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from averaging.instance import Instance, Vote
from averaging.record import Ballot
from averaging.round_clock import RoundClock
from averaging.timing import (
    PACE_TIMES,
    SPREAD_TIMES,
    Pace,
    Timing,
    TimingConfig,
    take_over_seconds,
    waited_for,
    worth_joining,
)
from network.seam import PeerID
from tests.averaging.strategies import SIGNERS, child_of, first, offer_of

CONFIG = TimingConfig()
seconds = st.floats(0, 1e6)
PEERS = [s.peer_id for s in SIGNERS]
paces = st.builds(Pace, st.lists(seconds, min_size=1, max_size=SPREAD_TIMES).map(tuple))
maybe_paces = st.just(Pace()) | paces
timings = st.builds(Timing, maybe_paces, maybe_paces, st.dictionaries(st.sampled_from(PEERS), paces))
subsets = st.sets(st.sampled_from(PEERS))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_pace_stays_among_the_last_times(times: list[float]) -> None:
    pace = Pace()
    assert not pace.is_known and (pace.mean, pace.late, pace.high) == (0.0, 0.0, 0.0)
    for time in times:
        pace = pace.observed(time)
    last = times[-PACE_TIMES:]
    assert pace.is_known
    assert pace.times == tuple(times[-SPREAD_TIMES:])
    assert min(last) <= pace.mean <= max(last)
    assert pace.high >= pace.mean + pace.mean / 2
    assert pace.late >= pace.mean + pace.mean / 5


@given(st.lists(seconds, min_size=4, max_size=4), st.lists(seconds, min_size=3, max_size=3), st.permutations(range(7)))
def test_three_odd_times_of_seven_do_not_move_a_pace_beyond_the_rest(
    usual: list[float], odd: list[float], order: list[int]
) -> None:
    pace = Pace()
    for at in order:
        pace = pace.observed([*usual, *odd][at])
    assert min(usual) <= pace.mean <= max(usual)


def test_a_new_pace_is_learnt_within_seven_times() -> None:
    pace = Pace((3.0,) * PACE_TIMES)
    for _ in range(PACE_TIMES):
        pace = pace.observed(1.0)
    assert (pace.mean, pace.high) == (1.0, 1.5)


def test_who_is_regular_is_late_soon_and_who_varies_is_given_time() -> None:
    regular = Pace((1.0, 1.01) * PACE_TIMES)
    assert regular.late == regular.mean * 1.2
    varying = Pace((1.0, 1.2, 0.8, 1.1, 0.9) * 3)
    assert varying.mean == 1.0
    assert varying.late == 1.0 + 4 * (varying.times[3] - 1.0)
    assert Pace((1.0, 1.01)).late > 1.5, "too few times to call it regular"


def test_stragglings_among_the_last_times_make_nobody_late_later() -> None:
    usual = (1.0, 1.02, 0.98, 1.04, 0.96)
    for odd in ((), (20.0,), (20.0, 7.0)):
        assert 1.2 <= Pace((*usual, *odd, *usual)).late < 1.35


def test_what_was_committed_without_a_proposal_teaches_no_decision() -> None:
    timing = Timing().committed(3.0, None)
    assert timing.interval == Pace((3.0,)) and not timing.decide.is_known
    assert timing.committed(4.0, 0.5) == Timing(Pace((3.0, 4.0)), Pace((0.5,)))


@given(timings, subsets, subsets)
def test_only_the_missing_are_waited_for_and_the_unknown_always_are(
    timing: Timing, present: set[PeerID], missing: set[PeerID]
) -> None:
    missing -= present
    peers = waited_for(timing, sorted(present), sorted(missing))
    assert set(peers) <= missing
    assert peers == sorted(peers)
    assert {p for p in missing if p not in timing.cycles} <= set(peers)


@given(timings, subsets, subsets)
def test_who_is_faster_than_one_waited_for_is_waited_for(
    timing: Timing, present: set[PeerID], missing: set[PeerID]
) -> None:
    missing -= present
    peers = set(waited_for(timing, sorted(present), sorted(missing)))
    slowest = max((timing.cycles[p].mean for p in peers if p in timing.cycles), default=-1.0)
    assert all(p in peers for p in missing if p in timing.cycles and timing.cycles[p].mean <= slowest)


def test_equals_are_waited_for_and_one_ten_times_slower_is_not() -> None:
    pace = {p: Pace((1.0, 1.1)) for p in PEERS[:4]} | {PEERS[4]: Pace((10.0,))}
    timing = Timing(cycles=pace)
    assert waited_for(timing, PEERS[:2], PEERS[2:5]) == sorted(PEERS[2:4])


def test_who_is_hardly_slower_is_waited_for_and_who_costs_much_of_the_rate_is_not() -> None:
    for slow, is_worth_it in ((1.2, True), (1.55, True), (1.6, False)):
        timing = Timing(cycles={p: Pace((1.0,)) for p in PEERS[:3]} | {PEERS[3]: Pace((slow,))})
        # Four at its pace bring 4 / slow a second, three without it 3.
        assert waited_for(timing, PEERS[:3], PEERS[3:4]) == (PEERS[3:4] if is_worth_it else []), slow


@given(st.floats(0.1, 1e3), st.integers(1, 8), st.dictionaries(st.sampled_from(PEERS), st.floats(0, 1e4), max_size=6))
def test_who_comes_late_is_waited_for_if_that_brings_more_a_second(
    ready: float, members: int, expected: dict[PeerID, float]
) -> None:
    chosen = worth_joining(ready, members, expected)
    others = sorted(expected.keys() - set(chosen), key=lambda peer: expected[peer])

    def rate(count: int, last: float) -> float:
        return (members + count) / max(ready, last)

    best = rate(len(chosen), max((expected[peer] for peer in chosen), default=0.0))
    assert best >= rate(0, 0.0) * (1 - 1e-9)
    for count, peer in enumerate(others, start=len(chosen) + 1):
        assert rate(count, expected[peer]) < best * (1 + 1e-9)
        assert expected[peer] > ready, "who is there in time costs nothing"


def test_a_round_does_not_wait_for_who_came_back_in_its_middle_but_for_who_came_at_its_beginning() -> None:
    head = first(4)
    instance = Instance(head, Vote(), head.base)
    for signer in SIGNERS[:3]:
        instance.hold(offer_of(signer, head))
    for timing in (Timing(cycles={p: Pace((10.0,)) for p in PEERS[:4]}), Timing(cycles={PEERS[0]: Pace((10.0,))})):
        clock = RoundClock(100.0, frozenset(head.voters), started=110.0)
        clock.freed = dict.fromkeys(PEERS[:3], 100.0)
        for came, least, most in ((108.0, 110.0, 110.0), (101.0, 111.0, 120.0)):
            clock.came = {PEERS[3]: came}
            close = clock.close_at(instance, timing, CONFIG, lambda peer: True)
            assert close is not None and least <= close <= most, came


def test_who_is_forgotten_is_given_half_of_the_rounds_length_whatever_its_pace() -> None:
    head = first(4)
    instance = Instance(head, Vote(), head.base)
    for signer in SIGNERS[:3]:
        instance.hold(offer_of(signer, head))
    timing = Timing(cycles={p: Pace((12.0,) * PACE_TIMES) for p in PEERS[:4]})
    missing, other = PEERS[3], PEERS[2]

    def close_at(clock: RoundClock) -> float | None:
        return clock.close_at(instance, timing, CONFIG, lambda peer: True)

    clock = RoundClock(100.0, frozenset(head.voters), started=110.0)
    clock.freed = {missing: 100.0, other: 100.0}
    assert close_at(clock) == 100.0 + timing.cycle(missing).late
    clock.forget(missing)
    assert close_at(clock) == 115.0 and clock.freed == {other: 100.0}
    clock.came = {missing: 108.0, other: 101.0}
    assert close_at(clock) == 110.0, "a pace after it came would be too late to bring more a second"
    clock.forget(missing)
    assert close_at(clock) == 115.0 and clock.came == {other: 101.0}
    clock.forget(missing)


def test_one_odd_round_does_not_change_a_pace() -> None:
    pace = Pace()
    for time in (1.0, 1.0, 40.0, 1.0, 1.0):
        pace = pace.observed(time)
    assert pace.mean == 1.0
    assert pace.high == 1.5


attempts = st.integers(0, 40)
ranks = st.integers(0, 16)


@given(timings, seconds, ranks, attempts)
def test_a_take_over_waits_between_its_bounds(timing: Timing, length: float, rank: int, attempt: int) -> None:
    wait = take_over_seconds(timing, CONFIG, length, rank, attempt)
    assert CONFIG.delay_seconds_min <= wait <= CONFIG.delay_seconds_max


@given(timings, seconds, ranks, attempts)
def test_later_ranks_and_later_attempts_wait_longer(timing: Timing, length: float, rank: int, attempt: int) -> None:
    wait = take_over_seconds(timing, CONFIG, length, rank, attempt)
    assert wait <= take_over_seconds(timing, CONFIG, length, rank + 1, attempt)
    assert wait <= take_over_seconds(timing, CONFIG, length, rank, attempt + 1)


def test_ranks_are_a_round_trip_apart_and_attempts_double() -> None:
    timing = Timing(decide=Pace((0.5,) * 3), interval=Pace((100.0,) * 3))
    waits = [take_over_seconds(timing, CONFIG, 10.0, rank, 0) for rank in range(3)]
    assert waits == [1.0, 1.5, 2.0]
    assert [take_over_seconds(timing, CONFIG, 10.0, 0, n) for n in range(4)] == [1.0, 2.0, 4.0, 8.0]


@given(timings, st.sets(st.sampled_from(range(4)), min_size=1), st.floats(0, 1e4), st.floats(0, 1e4), st.data())
def test_a_group_closes_within_twice_its_length(
    timing: Timing, offered: set[int], began: float, opened: float, data: st.DataObject
) -> None:
    alive = data.draw(subsets)
    head = first(4)
    instance = Instance(head, Vote(), head.base)
    for number in offered:
        instance.hold(offer_of(SIGNERS[number], head))
    clock = RoundClock(began, frozenset(head.voters), started=began + opened)
    clock.freed = data.draw(st.dictionaries(st.sampled_from(PEERS), seconds))
    close = clock.close_at(instance, timing, CONFIG, alive.__contains__)
    assert close is not None
    grace = close - (began + opened)
    assert -1e-6 <= grace <= min(2 * max(opened, CONFIG.delay_seconds_min), CONFIG.delay_seconds_max) + 1e-6
    if offered == set(range(4)):
        assert grace == 0, "nobody is missing"


def test_the_grace_starts_when_half_of_the_living_and_as_many_as_needed_have_offered() -> None:
    head = first(4)
    instance = Instance(head, Vote(), head.base)
    clock = RoundClock(0.0, frozenset(head.voters))
    instance.hold(offer_of(SIGNERS[0], head))
    clock.start_if_enough(1.0, instance, 1, lambda peer: True)
    assert clock.started is None, "one of four"
    instance.hold(offer_of(SIGNERS[1], head))
    clock.start_if_enough(2.0, instance, 3, lambda peer: True)
    assert clock.started is None, "the run demands three"
    clock.start_if_enough(3.0, instance, 2, lambda peer: True)
    assert clock.started == 3.0
    alone = RoundClock(0.0, frozenset(head.voters))
    alone.start_if_enough(1.0, instance, 1, lambda peer: peer == SIGNERS[0].peer_id)
    assert alone.started == 1.0, "the others are gone"


def test_the_grace_starts_some_time_though_those_expected_live_and_cannot_offer() -> None:
    head = first(4)
    instance = Instance(head, Vote(), head.base)
    clock = RoundClock(0.0, frozenset(head.voters))
    assert clock.start_at(10.0) is None, "nobody has offered"
    instance.hold(offer_of(SIGNERS[0], head))
    for now in (1.0, 5.0, 10.9):
        clock.start_if_enough(now, instance, 1, lambda peer: True, patience=10.0)
        assert clock.started is None
        assert clock.start_at(10.0) == 11.0
    clock.start_if_enough(11.0, instance, 1, lambda peer: True, patience=10.0)
    assert clock.started == 11.0
    assert clock.start_at(10.0) is None
    short = RoundClock(0.0, frozenset(head.voters))
    short.start_if_enough(100.0, instance, 2, lambda peer: True, patience=10.0)
    assert short.started is None and short.start_at(10.0) is None, "the run demands two"


def test_nothing_closes_while_a_proposal_is_in_the_air_and_only_voters_take_over() -> None:
    head = first(3)
    instance = Instance(head, Vote(), head.base)
    instance.hold(offer_of(SIGNERS[0], head))
    clock = RoundClock(0.0, frozenset(head.voters), started=1.0)
    assert clock.close_at(instance, Timing(), CONFIG, lambda peer: True) is not None
    clock.proposed = clock.ballot_seen = 2.0
    assert clock.close_at(instance, Timing(), CONFIG, lambda peer: True) is None
    for voter in head.voters:
        at = clock.take_over_at(voter, instance, Timing(), CONFIG, lambda peer: True)
        assert at is not None and at > 2.0
    assert clock.take_over_at(SIGNERS[5].peer_id, instance, Timing(), CONFIG, lambda peer: True) is None


def test_the_lead_waits_for_itself_only_if_it_may_not_propose() -> None:
    head = first(2)
    lead = head.lead
    offer = offer_of(SIGNERS[0], head)
    clock = RoundClock(0.0, frozenset(head.voters), started=1.0)
    free = Instance(head, Vote(), head.base)
    free.hold(offer)
    assert clock.take_over_at(lead, free, Timing(), CONFIG, lambda peer: True) is None
    bound = Instance(head, Vote(Ballot(0, lead), Ballot(0, lead), child_of(head, [offer])), head.base)
    bound.hold(offer)
    assert clock.take_over_at(lead, bound, Timing(), CONFIG, lambda peer: True) is not None
