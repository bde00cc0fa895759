"""Many random scenarios over all processors: each seed once, and what came of all of them in one line."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, final

from simulator.scenario import Scenario
from simulator.trial import Verdict, run_scenario

S = TypeVar("S")
T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What one seed did."""

    seed: int
    failure: str | None
    rounds: int = 0
    restarts: int = 0
    recoveries: int = 0
    recovery_records: int = 0
    faults: dict[str, int] = field(default_factory=dict)


@final
@dataclass(slots=True)
class Figures:
    """The sum over many seeds."""

    seeds: int = 0
    rounds: int = 0
    crashes: int = 0
    """Lives that ended before the run did, by whatever fault."""
    recoveries: int = 0
    """Of these, after how many the peer committed again."""
    recovery_records: int = 0
    """With which somebody went on without a quorum."""
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failures: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.rounds += result.rounds
        self.crashes += result.restarts
        self.recoveries += result.recoveries
        self.recovery_records += result.recovery_records
        self.faults.update(result.faults)
        if result.failure is not None:
            self.failures.append(result)

    def line(self) -> str:
        kinds = " ".join(f"{kind}={count}" for kind, count in sorted(self.faults.items())) or "none"
        return (
            f"seeds={self.seeds} rounds={self.rounds} faults: {kinds}; crashes={self.crashes} "
            f"recoveries={self.recoveries} forced_records={self.recovery_records} "
            f"seconds={self.seconds:.1f} failures={len(self.failures)}"
        )


def run_seed(seed: int) -> Result:
    """The random scenario of one seed."""
    return _result(seed, run_scenario(Scenario.random(seed)))


def sweep(
    seeds: Sequence[int], on_result: Callable[[Figures], None] = lambda figures: None, processes: int | None = None
) -> Figures:
    """Every seed once; `on_result` hears of each as it is done, in order. Results do not depend on `processes`."""
    begun = time.monotonic()
    figures = Figures()
    for result in over_processes(run_seed, seeds, processes):
        figures.add(result)
        figures.seconds = time.monotonic() - begun
        on_result(figures)
    return figures


def over_processes(run: Callable[[S], T], works: Sequence[S], processes: int | None = None) -> Iterator[T]:
    """`run` of each work, such as a seed, in order; in this process if one is enough."""
    processes = min(processes or os.cpu_count() or 1, len(works))
    if processes < 2:
        yield from map(run, works)
        return
    # A fork would copy the threads' locks of whatever is loaded here.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_one_thread) as pool:
        try:
            yield from pool.map(run, works)
        finally:
            pool.shutdown(cancel_futures=True)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _result(seed: int, verdict: Verdict) -> Result:
    outcome = verdict.outcome
    return Result(
        seed,
        verdict.failure,
        rounds=outcome.rounds_committed,
        restarts=outcome.restarts,
        recoveries=outcome.recoveries,
        recovery_records=outcome.recovery_records,
        faults=outcome.faults,
    )
