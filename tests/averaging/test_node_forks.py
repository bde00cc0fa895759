"""What is on disk can be read again, though the log forks, or goes on, while a snapshot is being written."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from averaging import journal
from averaging.config import EngineConfig
from averaging.instance import Vote
from averaging.journal import Restored
from averaging.node import BRIDGE_FILE, HEAD_FILE, Node, NodeConfig
from averaging.outbox import Fork
from averaging.record import Ballot, Hash
from averaging.storage import Saved, Storage
from network.simulated import World
from simulator.storage import SimulatedStorage
from simulator.virtual_time import run_virtual
from tests.averaging.strategies import SIGNERS, Grown, chain_with, first, forked, grown

HEAD = first(3)
ME = next(s for s in SIGNERS[:3] if s.peer_id != HEAD.lead)
COMMON = grown(2)
PARTING = COMMON[-1][0].record
OLD = forked(PARTING, [ME], 2)
NEW = grown(4, head=PARTING, weight=50)


class Slow(Storage):
    """Tells when a snapshot is being written; can die right after one."""

    def __init__(self) -> None:
        self.disk = SimulatedStorage(random.Random(0), 0.1)
        self.saving = anyio.Event()
        self.dies_after_snapshot = False
        self.is_dead = False

    async def load(self) -> Saved:
        return await self.disk.load()

    async def append(self, journal: Sequence[bytes], log: Sequence[bytes]) -> None:
        if not self.is_dead:
            await self.disk.append(journal, log)

    async def save_snapshot(self, files: Mapping[str, bytes], journal: Sequence[bytes]) -> None:
        self.saving.set()
        if not self.is_dead:
            await self.disk.save_snapshot(files, journal)
            self.is_dead = self.dies_after_snapshot

    def restored(self) -> Restored:
        assert self.disk.snapshot is not None
        bridge = journal.read_list(self.disk.snapshot.get(BRIDGE_FILE, b"\x90"))
        return journal.restore(HEAD, [*self.disk.log, *bridge], self.disk.journal, ME, 1000)


@asynccontextmanager
async def open_node(storage: Slow) -> AsyncIterator[Node]:
    """Not running: the test performs what the engine says."""
    config = NodeConfig(EngineConfig(1000, weight_max=1000, snapshot_bytes=10**9))
    chain = chain_with(HEAD, COMMON, OLD)
    log = [journal.encode_commit(e.record, e.certificate) for piece in (COMMON, OLD) for e, _ in piece]
    packets = [journal.encode_packet(c) for piece in (COMMON, OLD) for _, cs in piece for c in cs]
    await storage.append(packets, log)
    async with World(0).open_network(ME.peer_id) as network:
        yield Node(
            network,
            ME,
            storage,
            Restored(chain, {}, ()),
            config,
            random.Random(0),
            run_id="0" * 64,
            nonce=1,
            check=lambda payload: None,
        )


async def move(node: Node, piece: Grown) -> None:
    """As `Following` and the engine do: leaves the old chain, if it is still on it, and appends of the new one."""
    rounds = node.engine.rounds
    if OLD[0][0].record.hash in rounds.chain:
        left = rounds.back_to(PARTING.round, 0.0)
        node.engine._outbox.actions.commits.append(Fork(PARTING, tuple(left)))
    for entry, contributions in piece:
        rounds.append(entry.record, entry.certificate, contributions, 0.0)
    await node._perform(node.engine.drain())


def test_a_fork_while_a_snapshot_is_written_stays_one_change_with_its_own_state() -> None:
    """Else the log on disk ends on the new chain while the snapshot is of the old one: the peer cannot restart."""

    async def program() -> None:
        storage = Slow()
        async with open_node(storage) as node, anyio.create_task_group() as tasks:
            tasks.start_soon(node.save_snapshot, node.head, {})
            await storage.saving.wait()
            await move(node, NEW)  # The better chain came just now.
            await anyio.sleep(1.0)
            assert storage.disk.snapshot is not None
            saved = Hash(storage.disk.snapshot[HEAD_FILE])
            assert saved in storage.restored().chain, "the snapshot is of no round in the log"

    run_virtual(program)


def test_votes_are_not_forgotten_before_what_decided_them_is_durable() -> None:
    """After a move the log waits for the snapshot; a crash right after that (its first half) must not forget votes."""

    async def program() -> None:
        storage = Slow()
        async with open_node(storage) as node:
            await move(node, NEW[:2])
            applied = node.head
            # Round 5 and 6: voted for here, durably, and decided, while the loop still applies what came before.
            for entry, contributions in NEW[2:]:
                instance = node.engine.instance
                for c in contributions:
                    instance.hold(c)
                vote = Vote(Ballot(0, entry.record.origin), Ballot(0, entry.record.origin), entry.record)
                node.engine._outbox.actions.entries.append(journal.encode_vote(entry.record.prev, vote))
                instance.vote = vote
                await node._perform(node.engine.drain())
                await move(node, [(entry, contributions)])
            storage.dies_after_snapshot = True
            await node.save_snapshot(applied, {})
            restored = storage.restored()
            for entry, _ in NEW[2:]:
                decided = restored.chain.is_decided(entry.record.prev)
                vote_left = restored.votes.get(entry.record.prev)
                assert decided or (vote_left is not None and vote_left.accepted == entry.record)

    run_virtual(program)
