"""A simulated network on virtual time: delay, jitter, bandwidth, lost dials, partitions, NAT and crashes.

Bytes travel by timers of the event loop, not by tasks: this file knows asyncio, and one message costs one timer.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

import anyio
from anyio.abc import ByteStream, TaskGroup

from network.background import open_background, run_handler
from network.seam import Handler, Network, PeerID, PeerUnreachable
from network.simulated_stream import Port, SimulatedStream, Tap


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two peers, the same in both directions."""

    delay_seconds: float = 0.05
    jitter_seconds: float = 0.0
    """Every message takes up to this much longer, uniformly; one stream stays in order."""


@dataclass(frozen=True, slots=True)
class Access:
    """How one peer is connected to all others; its concurrent messages share the rates, first come first served."""

    uplink_bytes_per_second: float = math.inf
    downlink_bytes_per_second: float = math.inf
    dialable: bool = True
    """False behind a NAT: reached only over connections that it dialled itself."""


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """What holds for the whole simulated world."""

    link: Link = Link()
    """Of the pairs without one of their own."""

    dial_loss: float = 0.0
    """The share of dials that get no answer."""

    dial_seconds_max: float = 10.0
    dial_round_trips: int = 3
    """What a first connection takes: TCP, Noise, multiplexer. Later streams between the same two take one."""

    stream_bytes_max: int = 1 << 20
    """Bytes of one stream, in one direction, that are sent and not yet received: then the sender waits."""

    stall_seconds_max: float = 40.0
    """A partition or a freeze of this length breaks the streams across it, as keep-alives do."""


@final
class World:
    """All that peers share: the map, the chances, the failures, the counters.

    `bytes_sent` and `bytes_received` count payload bytes by peer, from the world's beginning.
    """

    def __init__(self, seed: int, config: WorldConfig | None = None, tap: Tap | None = None) -> None:
        self.config = config or WorldConfig()
        self.tap = tap
        self.dial_loss = self.config.dial_loss
        """May change at any time."""
        self.rng = random.Random(seed)
        self.bytes_sent: dict[PeerID, int] = defaultdict(int)
        self.bytes_received: dict[PeerID, int] = defaultdict(int)
        self._networks: dict[PeerID, SimulatedNetwork] = {}
        self._links: dict[tuple[PeerID, PeerID], Link] = {}
        self._sides: dict[PeerID, int] = {}
        self._frozen: set[PeerID] = set()

    @asynccontextmanager
    async def open_network(self, peer: PeerID, access: Access | None = None) -> AsyncIterator[SimulatedNetwork]:
        """`peer`'s network as long as the context lasts; leaving it ends its streams and its handlers."""
        if peer in self._networks:
            raise ValueError(f"peer {peer!r} is already in this world")
        async with open_background() as tasks:
            network = SimulatedNetwork(self, peer, access or Access(), tasks)
            self._networks[peer] = network
            try:
                yield network
            finally:
                if self._networks.get(peer) is network:
                    del self._networks[peer]
                    network.leave()

    def link(self, one: PeerID, other: PeerID) -> Link:
        return self._links.get((one, other), self.config.link)

    def set_link(self, one: PeerID, other: PeerID, link: Link) -> None:
        """For the streams that are opened from now on."""
        self._links[one, other] = self._links[other, one] = link

    def crash(self, peer: PeerID) -> None:
        """Break `peer`'s streams and refuse dials to it; what had not left its uplink is lost.

        The streams end, or break, for the others one link delay later. The peer's own tasks are the caller's to
        cancel. A new network may be opened for the same peer at once.
        """
        network = self._networks.pop(peer, None)
        if network is not None:
            network.crash()

    def partition(self, *sides: Collection[PeerID]) -> None:
        """Stall all that goes between peers of different `sides`; who is named in none forms one more side.

        Replaces an earlier partition. What was sent arrives after `heal`, if that comes before `stall_seconds_max`.
        """
        self._sides = {peer: number for number, side in enumerate(sides) for peer in side}
        self._cut_changed()

    def heal(self) -> None:
        """End the partition."""
        self._sides = {}
        self._cut_changed()

    def freeze(self, peer: PeerID) -> None:
        """Nothing reaches `peer` and nothing leaves it until `thaw`; dials to it get no answer."""
        self._frozen.add(peer)
        self._cut_changed()

    def thaw(self, peer: PeerID) -> None:
        self._frozen.discard(peer)
        self._cut_changed()

    def kill_daemon(self, peer: PeerID) -> None:
        """Breaks `peer`'s streams as a crash does; until `revive_daemon` it can neither dial nor be dialled."""
        network = self._networks.get(peer)
        if network is not None:
            network.lose_daemon()

    def revive_daemon(self, peer: PeerID) -> None:
        network = self._networks.get(peer)
        if network is not None:
            network.has_daemon = True

    def break_streams(self, is_hit: Callable[[], bool]) -> None:
        """Breaks both ends of each stream for which `is_hit` says so; asked once a stream, in a fixed order."""
        for network in self._networks.values():
            network.break_streams(is_hit)

    def is_cut(self, one: PeerID, other: PeerID) -> bool:
        """Whether a partition or a freeze lies between the two."""
        if self._frozen and (one in self._frozen or other in self._frozen):
            return True
        return bool(self._sides) and self._sides.get(one) != self._sides.get(other)

    def find(self, peer: PeerID) -> SimulatedNetwork | None:
        return self._networks.get(peer)

    def _cut_changed(self) -> None:
        for network in self._networks.values():
            network.set_cuts()
        if self._sides or self._frozen:
            asyncio.get_running_loop().call_later(self.config.stall_seconds_max, self._break_stalled)

    def _break_stalled(self) -> None:
        for network in self._networks.values():
            network.break_stalled()

    def _count_sent(self, peer: PeerID, num_bytes: int) -> None:
        self.bytes_sent[peer] += num_bytes

    def _count_received(self, peer: PeerID, num_bytes: int) -> None:
        self.bytes_received[peer] += num_bytes

    def make_port(self, peer: PeerID, access: Access) -> Port:
        return Port(
            peer,
            self.rng,
            access.uplink_bytes_per_second,
            access.downlink_bytes_per_second,
            self.config.stream_bytes_max,
            self._count_sent,
            self._count_received,
            self.tap,
        )


@final
class SimulatedNetwork(Network):
    """One peer's end of a `World`; made by `World.open_network`."""

    def __init__(self, world: World, peer: PeerID, access: Access, tasks: TaskGroup) -> None:
        self._world = world
        self._access = access
        self._tasks = tasks
        self._handlers: dict[str, Handler] = {}
        self._connected: set[PeerID] = set()
        self._up = True
        self.has_daemon = True
        self._port = world.make_port(peer, access)

    @property
    def peer_id(self) -> PeerID:
        return self._port.peer

    async def open_stream(self, peer: PeerID, protocol: str) -> ByteStream:
        world = self._world
        config = world.config
        self._check_usable()
        link = world.link(self.peer_id, peer)
        known = peer in self._connected
        half_trip = link.delay_seconds + link.jitter_seconds * world.rng.random()
        seconds = half_trip * (1 if known else 2 * config.dial_round_trips - 1)
        if seconds + half_trip > config.dial_seconds_max or (not known and world.rng.random() < world.dial_loss):
            await self._dial_in_vain(peer)
        await anyio.sleep(seconds)
        target = world.find(peer)
        if world.is_cut(self.peer_id, peer):
            await self._dial_in_vain(peer, seconds)
        self._check_usable()
        if target is None or not target.has_daemon or not (known or target._access.dialable):
            await anyio.sleep(half_trip)
            raise PeerUnreachable(f"{peer} refuses connections")
        self._connected.add(peer)
        target._connected.add(self.peer_id)
        near = target._accept(self._port, protocol, link)
        if near is None:
            await anyio.sleep(half_trip)
            raise PeerUnreachable(f"{peer} does not serve {protocol}")
        opened = False
        try:
            await anyio.sleep(half_trip)
            opened = True
        finally:
            if not opened:  # Cancelled: the handler over there must not wait for us.
                near.close()
        return near

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler

    def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Not needed: in this world a peer's id is enough to dial it."""

    async def addresses(self) -> list[str]:
        return [f"/memory/1/p2p/{self.peer_id}"]

    def leave(self) -> None:
        """End all streams normally."""
        self._up = False
        self._forget_connections()
        for stream in list(self._port.streams):
            stream.close()

    def crash(self) -> None:
        self._up = False
        self._forget_connections()
        for stream in list(self._port.streams):
            stream.crash()

    def lose_daemon(self) -> None:
        self.has_daemon = False
        self._forget_connections()
        self._connected.clear()
        for stream in list(self._port.streams):
            stream.crash()

    def break_streams(self, is_hit: Callable[[], bool]) -> None:
        """Each stream belongs to the one of its ends that has the lower id."""
        for stream in list(self._port.streams):
            if self.peer_id < stream.other.peer and is_hit():
                stream.break_both()

    def set_cuts(self) -> None:
        """Hold back what a partition or a freeze is in the way of, and deliver the rest."""
        for stream in self._port.streams:
            stream.set_cut(self._world.is_cut(self.peer_id, stream.other.peer))

    def break_stalled(self) -> None:
        """Break the streams that have been cut for too long, and forget their connections."""
        for stream in list(self._port.streams):
            if stream.is_stalled(self._world.config.stall_seconds_max):
                self._connected.discard(stream.other.peer)
                stream.break_both()

    def _check_usable(self) -> None:
        if not self._up:
            raise PeerUnreachable(f"{self.peer_id} has crashed")
        if not self.has_daemon:
            raise PeerUnreachable(f"{self.peer_id} has no daemon just now")

    def _forget_connections(self) -> None:
        for peer in sorted(self._connected):
            other = self._world.find(peer)
            if other is not None:
                other._connected.discard(self.peer_id)

    async def _dial_in_vain(self, peer: PeerID, seconds_gone: float = 0.0) -> None:
        await anyio.sleep(max(0.0, self._world.config.dial_seconds_max - seconds_gone))
        raise PeerUnreachable(f"{peer} did not answer within {self._world.config.dial_seconds_max} s")

    def _accept(self, caller: Port, protocol: str, link: Link) -> SimulatedStream | None:
        """Start the handler; returns the caller's end, or None if nobody serves `protocol`."""
        handler = self._handlers.get(protocol)
        if handler is None:
            return None
        near = SimulatedStream(caller, link.delay_seconds, link.jitter_seconds, protocol)
        far = SimulatedStream(self._port, link.delay_seconds, link.jitter_seconds, protocol)
        near.other, far.other = far, near
        self._tasks.start_soon(run_handler, handler, caller.peer, far)
        return near
