"""What one seed of the engines alone runs, to be tried many times."""

from __future__ import annotations

from dataclasses import dataclass

from tests.averaging.chaos import Chaos
from tests.averaging.engine_swarm import EngineSwarm

STORM = Chaos(loss=0.1, breaks=0.02, crashes=0.03, torn=0.005, blackouts=0.02, down_seconds=1.0)
CALM = Chaos(loss=0.01, breaks=0.05, crashes=0.01, torn=0.002)
VIRTUAL_SECONDS_MAX = 20_000.0
ROUNDS = 200


@dataclass(frozen=True)
class EngineResult:
    seed: int
    rounds: int
    crashes: int
    failure: str | None


def run_engines(seed: int) -> EngineResult:
    """Engines alone: two to four, in a storm or a calm."""
    swarm = EngineSwarm(seed, (2, 3, 3, 4)[seed % 4], STORM if seed % 2 else CALM)
    try:
        swarm.run(ROUNDS, VIRTUAL_SECONDS_MAX)
    except AssertionError as error:
        return EngineResult(seed, swarm.report()["rounds"], swarm.crashes, f"seed {seed}: {error}")
    done = swarm.report()["rounds"]
    return EngineResult(seed, done, swarm.crashes, None if done >= ROUNDS else f"seed {seed}: {swarm.report()}")
