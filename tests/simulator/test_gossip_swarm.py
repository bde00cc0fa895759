"""Whole peers of a gossip run on virtual time mix through crashes, late joiners and partitions, and never hang."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
import torch

from dht.membership import MembershipConfig
from network.seam import PeerID
from network.simulated import Access
from peer.learner import Learner
from peer.reports import Left, Note, Report, RoundDone
from simulator.gossip_swarm import GossipOutcome, GossipSwarm, GossipSwarmConfig, run_gossip_swarm
from simulator.gossip_toy import ToyReplica, ToyRules
from simulator.replicas import distance_max, mean_of
from simulator.virtual_time import run_virtual

Script = Callable[[GossipSwarm], Coroutine[Any, Any, None]]
Seen = list[tuple[float, PeerID, Report]]


def run(
    config: GossipSwarmConfig, script: Script | None = None, *, same: bool = False
) -> tuple[GossipOutcome, list[float], Seen]:
    """Without training: replicas that differ from the beginning (or not) and meet; returns where they began, too."""
    print(config)
    rng = random.Random(config.seed)
    starts: dict[PeerID, float] = {}
    seen: Seen = []

    def make(me: PeerID) -> Learner:
        return ToyReplica(me, [starts.setdefault(me, 1.0 if same else rng.gauss(0, 1))], ToyRules())

    outcome = run_virtual(
        lambda: run_gossip_swarm(
            config,
            make,
            script=script,
            on_report=lambda peer, report: seen.append((anyio.current_time(), peer, report)),
        )
    )
    return outcome, list(starts.values()), seen


def values_of(outcome: GossipOutcome) -> list[float]:
    replicas = [learner for learner in outcome.learners.values() if isinstance(learner, ToyReplica)]
    return [replica.x[0] for replica in replicas]


def spread(values: list[float]) -> float:
    return max(values) - min(values)


@pytest.mark.parametrize("group_size", [2, 4])
def test_replicas_reach_their_mean(group_size: int) -> None:
    outcome, starts, _ = run(GossipSwarmConfig(peers=8, rounds=20, group_size=group_size))
    values = values_of(outcome)
    assert sum(values) / 8 == pytest.approx(sum(starts) / 8)
    assert spread(values) < 1e-3 * spread(starts)
    assert outcome.halves == 0 and outcome.restarts == 0
    assert outcome.sizes[1] < 0.15 * sum(outcome.sizes.values())


CRASH_SEEDS_MAX = 40
"""Whole runs: each takes a second or two."""


def test_crashes_lose_a_bounded_part_and_everybody_comes_back(seeds: int) -> None:
    for seed in range(min(seeds, CRASH_SEEDS_MAX)):
        config = GossipSwarmConfig(
            peers=8, rounds=30, seed=seed, crash_rate=0.03, down_seconds=3, snapshot_rounds=2, dial_loss=0.1
        )
        outcome, starts, _ = run(config)
        values = values_of(outcome)
        assert len(values) == 8 and outcome.rounds >= 30
        # A crash sets one replica back to where it was, or to another's: never out of the range of all.
        assert min(starts) - 1e-9 <= min(values) and max(values) <= max(starts) + 1e-9
        assert spread(values) < 0.2 * spread(starts)


def test_a_late_joiner_takes_a_replica_and_takes_part() -> None:
    outcome, _, seen = run(GossipSwarmConfig(peers=6, rounds=30, late_peers=1, late_seconds=8, seed=2), same=False)
    late = outcome.learners.keys() - range(5)
    assert late == {5}
    notes = [note for note in outcome.notes if note.startswith("5: took the replica of")]
    assert len(notes) == 1
    mine = [report for _, peer, report in seen if isinstance(report, RoundDone) and peer == peer_of(seen, 5, outcome)]
    assert mine[0].round > 5, "it begins where the others are"
    assert any(len(report.members) == 2 for report in mine)


def peer_of(seen: Seen, number: int, outcome: GossipOutcome) -> PeerID:
    learner = outcome.learners[number]
    assert isinstance(learner, ToyReplica)
    return learner.me


def test_both_sides_of_a_partition_go_on_and_mix_again_afterwards() -> None:
    during: dict[str, list[int]] = {}

    async def script(swarm: GossipSwarm) -> None:
        names = [signer.peer_id for signer in swarm.signers]
        await anyio.sleep(6)
        swarm.world.partition(names[:3], names[3:])
        during["before"] = [swarm.rounds[number] for number in range(6)]
        await anyio.sleep(20)
        during["after"] = [swarm.rounds[number] for number in range(6)]
        swarm.world.heal()

    config = GossipSwarmConfig(peers=6, rounds=60, seed=3)
    outcome, starts, _ = run(config, script)
    gained = [after - before for before, after in zip(during["before"], during["after"], strict=True)]
    assert min(gained) >= 5, "no quorum is needed"
    values = values_of(outcome)
    assert spread(values) < 1e-3 * spread(starts)
    assert sum(values) / 6 == pytest.approx(sum(starts) / 6, abs=0.1)


def test_who_leaves_goes_at_once_and_is_missed_by_nobody() -> None:
    told: dict[str, float] = {}

    async def script(swarm: GossipSwarm) -> None:
        while swarm.rounds.get(0, 0) < 8:  # noqa: ASYNC110
            await anyio.sleep(0.05)
        told["at"] = anyio.current_time()
        swarm.members[0].loop.leave()

    outcome, _, seen = run(GossipSwarmConfig(peers=5, rounds=30, seed=4), script, same=True)
    left = [(time, report) for time, _, report in seen if isinstance(report, Left) and report.round < 30]
    assert len(left) == 1 and left[0][0] - told["at"] < 4.0
    assert left[0][1].tokens_pending == 0, "its last meeting took what it had trained"
    rounds = [(time, peer) for time, peer, report in seen if isinstance(report, RoundDone)]
    others = {peer for time, peer in rounds if time > told["at"] + 4}
    assert len(others) == 4
    for peer in others:
        times = [time for time, other in rounds if other == peer]
        assert max(b - a for a, b in itertools.pairwise(times)) < 5.0
    assert outcome.learners.keys() == set(range(5))


def test_in_a_large_swarm_facts_stay_as_fresh_as_in_a_small_one() -> None:
    """Who is to be met is chosen by them."""
    spoke: dict[int, list[float]] = {number: [] for number in range(45)}

    async def script(swarm: GossipSwarm) -> None:
        beats = dict.fromkeys(spoke, 0)
        while True:
            await anyio.sleep(0.5)
            for number, member in swarm.members.items():
                assert member.membership is not None
                if member.membership.num_heartbeats != beats[number]:
                    beats[number] = member.membership.num_heartbeats
                    spoke[number].append(anyio.current_time())

    run(GossipSwarmConfig(peers=45, rounds=4, train_seconds=40.0), script, same=True)
    for times in spoke.values():
        assert times[-1] > 120
        assert max(b - a for a, b in itertools.pairwise(times)) < MembershipConfig().heartbeat_seconds + 1


def test_a_peer_alone_trains_alone() -> None:
    outcome, _, _ = run(GossipSwarmConfig(peers=1, rounds=5))
    assert outcome.rounds == 5 and outcome.sizes == {1: 5}


def test_founders_are_waited_for_and_the_wait_is_explained() -> None:
    config = GossipSwarmConfig(peers=2, rounds=3, late_peers=1, late_seconds=60, start_peers=2)
    outcome, _, seen = run(config, same=True)
    assert min(time for time, _, report in seen if isinstance(report, RoundDone)) > 60
    notes = [(time, report.text) for time, _, report in seen if isinstance(report, Note)]
    waits = [time for time, text in notes if text == "waiting for 2 peers to begin with; 1 is here"]
    assert len(waits) >= 3 and waits[0] < 5
    assert outcome.sizes[2] >= 4


def test_peers_behind_slow_lines_still_meet() -> None:
    """The deadline for an exchange that has never been seen is too short here, until it has doubled a few times."""
    config = GossipSwarmConfig(peers=4, rounds=12, access=Access(uplink_bytes_per_second=30), train_seconds=5.0)
    outcome, _, _ = run(config, same=True)
    assert outcome.sizes[2] > outcome.sizes[1]


def test_the_same_seed_gives_the_same_trace() -> None:
    config = GossipSwarmConfig(peers=5, rounds=12, seed=8, crash_rate=0.05, dial_loss=0.1)
    traces = [run(config)[0].trace for _ in range(2)]
    assert traces[0] == traces[1]
    assert run(GossipSwarmConfig(peers=5, rounds=12, seed=9, crash_rate=0.05, dial_loss=0.1))[0].trace != traces[0]


def test_the_distance_of_replicas_is_that_of_the_two_furthest() -> None:
    replicas = [{"a": torch.tensor([3.0 + x]), "b": torch.tensor([[4.0]])} for x in (0.0, 1.0, -1.0)]
    assert distance_max(replicas) == pytest.approx(2 / 5)
    assert distance_max(replicas[:1]) == 0.0
    assert mean_of(replicas)["a"] == torch.tensor([3.0])
