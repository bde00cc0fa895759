"""A scenario that fails becomes a small one that fails likewise, within its bounds."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults import Crash, Freeze, Partition, When
from simulator.scenario import Scenario
from simulator.shrink import ShrinkConfig, shrink

LARGE = Scenario(
    peers=6,
    rounds=40,
    jitter=0.1,
    faults_end=64.0,
    faults=(
        Freeze(3.0, 1, 20.0),
        Crash(When("accepted", 1, nth=8), 1, 8.0),
        Partition(9.0, ((0, 5), (1, 4)), 30.0),
        Freeze(3.0, 5, 20.0),
    ),
)


def crashes(scenario: Scenario) -> str | None:
    """Fails as long as peer 1 crashes."""
    return "Crash" if any(isinstance(f, Crash) and f.peer == 1 for f in scenario.faults) else None


def test_only_what_matters_is_left() -> None:
    small = shrink(LARGE, crashes)
    (fault,) = small.faults
    assert isinstance(fault, Crash) and fault.restart_after < 0.1
    assert fault.at == When("accepted", 1)
    assert small.peers == 2 and small.rounds == 1 and small.faults_end <= 1
    assert small == replace(Scenario(), peers=2, rounds=1, faults_end=small.faults_end, faults=(fault,))


def test_another_kind_of_failure_is_not_taken_for_it() -> None:
    def kind_of(scenario: Scenario) -> str:
        return "NoProgress" if len(scenario.faults) < 2 else "Disagreement"

    assert len(shrink(LARGE, kind_of).faults) == 2


def test_what_does_not_fail_stays_as_it_is() -> None:
    assert shrink(LARGE, lambda scenario: None) == LARGE


def test_the_effort_is_bounded() -> None:
    tried: list[Scenario] = []

    def kind_of(scenario: Scenario) -> str:
        tried.append(scenario)
        return "Disagreement"

    shrink(LARGE, kind_of, ShrinkConfig(runs_max=7))
    assert len(tried) == 7
    tried.clear()
    shrink(LARGE, kind_of, ShrinkConfig(seconds_max=5), clock=lambda: float(len(tried)))
    assert len(tried) <= 6


def test_what_names_a_peer_that_is_gone_goes_too() -> None:
    small = shrink(LARGE, lambda s: "Disagreement" if any(isinstance(f, Partition) for f in s.faults) else None)
    (fault,) = small.faults
    assert isinstance(fault, Partition)
    assert small.peers == 1 and fault.sides == ((0,),)
