"""Production peers on virtual time: whatever breaks, all commit the same, nothing is counted twice, and it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest

from averaging.node import HEAD_FILE
from averaging.record import parse_record
from network.seam import PeerID
from network.simulated import Link
from peer.reports import Note, Report, RoundDone, Trained
from simulator.faults import Crash, Fault, Freeze, Late, Lossy
from simulator.outcome import Outcome, SwarmConfig
from simulator.swarm import Swarm, run_swarm
from simulator.toy import UNITS_PER_ROUND
from simulator.vector import STREAMING, VectorBooks
from simulator.virtual_time import run_virtual
from tests.simulator.storms import crashes

Script = Callable[[Swarm], Coroutine[Any, Any, None]]


def run(config: SwarmConfig, script: Script | None = None, seen: list[tuple[PeerID, Report]] | None = None) -> Outcome:
    """Whoever fails here prints the configuration, with its seed."""
    print(config)
    reports = [] if seen is None else seen
    outcome = run_virtual(
        lambda: run_swarm(config, script=script, on_report=lambda peer, report: reports.append((peer, report)))
    )
    assert outcome.rounds_committed >= config.rounds, f"seed {config.seed}: {outcome}"
    return outcome


async def wait_for_round(swarm: Swarm, number: int) -> None:
    while swarm.checker.newest < number:  # noqa: ASYNC110
        await anyio.sleep(0.05)


def rounds_of(seen: list[tuple[PeerID, Report]]) -> dict[int, RoundDone]:
    return {r.round: r for _, r in seen if isinstance(r, RoundDone)}


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 7])
def test_without_faults_every_round_commits_and_every_token_is_merged(peers: int) -> None:
    seen: list[tuple[PeerID, Report]] = []
    outcome = run(SwarmConfig(peers=peers, rounds=30, seed=peers, speed_spread=0.0), seen=seen)
    rounds = rounds_of(seen)
    assert sorted(rounds) == list(range(1, outcome.rounds_committed + 1))
    # Now and then somebody is late by chance, and its work comes a round later.
    sizes = [len(rounds[n].members) for n in range(1, 31)]
    assert sum(sizes) > 0.9 * 30 * peers
    full = [n for n in range(2, 31) if sizes[n - 1] == sizes[n - 2] == peers]
    assert len(full) > 15
    assert all(rounds[n].tokens - rounds[n - 1].tokens == UNITS_PER_ROUND * peers for n in full)
    assert outcome.fingerprints_equal
    late_for_the_last = peers - sizes[-1]
    assert outcome.tokens_processed - outcome.tokens_merged == UNITS_PER_ROUND * late_for_the_last
    assert late_for_the_last <= 1
    assert not outcome.notes


@pytest.mark.parametrize("seed", range(4))
def test_crashes_lose_no_agreement(seed: int) -> None:
    faults = crashes(seed, 3 + seed % 3, 30.0, rate=0.06)
    config = SwarmConfig(peers=3 + seed % 3, rounds=40, seed=seed, faults=faults, faults_end=30.0, snapshot_seconds=5)
    outcome = run(config)
    assert outcome.restarts >= 2


def test_regular_kills_of_random_peers() -> None:
    outcome = run(SwarmConfig(peers=4, rounds=80, seed=3, kill_every_seconds=4))
    assert outcome.restarts > 5


def test_a_slow_and_lossy_world() -> None:
    faults: tuple[Fault, ...] = (Lossy(0.0, 100.0, dial_loss=0.5), *crashes(1, 5, 100.0, rate=0.02))
    run(SwarmConfig(peers=5, rounds=30, seed=1, link=Link(0.3, 0.3), faults=faults, faults_end=100.0, speed_spread=0.8))


@pytest.mark.parametrize("minority", [{0}, {4}, {0, 1}, {2, 4}])
def test_the_majority_goes_on_through_a_partition_and_the_minority_follows(minority: set[int]) -> None:
    rounds: dict[str, int] = {}

    async def script(swarm: Swarm) -> None:
        await wait_for_round(swarm, 5)
        swarm.world.partition([swarm.signers[n].peer_id for n in minority])
        await anyio.sleep(20)
        rounds["apart"] = swarm.checker.newest
        rounds["minority"] = max(swarm.members[n].loop.applied.round for n in minority)
        swarm.world.heal()

    outcome = run(SwarmConfig(peers=5, rounds=60, seed=1), script)
    assert rounds["minority"] <= 7, "only what was decided when the world split"
    assert rounds["apart"] > 12
    assert outcome.fingerprints_equal


@pytest.mark.parametrize("seconds", [3.0, 20.0, 60.0])
def test_a_peer_that_slept_wakes_up_and_follows(seconds: float) -> None:
    async def script(swarm: Swarm) -> None:
        await wait_for_round(swarm, 5)
        sleeper = swarm.signers[1].peer_id
        swarm.world.freeze(sleeper)
        await anyio.sleep(seconds)
        assert swarm.checker.newest > 6, "the others went on"
        swarm.world.thaw(sleeper)

    assert run(SwarmConfig(peers=4, rounds=int(40 + 2 * seconds), seed=2), script).fingerprints_equal


@pytest.mark.parametrize(("snapshot_bytes", "way"), [(1_000_000, "replay"), (100, "snapshot")])
def test_a_late_joiner_catches_up(snapshot_bytes: int, way: str) -> None:
    seen: list[tuple[PeerID, Report]] = []
    config = SwarmConfig(
        peers=4,
        rounds=60,
        seed=5,
        faults=(Late(15.0, 3),),
        faults_end=15.0,
        snapshot_bytes=snapshot_bytes,
        snapshot_seconds=2 if way == "snapshot" else 1000,
    )
    outcome = run(config, seen=seen)
    late = seen[-1][0] if len({p for p, _ in seen}) < 4 else max({p for p, _ in seen}, key=lambda p: first(seen, p))
    mine = [r for p, r in seen if p == late]
    jumped = any(isinstance(r, Note) and "took the state" in r.text for r in mine)
    assert jumped == (way == "snapshot")
    done = [r for r in mine if isinstance(r, RoundDone)]
    assert (done[0].round == 1) == (way == "replay")
    assert any(r.mine for r in done), "it takes part in the end"
    assert outcome.fingerprints_equal


def first(seen: list[tuple[PeerID, Report]], peer: PeerID) -> int:
    return next(index for index, (p, _) in enumerate(seen) if p == peer)


def test_a_restart_from_disk_keeps_votes() -> None:
    """What a peer accepted is in its engine again when it comes back, if the round is still open."""
    kept: list[bool] = []

    async def script(swarm: Swarm) -> None:
        for _ in range(12):
            await wait_for_round(swarm, swarm.checker.newest + 1)
            for number, member in sorted(swarm.members.items()):
                vote = member.node.engine.instance.vote
                if vote.accepted is not None and vote.accepted_ballot.attempt >= 0:
                    head = member.node.head.hash
                    swarm.crash(number)
                    while number not in swarm.members:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                    engine = swarm.members[number].node.engine
                    if engine.head.hash == head:
                        kept.append(engine.instance.vote.accepted == vote.accepted)
                    break
            await anyio.sleep(0.03)

    run(SwarmConfig(peers=3, rounds=60, seed=6, down_seconds=0.01, link=Link(0.1, 0.05)), script)
    assert kept and all(kept)


def test_a_crash_between_a_jump_and_its_snapshot_is_survived() -> None:
    """The log on disk is then ahead of any state that the peer can rebuild: it goes back, and remembers its votes."""
    crashes: list[int] = []

    async def script(swarm: Swarm) -> None:
        disk = swarm.disks[3]
        await wait_for_round(swarm, 40)
        swarm.crash(3)
        length = len(disk.log)
        while len(crashes) < 3:
            await anyio.sleep(0.0005)
            newest = parse_head(disk.snapshot)
            if len(disk.log) > length + 3 and newest is not None and newest != disk_head(disk.log):
                crashes.append(len(disk.log))
                swarm.crash(3)
            length = len(disk.log)

    config = SwarmConfig(peers=4, rounds=150, seed=3, down_seconds=30, snapshot_bytes=100, snapshot_seconds=2)
    run(config, script)
    assert crashes


def parse_head(snapshot: dict[str, bytes] | None) -> bytes | None:
    return None if snapshot is None else snapshot[HEAD_FILE]


def disk_head(log: list[bytes]) -> bytes:
    return parse_record(msgpack.unpackb(log[-1])[0]).hash


TRACE_SEEDS = (6, 11, 12, 16, 22, 28)
"""Among them are a vector, partitions, torn writes, dead daemons, messages that come twice."""
TRACE = """
import sys
from simulator.scenario import Scenario
from simulator.trial import run_scenario
for seed in map(int, sys.argv[1:]):
    print(run_scenario(Scenario.random(seed)).outcome.trace)
"""


def test_the_same_seed_gives_the_same_trace_in_any_process() -> None:
    root = Path(__file__).resolve().parents[2]
    traces = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        done = subprocess.run(
            [sys.executable, "-c", TRACE, *map(str, TRACE_SEEDS)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        traces.add(done.stdout)
    assert len(traces) == 1
    assert len(set(traces.pop().split())) == len(TRACE_SEEDS)


def test_where_all_are_needed_nothing_is_committed_while_one_is_away() -> None:
    times: list[float] = []
    config = SwarmConfig(peers=3, rounds=40, seed=1, min_peers=3, recovery_share=1.0, faults=(Crash(8.0, 1, 12.0),))
    run_virtual(
        lambda: run_swarm(
            replace(config, faults_end=100.0),
            on_report=lambda peer, report: (
                times.append(anyio.current_time()) if isinstance(report, RoundDone) else None
            ),
        )
    )
    assert not [time for time in times if 8.5 < time < 20.0]
    assert [time for time in times if time < 8.0] and [time for time in times if time > 21.0]


@pytest.mark.parametrize(("fault", "done_at", "trained"), [(None, 8, 8), (Freeze(2.5, 0, 4), 11.5, 8)])
@pytest.mark.parametrize("stepwise", [True, False])
def test_what_begins_in_the_middle_of_a_round_is_felt_in_it(
    fault: Fault | None, done_at: float, trained: float, stepwise: bool
) -> None:
    done: list[float] = []
    seconds: list[float] = []

    async def script(swarm: Swarm) -> None:
        await wait_for_round(swarm, 1)
        seconds.append(swarm.trained_seconds[0])

    config = SwarmConfig(
        peers=1,
        rounds=1,
        train_seconds=8.0,
        train_spread=(1.0, 1.0),
        speed_spread=0.0,
        stepwise=stepwise,
        faults=() if fault is None else (fault,),
        faults_end=20.0,
    )
    books = VectorBooks(replace(STREAMING, fragments=1, overlap=0))
    run_virtual(
        lambda: run_swarm(
            config,
            books.learner,
            on_report=lambda peer, report: done.append(anyio.current_time()) if isinstance(report, Trained) else None,
            script=script,
        )
    )
    begun = done[0] - (done_at if stepwise else 8)
    assert 0 <= begun < 1.6, "starting takes a second; a step that a freeze interrupts is done when it began"
    assert seconds == [pytest.approx(trained)]


def test_inner_steps_that_a_crash_cuts_off_are_seconds_trained() -> None:
    seconds: list[float] = []

    async def script(swarm: Swarm) -> None:
        await anyio.sleep(5.0)
        seconds.append(swarm.trained_seconds[0])

    config = SwarmConfig(peers=2, rounds=3, train_seconds=8.0, faults=(Crash(4.0, 0, 2.0),), faults_end=20.0)
    run_virtual(lambda: run_swarm(config, script=script))
    assert 2.0 < seconds[0] < 4.0
