"""Failures that go on for ever, as faults of a simulated swarm: crashes at exponential times, freezes, slow spells."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from simulator.faults import Crash, Freeze, SlowCompute

Trouble = Crash | Freeze | SlowCompute

RATES = {"none": math.inf, "mild": 840.0, "middle": 420.0, "harsh": 210.0}
"""Seconds that a peer is up on average. The harshest is the paper's for its learners: 1.2 million chips in eight, one
failure a chip-year, are a failure every 26 s, and of each eighth every 210 s.
"""
DOWN_SECONDS = 30.0
QUIET_SECONDS = 20.0
"""In the beginning nothing fails: a first round without everybody would say nothing about failures."""
FREEZE_EVERY, FREEZE_SECONDS = 600.0, 10.0
SLOW_EVERY, SLOW_SECONDS, SLOW_FACTOR = 600.0, 30.0, 2.0


def trace_of(seed: int, peers: int, up_seconds: float, seconds: float) -> tuple[Trouble, ...]:
    """All faults of a run; each peer's own chance, so that a trace with more peers has those of fewer in it."""
    faults: list[Trouble] = []
    if up_seconds == math.inf:
        return ()
    for peer in range(peers):
        rng = random.Random(f"{seed} {peer} crashes")
        at = QUIET_SECONDS + rng.expovariate(1 / up_seconds)
        while at < seconds:
            faults.append(Crash(at, peer, DOWN_SECONDS))
            at += DOWN_SECONDS + rng.expovariate(1 / up_seconds)
        for at in _times(random.Random(f"{seed} {peer} freezes"), FREEZE_EVERY, seconds):
            faults.append(Freeze(at, peer, FREEZE_SECONDS))
        for at in _times(random.Random(f"{seed} {peer} slow"), SLOW_EVERY, seconds):
            faults.append(SlowCompute(at, peer, SLOW_FACTOR, SLOW_SECONDS))
    return tuple(faults)


def _times(rng: random.Random, every: float, seconds: float) -> Iterator[float]:
    at = QUIET_SECONDS + rng.expovariate(1 / every)
    while at < seconds:
        yield at
        at += rng.expovariate(1 / every)


@final
@dataclass(frozen=True, slots=True)
class Loss:
    """What the failures alone take, as shares of all peer-seconds, as if no two of one peer overlapped."""

    down: float
    frozen: float
    slow: float
    all_up: float
    """The share of the time in which nobody was down or frozen."""

    @property
    def possible(self) -> float:
        return 1 - self.down - self.frozen - self.slow


def loss_by(faults: Sequence[Trouble], peers: int, seconds: float) -> Loss:
    """Of a trace, until then."""
    down, frozen, slow = 0.0, 0.0, 0.0
    away: list[tuple[float, float]] = []
    for fault in faults:
        assert isinstance(fault.at, float)
        lasts = fault.restart_after if isinstance(fault, Crash) else fault.seconds
        until = min(fault.at + lasts, seconds)
        down += (until - fault.at) * isinstance(fault, Crash)
        frozen += (until - fault.at) * isinstance(fault, Freeze)
        slow += (until - fault.at) * (1 - 1 / SLOW_FACTOR) * isinstance(fault, SlowCompute)
        if not isinstance(fault, SlowCompute):
            away.append((fault.at, until))
    all_up, at = 0.0, 0.0
    for begins, ends in [*sorted(away), (seconds, seconds)]:
        all_up += max(0.0, begins - at)
        at = max(at, ends)
    whole = peers * seconds
    return Loss(down / whole, frozen / whole, slow / whole, all_up / seconds)
