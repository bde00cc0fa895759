"""When to stop waiting: deadlines that follow what was observed, never a constant that a user must guess.

All times are local monotonic seconds; safety never depends on them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import final

from network.seam import PeerID


@final
@dataclass(frozen=True, slots=True)
class TimingConfig:
    """Bounds on what is learnt; none of them needs tuning for a network or a model."""

    heartbeat_seconds: float = 2.0
    """A link silent for so long carries a sign of life."""
    heartbeat_seconds_max: float = 6.0
    """Where rounds are long, the pause follows them up to this."""
    idle_seconds_max: float = 120.0
    """And up to this on links on which no vote depends."""
    silence_seconds: float = 5.0
    """A peer not heard for so long is not waited for, and not named as a voter; later where it announced so."""
    delay_seconds_min: float = 0.05
    """No deadline is shorter: it absorbs the scheduler's noise."""
    delay_seconds_max: float = 60.0
    attempts_doubling_max: int = 6


PACE_TIMES = 7
"""So many give the pace: few, for it may change."""
SPREAD_TIMES = 15
"""So many give its spread: more, for that is harder to see and changes less."""
RATE_SHARE_MIN = 0.85
"""More members are worth this share of the contributions a second that fewer would bring."""


@final
@dataclass(frozen=True)
class Pace:
    """How long something takes, by the median of the last times: one odd round (a catch-up, a freeze, a partition) says
    nothing. Zero while nothing is known.
    """

    times: tuple[float, ...] = ()

    def observed(self, seconds: float) -> Pace:
        return Pace((*self.times, seconds)[-SPREAD_TIMES:])

    @property
    def is_known(self) -> bool:
        return bool(self.times)

    # Cached: every message asks for the same few again.
    @cached_property
    def mean(self) -> float:
        return _middle(self.times[-PACE_TIMES:])

    @cached_property
    def late(self) -> float:
        """Who takes longer is late: four median deviations more (2.7 standard deviations), and a fifth at least; half
        as much again while few times are known.
        """
        least = 1 / 5 if len(self.times) >= PACE_TIMES else 1 / 2
        return self.mean + max(4 * _deviation(self.times, self.mean), least * self.mean)

    @cached_property
    def high(self) -> float:
        """What a further time will rarely exceed, for what costs much if it is done in vain: six median deviations of
        the last times more, and half as much again at least.
        """
        return self.mean + max(6 * _deviation(self.times[-PACE_TIMES:], self.mean), self.mean / 2)


def _middle(times: tuple[float, ...]) -> float:
    return median(times) if times else 0.0


def _deviation(times: tuple[float, ...], middle: float) -> float:
    return median([abs(t - middle) for t in times]) if times else 0.0


@final
@dataclass(frozen=True, slots=True)
class Timing:
    """What one peer has learnt of its swarm's pace."""

    interval: Pace = field(default_factory=Pace)
    """Between two commits."""
    decide: Pace = field(default_factory=Pace)
    """From a proposal to its commit: about one round trip and one durable write."""
    cycles: Mapping[PeerID, Pace] = field(default_factory=dict)
    """From the commit that freed a peer to train anew, until its next offer: its own pace, whatever the group's."""

    def cycle(self, peer: PeerID) -> Pace:
        """The peer's pace, or the middle one of the others' while its own is not known."""
        if peer in self.cycles:
            return self.cycles[peer]
        return (
            sorted(self.cycles.values(), key=lambda pace: pace.mean)[len(self.cycles) // 2] if self.cycles else Pace()
        )

    def committed(self, interval: float, decide: float | None) -> Timing:
        after = self.decide if decide is None else self.decide.observed(decide)
        return replace(self, interval=self.interval.observed(interval), decide=after)

    def cycled(self, peer: PeerID, seconds: float) -> Timing:
        before = self.cycles.get(peer, Pace())
        return replace(self, cycles={**self.cycles, peer: before.observed(max(0.0, seconds))})


def waited_for(timing: Timing, present: Collection[PeerID], missing: Collection[PeerID]) -> list[PeerID]:
    """Which of the `missing` are worth waiting for, given who is `present`.

    With the peers' paces c_1 <= c_2 <= ..., rounds of the k fastest bring k / c_k contributions a second. The most k
    that brings nearly as many as the best one says whom: who is hardly slower than the others is not left behind. A
    peer that is late only because it began late is waited for once, and is then in step. A peer whose pace is not known
    yet gets its first chance.
    """
    known = sorted((timing.cycles[p].mean, p) for p in {*present, *missing} if p in timing.cycles)
    rates = [count / max(cycle, 1e-9) for count, (cycle, _) in enumerate(known, start=1)]
    enough = RATE_SHARE_MIN * max(rates, default=0.0)
    pace = max((cycle for rate, (cycle, _) in zip(rates, known, strict=True) if rate >= enough), default=0.0)
    return sorted(p for p in missing if p not in timing.cycles or timing.cycles[p].mean <= pace)


def worth_joining(ready: float, members: int, expected: Mapping[PeerID, float]) -> list[PeerID]:
    """Whom to wait for of those who came in the middle of a round, by how old it will be when each is `expected` to
    offer. It could close with so many `members` when it is `ready` seconds old; it waits for as many more as bring the
    most contributions a second. Nothing of who is left out is lost: it is in the next round.
    """
    chosen: list[PeerID] = []
    best = members / max(ready, 1e-9)
    order = sorted(expected, key=lambda peer: (expected[peer], peer))
    for count, peer in enumerate(order, start=1):
        rate = (members + count) / max(ready, expected[peer], 1e-9)
        if rate >= best:
            best, chosen = rate, order[:count]
    return chosen


def start_patience(timing: Timing, config: TimingConfig) -> float:
    """How long a round that has as many offers as it needs waits for half of those who are expected to offer."""
    return max(2 * config.silence_seconds, timing.interval.high)


def take_over_seconds(timing: Timing, config: TimingConfig, length: float, rank: int, attempts: int) -> float:
    """How long a voter waits for someone else's proposal to be decided before it prepares a ballot of its own.

    `rank` spreads the voters so that one tries first; each failed attempt doubles the wait. At most about one round.
    """
    round_trip = max(config.delay_seconds_min, timing.decide.mean if timing.decide.is_known else length / 4)
    wait = timing.decide.high if timing.decide.is_known else length / 2
    wait = min(max(wait, 2 * round_trip), max(timing.interval.high, 4 * round_trip))
    wait *= 2.0 ** min(attempts, config.attempts_doubling_max)
    return min(wait + rank * round_trip, config.delay_seconds_max)
