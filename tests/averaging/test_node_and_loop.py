"""What the training loop relies on when it talks to the node: nothing that it does is held up until something else."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from averaging import journal
from averaging.config import EngineConfig
from averaging.node import Node, NodeConfig
from averaging.record import FINGERPRINT_BYTES, Hash, genesis
from averaging.storage import Saved, Storage
from network.identity import Identity
from network.simulated import World
from simulator.storage import SimulatedStorage
from simulator.virtual_time import run_virtual

BASE = bytes(FINGERPRINT_BYTES)
RUN_HASH = Hash(bytes(32))
WRITE_SECONDS = 0.1
PAYLOAD_BYTES_MAX = 1000


class TellingStorage(Storage):
    """Tells when a write begins."""

    def __init__(self) -> None:
        self._storage = SimulatedStorage(random.Random(0), WRITE_SECONDS)
        self.began = anyio.Event()

    async def load(self) -> Saved:
        return await self._storage.load()

    async def append(self, journal: Sequence[bytes], log: Sequence[bytes]) -> None:
        self.began.set()
        await self._storage.append(journal, log)

    async def save_snapshot(self, files: Mapping[str, bytes], journal: Sequence[bytes]) -> None:
        await self._storage.save_snapshot(files, journal)


@asynccontextmanager
async def open_node(storage: TellingStorage) -> AsyncIterator[Node]:
    """A peer that is alone, so that each of its offers is a round."""
    identity = Identity(bytes(32))
    first = genesis(RUN_HASH, identity.peer_id, BASE)
    config = NodeConfig(EngineConfig(PAYLOAD_BYTES_MAX, weight_max=1, snapshot_bytes=PAYLOAD_BYTES_MAX))
    restored = journal.restore(first, [], [], identity, PAYLOAD_BYTES_MAX)
    async with World(0).open_network(identity.peer_id) as network, anyio.create_task_group() as tasks:
        node = Node(
            network,
            identity,
            storage,
            restored,
            config,
            random.Random(0),
            run_id=RUN_HASH.hex(),
            nonce=1,
            check=lambda payload: None,
        )
        tasks.start_soon(node.run)
        yield node
        tasks.cancel_scope.cancel()


def test_an_offer_right_after_the_anchor_is_taken() -> None:
    async def program() -> None:
        async with open_node(TellingStorage()) as node:
            for number in range(3):
                node.anchored(node.head.hash, BASE)
                assert await node.offer(b"payload", 1, True) is not None, f"round {number + 1}"
                await node.wait_news()
                assert len(node.take_commits()) == 1

    run_virtual(program)


def test_an_offer_during_a_write_waits_for_that_write_alone() -> None:
    async def program() -> None:
        storage = TellingStorage()
        async with open_node(storage) as node:
            node.anchored(node.head.hash, BASE)
            begin = anyio.current_time()
            await node.offer(b"first", 1, True)
            await storage.began.wait()
            node.anchored(node.head.hash, BASE)
            await node.offer(b"second", 1, True)
            rounds = 0
            while rounds < 2:
                await node.wait_news()
                rounds += len(node.take_commits())
            # A write takes at most twice its usual time; a heartbeat, which would wake the node too, is far off.
            assert anyio.current_time() - begin <= 4 * WRITE_SECONDS

    run_virtual(program)
