"""The protocol under many seeds: engines alone, and whole peers in random scenarios. `--seeds 300` is what CI runs."""

from __future__ import annotations

from simulator.sweep import over_processes, sweep
from tests.simulator.sweep import ROUNDS, run_engines

ENGINE_SEEDS_MAX = 200
"""Of engines alone, each of which commits hundreds of rounds."""


def test_no_seed_breaks_the_engines(seeds: int) -> None:
    chosen = range(min(seeds, ENGINE_SEEDS_MAX))
    results = list(over_processes(run_engines, chosen))
    failures = [result.failure for result in results if result.failure is not None]
    assert not failures, f"{len(failures)} of {len(chosen)} seeds failed:\n" + "\n".join(failures[:20])
    assert sum(result.rounds for result in results) >= len(chosen) * ROUNDS
    assert sum(result.crashes for result in results) >= len(chosen), "a storm without crashes shows nothing"


def test_no_random_scenario_breaks_the_swarm(seeds: int) -> None:
    figures = sweep(range(seeds))
    print(figures.line())
    failed = [f"seed {result.seed}: {result.failure}" for result in figures.failures]
    assert not failed, (
        f"{len(failed)} of {seeds} failed; repeat one with `peer simulate --virtual --seeds 1 --seed SEED`:\n"
        + "\n".join(failed[:20])
    )
    assert figures.rounds >= 5 * seeds
    if seeds >= 100:
        assert len(figures.faults) >= 15, "every kind of fault that is drawn has happened"
        assert figures.crashes > seeds and figures.recoveries > 0.8 * figures.crashes
