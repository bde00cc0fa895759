"""One scenario run from beginning to end, and what came of it as a value: a finding is data, not an exception."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import final

from network.simulated import Access, Link
from simulator.outcome import Outcome, SwarmConfig
from simulator.owners_vector import PARTS, OwnersBooks
from simulator.scenario import Scenario
from simulator.swarm import LearnerFactory, Swarm
from simulator.vector import METHODS, PAYLOAD_BYTES_MAX, VectorBooks
from simulator.virtual_time import VirtualConfig, run_virtual

TOY_PAYLOAD_BYTES_MAX = 1 << 16
OWNERS_MAX = 3
"""Fewer than there are peers, so that voters are chosen."""


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """`failure` is one sentence, or None if all held."""

    scenario: Scenario
    failure: str | None
    outcome: Outcome = field(default_factory=Outcome)
    seconds: float = 0.0
    """Real ones."""


def run_scenario(scenario: Scenario) -> Verdict:
    """Runs it with all checks."""
    begun = time.perf_counter()
    swarms: list[Swarm] = []

    async def program() -> Outcome:
        # `Swarm` reads the loop's clock from its beginning on.
        make_learner: LearnerFactory | None = None
        if scenario.learner == "owners":
            make_learner = OwnersBooks().learner
        elif scenario.learner in METHODS:
            make_learner = VectorBooks(METHODS[scenario.learner]).learner
        payload_bytes_max = TOY_PAYLOAD_BYTES_MAX if make_learner is None else PAYLOAD_BYTES_MAX
        swarms.append(Swarm(_config_of(scenario), make_learner, payload_bytes_max=payload_bytes_max))
        return await swarms[0].run()

    try:
        run_virtual(program, config=VirtualConfig(virtual_seconds_max=_seconds_max(scenario)))
        failure = None
    except Exception as error:  # Whatever ends a run is a finding.
        failure = _sentence(_plainest(error))
    return Verdict(scenario, failure, swarms[0].outcome(), time.perf_counter() - begun)


def _config_of(scenario: Scenario) -> SwarmConfig:
    rate = scenario.uplink or math.inf
    return SwarmConfig(
        peers=scenario.peers,
        rounds=scenario.rounds,
        seed=scenario.seed,
        link=Link(scenario.delay, scenario.jitter),
        access=Access(uplink_bytes_per_second=rate, downlink_bytes_per_second=rate),
        faults=scenario.faults,
        faults_end=scenario.faults_end,
        live_seconds=scenario.live_seconds,
        min_peers=scenario.min_peers,
        train_seconds=scenario.train_seconds,
        speed_spread=scenario.speed_spread,
        snapshot_bytes=scenario.snapshot_bytes,
        snapshot_seconds=scenario.snapshot_seconds,
        parts=PARTS if scenario.learner == "owners" else 0,
        voters_max=OWNERS_MAX,
        stall_seconds_max=scenario.faults_end + 2 * scenario.live_seconds,
    )


def _seconds_max(scenario: Scenario) -> float:
    """Of virtual time: every round at the very limit of its patience."""
    return scenario.faults_end + (scenario.rounds + 2) * scenario.live_seconds + 1000


def _plainest(error: BaseException) -> BaseException:
    """The first leaf of a group of exceptions."""
    inner = getattr(error, "exceptions", None)
    return _plainest(inner[0]) if inner else error


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
