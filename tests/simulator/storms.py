"""Faults for tests that need some of a kind, drawn from a seed."""

from __future__ import annotations

import random

from simulator.faults import Crash


def crashes(seed: int, peers: int, seconds: float, *, rate: float, down_seconds: float = 10.0) -> tuple[Crash, ...]:
    """`rate` is per peer and second; whoever crashes is back within `down_seconds`."""
    rng = random.Random(seed)
    count = round(rate * peers * seconds)
    return tuple(
        Crash(rng.uniform(0, seconds), rng.randrange(peers), rng.uniform(0, down_seconds)) for _ in range(count)
    )
