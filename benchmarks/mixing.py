"""How fast gossip mixes: the variance of replicas against rounds, for groups drawn on paper and for real gossip nodes.

`python -m benchmarks.mixing` prints two Markdown tables. Replicas are single numbers that differ at the beginning and
are not trained. On paper: `averaging.gossip.groups_of` alone, with a share of the meetings failing. Nodes: production
`GossipNode`s in the simulator on virtual time, links of 20 to 40 ms, inner steps of 0.8 to 1.2 s, with a share of the
dials lost; a node whose partner does not answer looks for another, so its meetings fail less often than its dials.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

import anyio

from averaging.gossip import GossipConfig, groups_of
from averaging.gossip_node import GossipNode
from averaging.gossip_voice import Said
from network.simulated import Link, World, WorldConfig
from optimizers.gossip import variance_factor
from optimizers.presets import PRESETS
from peer.learner import Own
from simulator.gossip_toy import ToyReplica, ToyRules
from simulator.toy import ToySigner
from simulator.virtual_time import run_virtual

RUN = "5eed" * 16
PEERS = (4, 16, 64, 256, 1000)
SIZES = (2, 4, 8)
SHRUNK = 1e-6
"""Rounds are counted until the variance is this share of the first."""
ROUNDS_MAX = 200
NODE_ROUNDS = {2: 26, 4: 16, 8: 12}
NOLOCO_ROUNDS = 45
NOLOCO_PEERS_MAX = 64
"""Its own step mixes more slowly: with more nodes that would take too long here."""
LINK = Link(0.02, 0.02)
TRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class Mixed:
    """`variances[k]` after k rounds of everybody; the rest is per peer and round."""

    variances: list[float]
    bytes_sent: float = 0.0
    alone: float = 0.0
    drift: float = 0.0
    """Of the mean, in standard deviations of the first replicas."""

    @property
    def rounds(self) -> float:
        """Until SHRUNK; NaN if that was not reached."""
        for number, variance in enumerate(self.variances):
            if variance <= SHRUNK * self.variances[0]:
                return number
        return math.nan


def on_paper(peers: int, size: int, failing: float, seed: int) -> Mixed:
    rng = random.Random(seed)
    members = [ToySigner(number).peer_id for number in range(peers)]
    x = {peer: rng.gauss(0, 1) for peer in members}
    variances = [pvariance(x.values())]
    while variances[-1] > SHRUNK * variances[0] and len(variances) <= ROUNDS_MAX:
        for group in groups_of(members, len(variances) - 1, RUN, size):
            if rng.random() >= failing:
                x |= dict.fromkeys(group, fmean(x[peer] for peer in group))
        variances.append(pvariance(x.values()))
    return Mixed(variances)


def expected_rounds(size: int, failing: float) -> float:
    """In groups drawn at random anew each round: a meeting leaves 1/size of the variance, a failed one all of it."""
    factor = failing + (1 - failing) / size
    return math.log(SHRUNK) / math.log(factor)


async def with_nodes(peers: int, size: int, dial_loss: float, rounds: int, rules: ToyRules) -> Mixed:
    world = World(1, WorldConfig(link=LINK, dial_loss=dial_loss))
    rng = random.Random(2)
    signers = [ToySigner(number) for number in range(peers)]
    members = [signer.peer_id for signer in signers]
    config = GossipConfig(payload_bytes_max=1000, weight_max=100, group_size=size)
    starts = [rng.gauss(0, 1) for _ in signers]
    values: list[list[float]] = [list(starts), *([] for _ in range(rounds))]
    alone, sent, ended = 0, 0, 0

    async def live(number: int) -> None:
        nonlocal alone, sent, ended
        signer, own = signers[number], random.Random(number)
        async with world.open_network(signer.peer_id) as network, anyio.create_task_group() as tasks:
            replica = ToyReplica(signer.peer_id, [starts[number]], rules)
            node = GossipNode(network, signer, config, own, run_id=RUN, members=lambda: members, check=replica.check)
            tasks.start_soon(node.run)
            round_ = 0
            for turn in range(rounds):
                seconds = TRAIN_SECONDS * own.uniform(0.8, 1.2)
                await anyio.sleep(seconds)
                met = await node.meet(Said(replica.pack(round_), 1, bytes(16), round_), seconds)
                replica.apply(met.round, met.contributions, Own.SAID)
                round_ = met.round
                alone += len(met.contributions) == 1
                values[turn + 1].append(replica.x[0])
            node.rest()
            ended += 1
            while ended < peers:  # noqa: ASYNC110
                await anyio.sleep(1.0)
            sent += node.bytes_sent
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for number in range(peers):
            tasks.start_soon(live, number)
    turns = peers * rounds
    drift = abs(fmean(values[-1]) - fmean(values[0])) / math.sqrt(pvariance(values[0]))
    return Mixed([pvariance(each) for each in values], sent / turns, alone / turns, drift)


def paper_table(seeds: int) -> None:
    print(f"Rounds until the variance is {SHRUNK:g} of the first, mean of {seeds} seeds (theory: groups at random)\n")
    print("| peers | " + " | ".join(f"g = {g} | g = {g}, 10 % fail" for g in SIZES) + " |")
    print("| --- |" + " --- | --- |" * len(SIZES))
    for peers in PEERS:
        cells = []
        for size in SIZES:
            for failing in (0.0, 0.1):
                cells.append(f"{fmean(on_paper(peers, size, failing, seed).rounds for seed in range(seeds)):.1f}")
        print(f"| {peers:,} | " + " | ".join(cells) + " |")
    theory = [f"{expected_rounds(size, failing):.1f}" for size in SIZES for failing in (0.0, 0.1)]
    print("| theory | " + " | ".join(theory) + " |\n", flush=True)


def node_table(peer_counts: Sequence[int], sizes: Sequence[int], losses: Sequence[float]) -> None:
    method = PRESETS["noloco"]
    nolocos = ToyRules(method.outer.momentum, method.outer.lr, method.gossip.mixing)
    print(
        "| peers | group | dials lost | step | rounds to 1e-6 | factor a round | theory | alone | bytes | drift | s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for peers in peer_counts:
        rows = [(size, loss, ToyRules(), "mean") for size in sizes for loss in losses]
        if peers <= NOLOCO_PEERS_MAX:
            rows.append((2, 0.0, nolocos, "noloco"))
        for size, loss, rules, name in rows:
            begun = time.monotonic()
            rounds = NODE_ROUNDS.get(size, 12) if name == "mean" else NOLOCO_ROUNDS
            mixed = run_virtual(with_nodes, peers, size, loss, rounds, rules)
            theory = variance_factor(size, rules.mixing, rules.momentum)
            row = [
                f"{peers:,}",
                f"{size}",
                f"{loss:.0%}",
                name,
                f"{mixed.rounds:.0f}",
                f"{factor(mixed.variances):.2f}",
                f"{theory:.2f}",
                f"{mixed.alone:.1%}",
                f"{mixed.bytes_sent:,.0f}",
                f"{mixed.drift:.0e}",
                f"{time.monotonic() - begun:.0f}",
            ]
            print("| " + " | ".join(row) + " |", flush=True)


def factor(variances: Sequence[float]) -> float:
    """By which a round shrinks the variance, on average until SHRUNK."""
    last = next((k for k, v in enumerate(variances) if v <= SHRUNK * variances[0]), len(variances) - 1)
    return math.pow(max(variances[last] / variances[0], SHRUNK), 1 / last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="of the groups on paper; 0 leaves them out")
    parser.add_argument("--peers", type=int, nargs="*", default=list(PEERS), help="how many nodes")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(SIZES), help="peers in a meeting of nodes")
    parser.add_argument("--losses", type=float, nargs="*", default=[0.0, 0.1], help="shares of the dials that are lost")
    arguments = parser.parse_args()
    if arguments.seeds:
        paper_table(arguments.seeds)
    node_table(arguments.peers, arguments.sizes, arguments.losses)


if __name__ == "__main__":
    main()
