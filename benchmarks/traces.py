"""Seeded traces of when peers are ready, and rounds that close by one rule or another over the same trace."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from averaging.round_clock import RoundClock
from averaging.timing import Timing, TimingConfig
from network.seam import PeerID

RECENT_ROUNDS = 4
"""As in `averaging.rounds`: who contributed to none of so many is not expected."""
DECIDE_SECONDS = 0.1
"""From closing to commit."""


@final
@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Seconds; every peer has a pace of its own, and every training varies around it."""

    name: str
    peers: int
    pace_seconds: float = 5.0
    pace_sigma: float = 0.25
    """Of the logarithm of the peers' paces."""
    training_sigma: float = 0.1
    """Of the logarithm of one peer's trainings."""
    straggling: float = 0.1
    """The share of trainings that take much longer: by up to as much as if the peer was absent for some rounds."""
    straggling_factors: tuple[float, float] = (5.0, 20.0)
    slow_share: float = 0.0
    """Of the peers, rounded down: always so slow as `slow_factors` say."""
    slow_factors: tuple[float, float] = (3.0, 6.0)
    change_factor: float = 1.0
    """From the middle on all paces are multiplied by it."""


PUNCTUAL_PACE_MAX = 1.5
"""A peer that always takes so many times the median pace is not punctual, however regular."""


@final
@dataclass(frozen=True, slots=True)
class Training:
    seconds: float
    is_punctual: bool


@final
class Trace:
    """What each peer's n-th training takes: the same for every rule, in whatever round it falls."""

    def __init__(self, config: TraceConfig, seed: int, rounds: int) -> None:
        rng = random.Random(f"{config.name} {config.peers} {seed}")
        self.config = config
        self.rounds = rounds
        self.names = [PeerID(f"peer-{number:02}") for number in range(config.peers)]
        num_slow = int(config.slow_share * config.peers)
        paces = [config.pace_seconds * math.exp(config.pace_sigma * rng.gauss(0, 1)) for _ in self.names]
        paces = [p * (rng.uniform(*config.slow_factors) if n < num_slow else 1) for n, p in enumerate(paces)]
        usual = statistics.median(paces)
        self.trainings: dict[PeerID, list[Training]] = {}
        for name, pace in zip(self.names, paces, strict=True):
            may_be_punctual = pace <= PUNCTUAL_PACE_MAX * usual
            self.trainings[name] = [self._draw(rng, pace, may_be_punctual, n) for n in range(rounds + 1)]

    def _draw(self, rng: random.Random, pace: float, may_be_punctual: bool, number: int) -> Training:
        config = self.config
        seconds = pace * math.exp(config.training_sigma * rng.gauss(0, 1))
        factor = rng.uniform(*config.straggling_factors)
        straggles = rng.random() < config.straggling
        if number > self.rounds // 2:
            seconds *= config.change_factor
        return Training(seconds * (factor if straggles else 1.0), may_be_punctual and not straggles)


@final
@dataclass(slots=True)
class Arrived:
    """A round's offers, as `RoundClock` looks at them."""

    members_max: int
    base: bytes | None = b"base"
    offered: set[PeerID] = field(default_factory=set)

    def usable_owners(self) -> set[PeerID]:
        return self.offered


CloseAt = Callable[[RoundClock, Arrived, Timing], "float | None"]
"""When the group closes, as far as is known now; None while its grace has not begun."""


def _everybody(peer: PeerID) -> bool:
    """Stragglers are heard: their links live, as those of a busy machine do."""
    return True


def adaptive(config: TimingConfig) -> CloseAt:
    """The rule of production."""
    return lambda clock, arrived, timing: clock.close_at(arrived, timing, config, _everybody)


def fixed(seconds: float) -> CloseAt:
    """A constant after the quorum, cut short only when all who contributed lately have offered."""

    def close_at(clock: RoundClock, arrived: Arrived, timing: Timing) -> float | None:
        if clock.started is None:
            return None
        return clock.started + (0.0 if clock.contributors <= arrived.offered else seconds)

    return close_at


@final
@dataclass(slots=True)
class Tally:
    """What happened in the rounds of one trace under one rule."""

    waits: list[float] = field(default_factory=list)
    """From the quorum to the closing, by round."""
    seconds: float = 0.0
    members: int = 0
    punctual: int = 0
    punctual_left_out: int = 0
    straggling: int = 0
    straggling_included: int = 0
    """In the round in which they began."""

    def add(self, training: Training, included: bool) -> None:
        if training.is_punctual:
            self.punctual += 1
            self.punctual_left_out += not included
        else:
            self.straggling += 1
            self.straggling_included += included


WARM_ROUNDS = 10
"""Nothing is known of anybody yet; not counted, for either rule."""


def play(trace: Trace, close_at: CloseAt) -> Tally:
    """A peer trains, offers to the round in the air, waits for its commit, trains anew; who offers between closing and
    commit is too late, and trains anew as well.
    """
    tally, timing, now = Tally(), Timing(), 0.0
    done = dict.fromkeys(trace.names, 0)
    ready_at = {name: trace.trainings[name][0].seconds for name in trace.names}
    fresh = set(trace.names)
    """Whose training began with this round."""
    freed: dict[PeerID, float] = {}
    recent: list[set[PeerID]] = [set(trace.names)]
    for number in range(trace.rounds):
        clock = RoundClock(now, frozenset().union(*recent), freed=freed)
        arrived = Arrived(len(trace.names))
        closed, timing = _collect(clock, arrived, timing, close_at, ready_at)
        assert clock.started is not None
        commit = closed + DECIDE_SECONDS
        late = {name for name, at in ready_at.items() if at <= commit and name not in arrived.offered}
        for name in late:
            timing = _observe(clock, timing, name, ready_at[name])
        if number >= WARM_ROUNDS:
            tally.waits.append(closed - clock.started)
            tally.seconds += commit - now
            tally.members += len(arrived.offered)
            for name in fresh:
                tally.add(trace.trainings[name][done[name]], name in arrived.offered)
        timing, now = timing.committed(commit - now, DECIDE_SECONDS), commit
        fresh = arrived.offered | late
        for name in fresh:
            done[name] += 1
            ready_at[name] = now + trace.trainings[name][done[name]].seconds
        freed = {**clock.freed, **dict.fromkeys(fresh, now)}
        recent = [*recent, arrived.offered][-RECENT_ROUNDS:]
    return tally


def _collect(
    clock: RoundClock, arrived: Arrived, timing: Timing, close_at: CloseAt, ready_at: dict[PeerID, float]
) -> tuple[float, Timing]:
    """Until the group closes: when, and what was learnt."""
    last = clock.began
    for at, name in sorted((at, name) for name, at in ready_at.items()):
        close = close_at(clock, arrived, timing)
        if close is not None and max(close, last) < at:
            return max(close, last), timing
        last = max(last, at)
        arrived.offered.add(name)
        timing = _observe(clock, timing, name, at)
        clock.start_if_enough(last, arrived, 1, _everybody)
    close = close_at(clock, arrived, timing)
    assert close is not None
    return max(close, last), timing


def _observe(clock: RoundClock, timing: Timing, name: PeerID, at: float) -> Timing:
    """As `averaging.offering` does."""
    freed = clock.freed.pop(name, None)
    return timing if freed is None else timing.cycled(name, at - freed)


def total(tallies: Sequence[Tally]) -> Tally:
    whole = Tally()
    for tally in tallies:
        whole.waits += tally.waits
        for name in Tally.__slots__[1:]:
            setattr(whole, name, getattr(whole, name) + getattr(tally, name))
    return whole
