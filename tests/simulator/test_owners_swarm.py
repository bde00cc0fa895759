"""Swarms where owners reduce: everybody is heard, the books balance under faults, and broken rules are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from averaging.owners import Owners
from averaging.record import Record
from peer.owners_learner import OwnersLearner
from simulator.faults import Crash, Freeze, Leave, Partition, When
from simulator.scenario import Scenario
from simulator.trial import run_scenario

CALM = Scenario(peers=6, rounds=8, learner="owners", train_seconds=2.0, faults_end=0.0)
FAULTS = (
    Crash(When("committed", 1, nth=3), 1, 3.0),
    Crash(When("trained", 2, nth=4, after=0.001), 2, 1.0),
    Leave(9.0, 3, 4.0),
    Freeze(12.0, 4, 9.0),
    Partition(14.0, ((0, 1),), 12.0),
)
STORMY = replace(CALM, faults=FAULTS, faults_end=25.0)
SEEDS = 8


def test_in_a_calm_swarm_nearly_every_token_is_merged() -> None:
    verdict = run_scenario(CALM)
    assert verdict.failure is None
    outcome = verdict.outcome
    assert outcome.rounds_committed >= CALM.rounds
    assert outcome.tokens_merged > 0.75 * outcome.tokens_processed, "the last round's are still in the air"


@pytest.mark.parametrize("seed", range(3))
def test_crashes_freezes_and_partitions_leave_the_books_balanced(seed: int) -> None:
    verdict = run_scenario(replace(STORMY, seed=seed))
    assert verdict.failure is None, verdict.failure
    assert verdict.outcome.restarts > 0


# Broken rules.


def a_heard_part_is_said_again(patch: pytest.MonkeyPatch) -> None:
    settle = OwnersLearner._settle_shared
    patch.setattr(OwnersLearner, "_settle_shared", lambda self, heard, unknown: settle(self, frozenset(), unknown))


def what_the_owners_packet_left_out_is_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnersLearner, "_settle_merged", lambda self, part, packet: self._merging.pop(part, None))


def owners_sum_instead_of_averaging(patch: pytest.MonkeyPatch) -> None:
    from peer import method

    merged = method.merged_delta

    def summed(members: list[method.Contribution], *arguments: object) -> dict[str, torch.Tensor]:
        tensors = merged(members, *arguments)  # type: ignore[arg-type]
        return {name: len(members) * tensor for name, tensor in tensors.items()}

    patch.setattr(method, "merged_delta", summed)


def what_is_not_known_counts_as_missed(patch: pytest.MonkeyPatch) -> None:
    shared = Owners.shared

    def doubting(self: Owners, record: Record) -> tuple[frozenset[int], frozenset[int]] | None:
        fate = shared(self, record)
        return fate and (frozenset(), frozenset())

    patch.setattr(Owners, "shared", doubting)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f
    for f in (
        a_heard_part_is_said_again,
        what_the_owners_packet_left_out_is_dropped,
        owners_sum_instead_of_averaging,
        what_is_not_known_counts_as_missed,
    )
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert any(run_scenario(replace(STORMY, seed=seed)).failure for seed in range(SEEDS)), f"{name} was not caught"
