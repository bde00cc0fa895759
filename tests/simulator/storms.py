"""Faults for tests that need some of a kind, drawn from a seed."""

from __future__ import annotations

import random

from simulator.faults import Crash, Fault, Partition, Torn, When
from simulator.scenario import Scenario

VOTING = ("proposed", "voted", "accepted", "prepared", "pledged", "promised")


def crashes(seed: int, peers: int, seconds: float, *, rate: float, down_seconds: float = 10.0) -> tuple[Crash, ...]:
    """`rate` is per peer and second; whoever crashes is back within `down_seconds`."""
    rng = random.Random(seed)
    count = round(rate * peers * seconds)
    return tuple(
        Crash(rng.uniform(0, seconds), rng.randrange(peers), rng.uniform(0, down_seconds)) for _ in range(count)
    )


def voting_storm(seed: int) -> Scenario:
    """Peers go down in the midst of their votes and come back at once, in a world that falls apart now and then."""
    rng = random.Random(seed)
    peers = rng.choice((3, 4, 5))
    faults: list[Fault] = []
    for _ in range(24):
        peer, kind = rng.randrange(peers), rng.choice((Crash, Torn))
        at = When(rng.choice(VOTING), peer, nth=rng.randint(1, 20), after=rng.choice((0.0, 0.001)))
        faults.append(kind(at, peer, rng.choice((0.01, 0.5, 2.0))))
    for _ in range(4):
        side = tuple(sorted(rng.sample(range(peers), rng.randint(1, peers - 1))))
        faults.append(Partition(rng.uniform(1, 25), (side,), rng.choice((0.1, 1.0, 8.0))))
    return Scenario(
        peers=peers, rounds=12, seed=seed, faults_end=25.0, faults=tuple(faults), jitter=0.1, live_seconds=60.0
    )
