"""A town of nodes over simulated links on virtual time, each with a replica of a single number."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import final

import anyio

from averaging.gossip import GossipConfig
from averaging.gossip_meeting import Met
from averaging.gossip_node import PROTOCOL, GossipNode
from averaging.gossip_voice import Said
from network.seam import PeerID
from network.simulated import Link, World, WorldConfig
from peer.learner import Own
from simulator.gossip_toy import ToyReplica, ToyRules
from simulator.toy import ToySigner

RUN = "ab" * 32
PLACE = f"{PROTOCOL}/{RUN[:16]}"
LONGEST = 60.0
"""Virtual seconds that no round of these tests may take: far above what is learnt, far below a hang."""


@final
class Peer:
    """One node with a replica of a single number."""

    def __init__(self, number: int, node: GossipNode, replica: ToyReplica) -> None:
        self.number = number
        self.node = node
        self.replica = replica
        self.round = 0
        self.met: list[Met] = []

    async def meet(self, trained_seconds: float = 1.0) -> Met:
        with anyio.fail_after(LONGEST):
            said = Said(self.replica.pack(0), 10, bytes(16), self.round)
            met = await self.node.meet(said, trained_seconds)
        self.replica.apply(met.round, met.contributions, Own.SAID)
        self.round = met.round
        self.met.append(met)
        return met


@final
class Town:
    """A world of peers with a list of members that each of them sees."""

    def __init__(self, peers: int, group_size: int = 2, seed: int = 1, **world: float) -> None:
        self.world = World(seed, WorldConfig(link=Link(0.02, 0.01), **world))  # type: ignore[arg-type]
        self.signers = [ToySigner(number) for number in range(peers)]
        self.names = [signer.peer_id for signer in self.signers]
        self.config = GossipConfig(payload_bytes_max=1000, weight_max=100, group_size=group_size)
        self.peers: list[Peer] = []
        self.scopes: list[anyio.CancelScope] = []

    def view(self, number: int) -> Sequence[PeerID]:
        return self.names

    async def live(self, number: int, body: Callable[[Peer], Awaitable[None]]) -> None:
        signer = self.signers[number]
        with anyio.CancelScope() as scope:
            self.scopes.append(scope)
            async with self.world.open_network(signer.peer_id) as network, anyio.create_task_group() as tasks:
                replica = ToyReplica(signer.peer_id, [float(number)], ToyRules())
                node = GossipNode(
                    network,
                    signer,
                    self.config,
                    random.Random(number),
                    run_id=RUN,
                    members=lambda: self.view(number),
                    check=replica.check,
                )
                peer = Peer(number, node, replica)
                self.peers.append(peer)
                tasks.start_soon(node.run)
                await anyio.sleep(0.001)
                await body(peer)
                node.rest()
                await anyio.sleep(LONGEST)
                tasks.cancel_scope.cancel()

    async def run(self, body: Callable[[Peer], Awaitable[None]], numbers: Sequence[int] | None = None) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(len(self.names)) if numbers is None else numbers:
                tasks.start_soon(self.live, number, body)
