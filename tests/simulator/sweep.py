"""Many seeds over all processors: what one seed runs, and how failures come back with their seeds."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from simulator.swarm import SwarmConfig, run_swarm
from simulator.virtual_time import run_virtual
from tests.averaging.engine_swarm import Chaos, EngineSwarm

STORM = Chaos(loss=0.1, breaks=0.02, crashes=0.03, torn=0.005, blackouts=0.02, down_seconds=1.0)
CALM = Chaos(loss=0.01, breaks=0.05, crashes=0.01, torn=0.002)
VIRTUAL_SECONDS_MAX = 20_000.0


@dataclass(frozen=True)
class Result:
    seed: int
    rounds: int
    crashes: int
    failure: str | None


def run_engines(seed: int, rounds: int) -> Result:
    """Engines alone: two to four, in a storm or a calm."""
    swarm = EngineSwarm(seed, (2, 3, 3, 4)[seed % 4], STORM if seed % 2 else CALM)
    try:
        swarm.run(rounds, VIRTUAL_SECONDS_MAX)
    except AssertionError as error:
        return Result(seed, swarm.report()["rounds"], swarm.crashes, f"seed {seed}: {error}")
    done = swarm.report()["rounds"]
    return Result(seed, done, swarm.crashes, None if done >= rounds else f"seed {seed}: {swarm.report()}")


def run_peers(seed: int, rounds: int) -> Result:
    """Production peers with crashes; odd seeds jump by snapshots rather than replay, every third world is lossy."""
    config = SwarmConfig(
        peers=2 + seed % 4,
        rounds=rounds,
        seed=seed,
        crash_rate=0.03,
        dial_loss=0.2 if seed % 3 == 0 else 0.0,
        late_peers=1 if seed % 4 == 3 else 0,
        snapshot_bytes=200 if seed % 2 else 4000,
        snapshot_seconds=5.0 if seed % 2 else 20.0,
    )
    try:
        outcome = run_virtual(lambda: run_swarm(config))
    except BaseException as error:  # Whatever ends a run is a finding; an interrupt goes on.
        if isinstance(error, KeyboardInterrupt):
            raise
        return Result(seed, 0, 0, f"seed {seed}: {plainest(error)!r}")
    done = outcome.rounds_committed
    return Result(seed, done, outcome.restarts, None if done >= rounds else f"seed {seed}: {outcome}")


def plainest(error: BaseException) -> BaseException:
    inner = getattr(error, "exceptions", None)
    return plainest(inner[0]) if inner else error


def sweep(run: Callable[[int, int], Result], seeds: Sequence[int], rounds: int) -> list[Result]:
    """Every seed once, on all processors."""
    # A fork would copy the threads' locks of whatever pytest has loaded.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        return list(pool.map(run, seeds, [rounds] * len(seeds), chunksize=2))
