"""One member of a run, from its parts: restores what it knew, joins the others, trains; real or simulated alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import anyio

from averaging import journal
from averaging.config import EngineConfig
from averaging.contribution import HEADER_BYTES_MAX, Contribution, parse_contribution
from averaging.node import BRIDGE_FILE, HEAD_FILE, Node, NodeConfig, commits_of
from averaging.record import Hash, genesis
from averaging.snapshots import Snapshot, SnapshotConfig
from averaging.storage import Storage
from dht.directory import Directory
from dht.facts import MemberFact, RunFact, SpecFact
from dht.membership import Announcement, Membership, MembershipConfig, open_membership
from network.identity import Signer
from network.seam import Network, PeerID
from peer.errors import TwinFound
from peer.learner import Learner
from peer.loop import SAID_FILE, LoopConfig, PeerLoop
from peer.readings import replay
from peer.reports import Report
from peer.version import VERSION
from peer.worker import Worker

ADDRESSES_MAX = 8
ENOUGH_MEMBERS = 32
NO_ENTRIES = b"\x90"


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """What a peer is made of: one implementation of every seam, and the world's time and chance."""

    network: Network
    directory: Directory
    signer: Signer
    storage: Storage
    learner: Learner
    worker: Worker
    rng: random.Random
    wall_time: Callable[[], float]


@final
@dataclass(frozen=True, slots=True)
class MemberConfig:
    """The run as this member sees it."""

    run: RunFact
    spec: SpecFact
    engine: EngineConfig
    loop: LoopConfig
    snapshots: SnapshotConfig
    membership: MembershipConfig
    name: str = ""


@final
@dataclass(slots=True)
class Member:
    """What whoever runs a member can look at and do while it runs."""

    node: Node
    loop: PeerLoop
    membership: Membership | None = None

    @property
    def linked(self) -> list[PeerID]:
        return self.node.links.linked

    @property
    def bytes_sent(self) -> int:
        return self.node.links.bytes_sent

    def know(self, peer: PeerID) -> None:
        """From now on there is a link to `peer`."""
        self.node.links.know(peer)


async def run_member(
    parts: Parts,
    config: MemberConfig,
    report: Callable[[Report], None],
    on_start: Callable[[Member], None] = lambda member: None,
) -> None:
    """Takes part until the goal is reached or `Member.loop.leave` is called.

    Raises `journal.DamagedJournal` if the storage contradicts the run, `TwinFound` if the identity is used twice.
    """
    nonce = int(parts.wall_time() * 1000) << 16 | parts.rng.getrandbits(16)
    member = await _assemble(parts, config, report, nonce)
    node, loop = member.node, member.loop
    addresses = tuple(await parts.network.addresses())

    def fact() -> MemberFact:
        return _fact_of(loop, config.name, addresses, nonce)

    def meet(peer: PeerID, other: MemberFact) -> None:
        parts.network.introduce(peer, other.addresses)
        node.meet(peer)

    async with (
        anyio.create_task_group() as tasks,
        open_membership(
            parts.directory,
            parts.signer,
            Announcement(config.run, config.spec, fact),
            wall_time=parts.wall_time,
            rng=parts.rng,
            config=config.membership,
            on_member=lambda peer, other: parts.network.introduce(peer, other.addresses),
        ) as membership,
    ):
        tasks.start_soon(node.run)
        tasks.start_soon(watch, membership, meet, parts.rng)
        tasks.start_soon(look_around, membership)
        member.membership = membership
        on_start(member)
        await loop.run()
        tasks.cancel_scope.cancel()


async def _assemble(parts: Parts, config: MemberConfig, report: Callable[[Report], None], nonce: int) -> Member:
    """The node and the loop, with the state that the storage holds."""
    restored, saved, said = await _restore(parts, config)
    node = Node(
        parts.network,
        parts.signer,
        parts.storage,
        restored,
        NodeConfig(config.engine),
        parts.rng,
        run_id=config.run.run_id,
        nonce=nonce,
        check=parts.learner.check,
    )
    loop = PeerLoop(
        parts.network,
        node,
        parts.learner,
        parts.worker,
        config.loop,
        run_id=config.run.run_id,
        snapshots=config.snapshots,
        rng=parts.rng,
        report=report,
        saved=saved,
        said=said,
    )
    return Member(node, loop)


def _fact_of(loop: PeerLoop, name: str, addresses: tuple[str, ...], nonce: int) -> MemberFact:
    record, loss = loop.applied, loop.validation_loss
    return MemberFact(
        version=VERSION,
        name=name,
        addresses=addresses[:ADDRESSES_MAX],
        nonce=nonce,
        head=record.hash,
        round=record.round,
        tokens=record.tokens,
        loss=loss if loss == loss else None,
        reachable=bool(addresses),
        trains=True,
    )


async def _restore(parts: Parts, config: MemberConfig) -> tuple[journal.Restored, Snapshot, list[Contribution]]:
    """The durable state of the protocol, the saved snapshot, and what the peer had said when that was taken; with the
    learner brought to the log's head.
    """
    saved = await parts.storage.load()
    files = dict(saved.snapshot or {})
    entries = [*saved.log, *journal.read_list(files.pop(BRIDGE_FILE, NO_ENTRIES))]
    remembered = journal.read_list(files.pop(SAID_FILE, NO_ENTRIES))
    first = genesis(Hash(bytes.fromhex(config.run.run_id)), config.run.creator, parts.learner.fingerprint())
    limit = config.engine.payload_bytes_max
    restored = journal.restore(first, entries, saved.journal, parts.signer, limit)
    number = 0
    if files:
        head = Hash(files.pop(HEAD_FILE, b""))
        if head not in restored.chain:
            raise journal.DamagedJournal("the snapshot is of no round in the log; move the folder away and join anew")
        number = restored.chain.round_of(head)
        await parts.worker.run(parts.learner.load, files, own=True)
    shared = await parts.worker.run(parts.learner.dump, shared_only=True)
    snapshot = Snapshot(restored.chain.records[number].hash, shared)
    commits = commits_of(restored.chain, restored.chain.records[number + 1 :])
    if commits is None:
        # A crash came after the log had jumped and before the state there was saved: jump again.
        restored, commits = restored.back_to(number), []
    restored.chain.forget_before(number + 1)
    await parts.worker.run(replay, parts.learner, parts.signer.peer_id, commits)
    return restored, snapshot, [parse_contribution(data, parts.signer, limit + HEADER_BYTES_MAX) for data in remembered]


async def watch(membership: Membership, meet: Callable[[PeerID, MemberFact], None], rng: random.Random) -> None:
    """At once and after every change among the members: `meet` all of them, and a look for a twin."""
    while True:
        if membership.has_twin:
            raise TwinFound(
                "another process takes part with this identity: stop one of the two, or give one a --folder of its own"
            )
        members = membership.members
        # Everybody knows the same members, but not all are to choose the same ones.
        for peer in rng.sample(list(members), len(members)):
            meet(peer, members[peer])
        await membership.wait_changed()


async def look_around(membership: Membership) -> None:
    """Peers that join at the same moment miss each other's first word: look again soon, then at the usual pace."""
    for seconds in (1.0, 3.0, 6.0):
        await anyio.sleep(seconds)
        if len(membership.members) >= ENOUGH_MEMBERS:
            return  # In a large swarm a look is dear, and whom one has missed are few.
        membership.announce_now()
