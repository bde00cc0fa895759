"""One member of a gossip run, from its parts: restores its replica, joins the others, trains; real or simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import anyio

from averaging import journal
from averaging.gossip import GossipConfig
from averaging.gossip_node import GossipNode
from averaging.record import Malformed
from dht.facts import MemberFact
from dht.membership import Announcement, Membership, open_membership
from network.seam import PeerID
from peer.gossip_loop import GossipLoop, Members, Progress, progress_in
from peer.member import ADDRESSES_MAX, MemberConfig, Parts, look_around, watch
from peer.reports import Report
from peer.version import VERSION


@final
@dataclass(slots=True)
class GossipMember:
    """What whoever runs a member can look at and do while it runs."""

    node: GossipNode
    loop: GossipLoop
    membership: Membership | None = None

    @property
    def linked(self) -> list[PeerID]:
        return self.node.linked

    @property
    def bytes_sent(self) -> int:
        return self.node.bytes_sent

    def know(self, peer: PeerID) -> None:
        """Nothing to do: streams are opened for each meeting."""


async def run_gossip_member(
    parts: Parts,
    config: MemberConfig,
    gossip: GossipConfig,
    report: Callable[[Report], None],
    on_start: Callable[[GossipMember], None] = lambda member: None,
) -> None:
    """Takes part until the goal is reached or `GossipMember.loop.leave` is called.

    Raises `journal.DamagedJournal` if the storage holds something else, `TwinFound` if the identity is used twice.
    """
    nonce = int(parts.wall_time() * 1000) << 16 | parts.rng.getrandbits(16)
    members = Members()
    member = _assemble(parts, config, gossip, members, await _restore(parts), report)
    addresses = tuple(await parts.network.addresses())[:ADDRESSES_MAX]

    def fact() -> MemberFact:
        return _fact_of(member.loop, config.name, addresses, nonce)

    def meet(peer: PeerID, other: MemberFact) -> None:
        parts.network.introduce(peer, other.addresses)

    async with (
        anyio.create_task_group() as tasks,
        open_membership(
            parts.directory,
            parts.signer,
            Announcement(config.run, config.spec, fact),
            wall_time=parts.wall_time,
            rng=parts.rng,
            config=replace(config.membership, fact_seconds=0.0),  # Meetings need fresh facts, whatever they cost.
            on_member=meet,
        ) as membership,
    ):
        member.membership = membership
        members.look = membership.announce_now
        tasks.start_soon(member.node.run)
        tasks.start_soon(watch, membership, meet, parts.rng)
        tasks.start_soon(look_around, membership)
        tasks.start_soon(_follow, membership, members)
        on_start(member)
        await member.loop.run()
        tasks.cancel_scope.cancel()


def _assemble(
    parts: Parts,
    config: MemberConfig,
    gossip: GossipConfig,
    members: Members,
    progress: Progress | None,
    report: Callable[[Report], None],
) -> GossipMember:
    node = GossipNode(
        parts.network,
        parts.signer,
        gossip,
        parts.rng,
        run_id=config.run.run_id,
        members=members.names,
        check=parts.learner.check,
        outcomes=None if progress is None else progress.outcomes,
    )
    loop = GossipLoop(
        parts.network,
        node,
        parts.learner,
        parts.worker,
        parts.storage,
        config.loop,
        members=members,
        gossip=gossip,
        run=config.run,
        snapshots=config.snapshots,
        rng=parts.rng,
        report=report,
        progress=progress,
    )
    return GossipMember(node, loop)


async def _follow(membership: Membership, members: Members) -> None:
    while True:
        members.update(membership.members)
        await membership.wait_changed()


async def _restore(parts: Parts) -> Progress | None:
    """How far the saved replica is, which the learner then holds; None if there is none."""
    saved = await parts.storage.load()
    if saved.snapshot is None:
        return None
    try:
        progress = progress_in(saved.snapshot)
        await parts.worker.run(parts.learner.load, saved.snapshot, own=True)
    except (Malformed, ValueError) as error:
        raise journal.DamagedJournal(f"{error}; move the folder away and join anew") from error
    return progress


def _fact_of(loop: GossipLoop, name: str, addresses: tuple[str, ...], nonce: int) -> MemberFact:
    loss = loop.validation_loss
    return MemberFact(
        version=VERSION,
        name=name,
        addresses=addresses,
        nonce=nonce,
        head=loop.head,
        round=loop.round,
        tokens=loop.tokens,
        loss=loss if loss == loss else None,
        reachable=bool(addresses),
        trains=True,
    )
