"""From a scenario that fails to a small one that fails likewise."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

from simulator.faults import Fault, Late, Partition, When
from simulator.scenario import Scenario
from simulator.trial import run_scenario

_TIMES = ("seconds", "restart_after", "after")


@final
@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """How much to try."""

    runs_max: int = 300
    seconds_max: float = 120.0
    """Real ones."""


def failure_kind(scenario: Scenario) -> str | None:
    """What kind of finding a scenario ends in; None if all holds."""
    failure = run_scenario(scenario).failure
    return None if failure is None else failure.partition(":")[0]


def shrink(
    scenario: Scenario,
    kind_of: Callable[[Scenario], str | None] = failure_kind,
    config: ShrinkConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scenario:
    """The smallest scenario found that fails as `scenario` does; `scenario` itself if it does not fail."""
    config = config or ShrinkConfig()
    deadline, runs = clock() + config.seconds_max, 1
    kind = kind_of(scenario)
    if kind is None:
        return scenario
    shrinking = True
    while shrinking:
        shrinking = False
        for smaller in _smaller(scenario):
            if runs >= config.runs_max or clock() >= deadline:
                return scenario
            runs += 1
            if kind_of(smaller) == kind:
                scenario, shrinking = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Candidates, the boldest first; each is smaller in some measure, so that this ends."""
    yield from _fewer_faults(scenario)
    yield from _fewer_peers(scenario)
    if scenario.rounds > 1:
        yield replace(scenario, rounds=scenario.rounds // 2)
    if scenario.faults_end > 1:
        ends = round(scenario.faults_end / 2, 2)
        before = [fault for fault in scenario.faults if isinstance(fault.at, When) or fault.at <= ends]
        yield replace(scenario, faults_end=ends, faults=tuple(before))
    for field in dataclasses.fields(scenario):
        default: Any = field.default
        is_of_the_world = field.name not in ("peers", "rounds", "seed", "faults", "faults_end")
        if is_of_the_world and getattr(scenario, field.name) != default:
            yield replace(scenario, **{field.name: default})
    for index, fault in enumerate(scenario.faults):
        for weaker in _weaker(fault):
            faults = (*scenario.faults[:index], weaker, *scenario.faults[index + 1 :])
            yield replace(scenario, faults=faults)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    """Without half of them, a quarter, ... one."""
    count = len(scenario.faults)
    size = count
    while size:
        for start in range(0, count, size):
            yield replace(scenario, faults=scenario.faults[:start] + scenario.faults[start + size :])
        size //= 2


def _fewer_peers(scenario: Scenario) -> Iterator[Scenario]:
    """Without the last peer, and without the faults that name it."""
    last = scenario.peers - 1
    if last < 1:
        return
    faults = [left for fault in scenario.faults if (left := _without(fault, last)) is not None]
    yield replace(scenario, peers=last, faults=tuple(faults))


def _without(fault: Fault, peer: int) -> Fault | None:
    if peer in (getattr(fault, "peer", None), getattr(fault, "other", None)):
        return None
    if isinstance(fault.at, When) and fault.at.peer == peer:
        return None
    if isinstance(fault, Partition):
        sides = tuple(tuple(p for p in side if p != peer) for side in fault.sides)
        kept = tuple(side for side in sides if side)
        return replace(fault, sides=kept) if kept else None
    return fault


def _weaker(fault: Fault) -> Iterator[Fault]:
    """Times halved, rounded so that it ends."""
    for name in _TIMES:
        value = getattr(fault, name, 0.0)
        if value >= 0.1:
            yield _with(fault, name, round(value / 2, 2))
    if isinstance(fault.at, When):
        if fault.at.nth > 1:
            yield _with(fault, "at", replace(fault.at, nth=fault.at.nth // 2))
    elif fault.at >= 0.1 and not isinstance(fault, Late):
        yield _with(fault, "at", round(fault.at / 2, 2))


def _with(fault: Any, name: str, value: Any) -> Fault:
    changed: Fault = replace(fault, **{name: value})
    return changed
