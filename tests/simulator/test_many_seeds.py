"""The protocol under many seeds: engines alone and whole peers, all faults at once. `--seeds 200` is what CI runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulator.sweep import Result, run_engines, run_peers, sweep

ENGINE_ROUNDS = 500
PEER_ROUNDS = 50


@pytest.mark.parametrize(("run", "rounds"), [(run_engines, ENGINE_ROUNDS), (run_peers, PEER_ROUNDS)])
def test_no_seed_breaks_the_protocol(run: Callable[[int, int], Result], rounds: int, seeds: int) -> None:
    results = sweep(run, range(seeds), rounds)
    failures = [result.failure for result in results if result.failure is not None]
    assert not failures, f"{len(failures)} of {seeds} seeds failed:\n" + "\n".join(failures[:20])
    assert sum(result.rounds for result in results) >= seeds * rounds
    assert sum(result.crashes for result in results) >= seeds, "a storm without crashes shows nothing"
