"""When to stop waiting: deadlines that follow what was observed, never a constant that a user must guess.

All times are local monotonic seconds; safety never depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from network.seam import PeerID


@final
@dataclass(frozen=True, slots=True)
class TimingConfig:
    """Bounds on what is learnt; none of them needs tuning for a network or a model."""

    heartbeat_seconds: float = 2.0
    """A link silent for so long carries a sign of life."""
    silence_seconds: float = 5.0
    """A peer not heard for so long is not waited for, and not named as a voter."""
    delay_seconds_min: float = 0.05
    """No deadline is shorter: it absorbs the scheduler's noise."""
    delay_seconds_max: float = 60.0
    attempts_doubling_max: int = 6


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """A running mean and mean deviation, as TCP keeps for its round-trip time (RFC 6298: gains 1/8 and 1/4)."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def observed(self, value: float) -> Estimate:
        if self.count == 0:
            return Estimate(value, value / 2, 1)
        error = value - self.mean
        return Estimate(self.mean + error / 8, self.deviation + (abs(error) - self.deviation) / 4, self.count + 1)

    @property
    def high(self) -> float:
        """What a further observation will rarely exceed."""
        return self.mean + 4 * self.deviation


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """What one peer has learnt of its swarm's pace."""

    interval: Estimate = field(default_factory=Estimate)
    """Between two commits."""
    decide: Estimate = field(default_factory=Estimate)
    """From a proposal to its commit: about one round trip and one durable write."""
    arrivals: Mapping[PeerID, Estimate] = field(default_factory=dict)
    """Of each peer's offer after the moment when enough had come to start the clock."""

    def committed(self, interval: float, decide: float | None) -> Timing:
        after = self.decide if decide is None else self.decide.observed(decide)
        return replace(self, interval=self.interval.observed(interval), decide=after)

    def arrived(self, peer: PeerID, offset: float) -> Timing:
        before = self.arrivals.get(peer, Estimate())
        return replace(self, arrivals={**self.arrivals, peer: before.observed(max(0.0, offset))})

    def without(self, peer: PeerID) -> Timing:
        return replace(self, arrivals={p: e for p, e in self.arrivals.items() if p != peer})


def grace_seconds(
    timing: Timing, config: TimingConfig, length: float, present: int, missing: Sequence[PeerID]
) -> float:
    """How long after the clock started a round that has lasted `length` seconds stays open for the `missing` peers.

    With expected arrivals a_1 <= a_2 <= ..., it waits for the k that maximises (present + k) / (length + a_k): the most
    contributions a second; and for those k until they are really late. At least about one round trip, at most as long
    again as the round has lasted. If all of them come, the group closes at once, so a long grace costs only when
    somebody has just failed.
    """
    length = max(length, config.delay_seconds_min)
    # A peer never seen arriving is expected within half the round so far, so that it gets its first chance.
    unknown = Estimate(length / 4, length / 16, 1)
    best, wait = present / length, 0.0
    estimates = sorted((timing.arrivals.get(p, unknown) for p in missing), key=lambda e: e.mean + e.deviation)
    for count, estimate in enumerate(estimates, start=1):
        rate = (present + count) / (length + estimate.mean + estimate.deviation)
        if rate >= best:
            best, wait = rate, max(wait, estimate.high)
    floor = max(config.delay_seconds_min, timing.decide.mean)
    return min(max(wait, floor), max(length, floor), config.delay_seconds_max)


def take_over_seconds(timing: Timing, config: TimingConfig, length: float, rank: int, attempts: int) -> float:
    """How long a voter waits for someone else's proposal to be decided before it prepares a ballot of its own.

    `rank` spreads the voters so that one tries first; each failed attempt doubles the wait. At most about one round.
    """
    round_trip = max(config.delay_seconds_min, timing.decide.mean if timing.decide.count else length / 4)
    wait = timing.decide.high if timing.decide.count else length / 2
    wait = min(max(wait, 2 * round_trip), max(timing.interval.high, 4 * round_trip))
    wait *= 2.0 ** min(attempts, config.attempts_doubling_max)
    return min(wait + rank * round_trip, config.delay_seconds_max)
