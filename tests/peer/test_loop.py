"""The loop of a peer among others, on virtual time: it leaves so that nobody waits, and its disk can always be read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import anyio
import pytest

from averaging import journal
from averaging.node import HEAD_FILE, commits_of
from averaging.record import Hash, genesis
from network.seam import PeerID
from network.simulated import Link
from peer.reports import Left, Note, Report, RoundDone, Trained, Validated
from simulator.faults import Crash, SlowCompute
from simulator.outcome import Outcome, SwarmConfig
from simulator.swarm import Swarm, run_swarm
from simulator.vector import METHOD, VectorBooks
from simulator.virtual_time import run_virtual

Seen = list[tuple[float, PeerID, Report]]


def run(
    config: SwarmConfig, script: Callable[[Swarm], Coroutine[Any, Any, None]] | None = None
) -> tuple[Outcome, Seen]:
    print(config)
    seen: Seen = []
    outcome = run_virtual(
        lambda: run_swarm(
            config, script=script, on_report=lambda peer, report: seen.append((anyio.current_time(), peer, report))
        )
    )
    return outcome, seen


async def wait_for_round(swarm: Swarm, number: int) -> None:
    while swarm.checker.newest < number:  # noqa: ASYNC110
        await anyio.sleep(0.05)


@pytest.mark.parametrize("leaver", [0, 1, 3])
def test_who_leaves_is_missed_by_nobody(leaver: int) -> None:
    """Peer 0 is the founder, and so the first lead: not even a lead holds the others up."""
    told: dict[str, float] = {}

    async def script(swarm: Swarm) -> None:
        await wait_for_round(swarm, 8)
        told["at"] = anyio.current_time()
        told["id"] = leaver
        swarm.members[leaver].loop.leave()

    config = SwarmConfig(peers=4, rounds=40, seed=1)
    outcome, seen = run(config, script)
    assert outcome.rounds_committed >= 40
    left = {peer: (time, report) for time, peer, report in seen if isinstance(report, Left)}
    (early,) = [(peer, time, report) for peer, (time, report) in left.items() if report.round < 40]
    assert early[1] - told["at"] < 6.0
    times = [time for time, _, report in seen if isinstance(report, RoundDone)]
    assert max(b - a for a, b in itertools.pairwise(times)) < 5.0
    late = [r for time, peer, r in seen if isinstance(r, RoundDone) and time > early[1] + 3]
    assert late and all(early[0] not in r.members for r in late)


def test_inner_steps_are_reported_before_they_are_merged() -> None:
    """Who adds up what was processed and what was merged never finds more merged than processed."""
    faults = tuple(Crash(float(at), at % 3, 2.0) for at in range(1, 20, 3))
    _, seen = run(SwarmConfig(peers=3, rounds=30, seed=2, faults=faults, faults_end=20.0))
    processed: dict[tuple[PeerID, int], int] = {}
    lives: dict[PeerID, int] = {}
    for _, peer, report in seen:
        if isinstance(report, Trained):
            life = lives.setdefault(peer, 0)
            if report.tokens_processed < processed.get((peer, life), 0):
                life = lives[peer] = life + 1
            processed[peer, life] = report.tokens_processed
        elif isinstance(report, RoundDone):
            assert report.tokens <= sum(processed.values())


def pace(seen: Seen, rounds: int) -> float:
    """Seconds a round, after the first ten."""
    times: dict[int, float] = {}
    for time, _, report in seen:
        if isinstance(report, RoundDone):
            times.setdefault(report.round, time)
    return (times[rounds] - times[10]) / (rounds - 10)


def test_a_peer_ten_times_slower_contributes_now_and_then_and_holds_nobody_up() -> None:
    rounds = 150
    usual = SwarmConfig(peers=3, rounds=rounds, seed=6, speed_spread=0.0)
    snail = SlowCompute(0.0, 3, 10.0, 10_000.0)
    _, without = run(usual)
    outcome, seen = run(replace(usual, peers=4, faults=(snail,), faults_end=10_000.0))
    assert pace(seen, rounds) < 1.1 * pace(without, rounds)
    members = {report.round: report.members for _, _, report in seen if isinstance(report, RoundDone)}
    slowest = min(outcome.tokens_of, key=lambda peer: outcome.tokens_of[peer])
    taken = [number for number, peers in sorted(members.items()) if slowest in peers]
    assert len(taken) >= rounds / 15
    assert max(b - a for a, b in itertools.pairwise(taken)) <= 25
    assert sum(len(set(peers) - {PeerID(slowest)}) == 3 for peers in members.values()) > 0.95 * rounds


@pytest.mark.parametrize(("overlap", "seconds"), [(0, 0.95), (1, 0.56)])
def test_a_round_that_is_hidden_takes_as_long_as_its_training(overlap: int, seconds: float) -> None:
    """Half a second of training, links of 100 ms: with overlap only the slower peers are waited for."""
    books = VectorBooks(replace(METHOD, overlap=overlap))
    seen: Seen = []
    config = SwarmConfig(peers=3, rounds=60, seed=7, link=Link(0.1, 0.02), speed_spread=0.0)
    run_virtual(
        lambda: run_swarm(
            config, books.learner, on_report=lambda peer, report: seen.append((anyio.current_time(), peer, report))
        )
    )
    assert pace(seen, 60) < seconds
    if not overlap:
        assert pace(seen, 60) > 0.7


def test_who_comes_back_hears_where_the_others_stand_before_it_trains() -> None:
    """A round on what was left behind is ten seconds of training for an offer that comes too late."""
    faults = (Crash(25.0, 3, 20.0),)
    _, seen = run(SwarmConfig(peers=4, rounds=10, seed=1, train_seconds=10.0, faults=faults, faults_end=60.0))
    (back,) = [peer for peer in {p for _, p, _ in seen} if not any(p == peer for t, p, _ in seen if 30 < t < 45)]
    newest = max(report.round for time, _, report in seen if isinstance(report, RoundDone) and time < 45.0)
    first = next(r for time, peer, r in seen if peer == back and time > 45.0 and isinstance(r, Trained))
    assert first.round >= newest > 2


def test_a_long_wait_is_explained() -> None:
    async def script(swarm: Swarm) -> None:
        await wait_for_round(swarm, 3)
        ids = [s.peer_id for s in swarm.signers]
        swarm.world.partition(ids[:1], ids[1:2], ids[2:])
        await anyio.sleep(35)
        swarm.world.heal()

    _, seen = run(SwarmConfig(peers=3, rounds=60, seed=3), script)
    notes = [report.text for _, _, report in seen if isinstance(report, Note)]
    assert any("voters" in text and "no quorum" in text for text in notes)


def test_peers_take_turns_to_validate_and_all_look_at_the_end() -> None:
    _, seen = run(SwarmConfig(peers=4, rounds=40, seed=4, validate_rounds=10))
    looks = [(peer, report.round) for _, peer, report in seen if isinstance(report, Validated)]
    assert {peer for peer, number in looks if number == 0} == {peer for _, peer, _ in seen}
    assert {peer for peer, number in looks if number == 40} == {peer for _, peer, _ in seen}
    assert 8 <= sum(0 < number < 40 for _, number in looks) <= 16


def test_the_disk_can_be_restored_at_any_instant() -> None:
    """No record is there without its contributions, unless a snapshot stands in for them."""
    checks: list[int] = []

    async def script(swarm: Swarm) -> None:
        first = genesis(Hash(bytes.fromhex(swarm.run_fact.run_id)), swarm.signers[0].peer_id, bytes(16))
        sizes: dict[int, tuple[int, int]] = {}
        while True:
            await anyio.sleep(0.0005)
            for number, disk in enumerate(swarm.disks):
                size = len(disk.log), len(disk.journal)
                if sizes.get(number) == size:
                    continue
                sizes[number] = size
                restored = journal.restore(first, disk.log, disk.journal, swarm.signers[number], 1 << 20)
                chain = restored.chain
                start = 0 if disk.snapshot is None else chain.round_of(Hash(disk.snapshot[HEAD_FILE]))
                assert commits_of(chain, chain.records[start + 1 :]) is not None, f"peer {number}: {chain.oldest}"
                checks.append(number)

    run(SwarmConfig(peers=3, rounds=40, seed=5, snapshot_seconds=0.2, snapshot_bytes=10**6), script)
    assert len(checks) > 100
