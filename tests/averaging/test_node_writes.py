"""A record never reaches the disk before its contributions, however a snapshot and a round come together."""

from __future__ import annotations

import anyio

from averaging import journal
from averaging.node import commits_of
from averaging.record import genesis
from network.identity import Identity
from simulator.storage import SimulatedStorage
from simulator.virtual_time import run_virtual
from tests.averaging.test_node_and_loop import BASE, PAYLOAD_BYTES_MAX, RUN_HASH, TellingStorage, open_node

IDENTITY = Identity(bytes(32))
FIRST = genesis(RUN_HASH, IDENTITY.peer_id, BASE)


def is_whole(storage: SimulatedStorage) -> bool:
    """Whether all that the log names is on this disk."""
    chain = journal.restore(FIRST, storage.log, storage.journal, IDENTITY, PAYLOAD_BYTES_MAX).chain
    return commits_of(chain, chain.records[1:]) is not None


def test_a_snapshot_that_waits_for_a_write_takes_no_record_from_the_next_one() -> None:
    async def program() -> None:
        storage = TellingStorage()
        disk = storage._storage
        async with open_node(storage) as node, anyio.create_task_group() as tasks:
            node.anchored(node.head.hash, BASE)
            await node.offer(b"first", 1, True)
            await storage.began.wait()
            tasks.start_soon(node.save_snapshot, node.head, {})
            await anyio.sleep(0.01)
            node.anchored(node.head.hash, BASE)
            await node.offer(b"second", 1, True)
            node.leave()  # With any event in its inbox the node goes on before the snapshot gets its turn.
            while len(disk.log) < 2:
                assert is_whole(disk)
                await anyio.sleep(0.01)
            assert is_whole(disk)

    run_virtual(program)
