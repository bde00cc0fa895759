"""One message link to every other member: dialled, kept up, written in order, read by one callback.

A link is one byte stream, whoever dialled it: so a peer that can only dial out takes part like any other.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import final

import anyio
from anyio.abc import ByteStream, TaskGroup

from network.framing import STREAM_ERRORS, FrameReader, send_frame, send_frame_at_once
from network.seam import Network, PeerID, PeerUnreachable

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class LinksConfig:
    """Limits of all links of one peer."""

    frame_bytes_max: int
    links_max: int = 64
    queue_messages_max: int = 512
    write_seconds_max: float = 30.0
    """A peer that takes no bytes for so long is dropped."""
    redial_seconds_min: float = 0.25
    redial_seconds_max: float = 15.0
    forget_failures: int = 12
    """A peer that could not be dialled so often in a row is no longer tried until it is named again."""


@final
@dataclass(slots=True)
class _Peer:
    queue: deque[bytes] = field(default_factory=deque)
    wake: anyio.Event = field(default_factory=anyio.Event)
    streams: list[ByteStream] = field(default_factory=list)
    dialling: bool = False
    """Somebody is seeing to it that a stream is there."""
    writing: bool = False


@final
class Links:
    """`on_message(peer, frame)`, `on_up(peer)` and `on_down(peer)` are called in the order in which things happened."""

    def __init__(
        self,
        network: Network,
        protocol: str,
        config: LinksConfig,
        rng: random.Random,
        *,
        on_message: Callable[[PeerID, bytes], None],
        on_up: Callable[[PeerID], None],
        on_down: Callable[[PeerID], None],
        is_needed: Callable[[PeerID], bool] = lambda peer: True,
    ) -> None:
        """A link that breaks is made again if `is_needed(peer)`."""
        self._network = network
        self._protocol = protocol
        self._config = config
        self._rng = rng
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._is_needed = is_needed
        self._peers: dict[PeerID, _Peer] = {}
        self._tasks: TaskGroup | None = None
        self.bytes_sent = 0
        """Of frames written, without the transport's own overhead."""

    async def run(self) -> None:
        """Serves and dials until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            await self._network.serve(self._protocol, self._accept)
            try:
                await anyio.sleep_forever()
            finally:
                self._tasks = None
                tasks.cancel_scope.cancel()

    def know(self, peer: PeerID) -> None:
        """From now on keep a link to `peer`; harmless if there is one."""
        if peer == self._network.peer_id or self._tasks is None:
            return
        if peer not in self._peers and len(self._peers) >= self._config.links_max:
            log.warning("no link to %s: there are %d already", peer, len(self._peers))
            return
        state = self._peers.setdefault(peer, _Peer())
        if not state.dialling and not state.streams:
            state.dialling = True
            self._tasks.start_soon(self._dial, peer, state)

    @property
    def known(self) -> Collection[PeerID]:
        """To whom a link is kept up."""
        return self._peers.keys()

    def close(self, peer: PeerID) -> None:
        """Ends the link to `peer`, which is needed no more."""
        if peer in self._peers:
            self._drop_all(peer, self._peers[peer])

    @property
    def linked(self) -> list[PeerID]:
        return sorted(peer for peer, state in self._peers.items() if state.streams)

    def send(self, peer: PeerID, frame: bytes) -> None:
        """Queues a frame; it is dropped with the link if the link breaks or the queue is full."""
        state = self._peers.get(peer)
        if state is None or not state.streams:
            return
        if len(state.queue) >= self._config.queue_messages_max:
            log.warning("link to %s dropped: it does not take what is sent", peer)
            self._drop_all(peer, state)
            return
        if not state.queue and not state.writing:
            try:
                if send_frame_at_once(state.streams[-1], frame):
                    self.bytes_sent += len(frame)
                    return
            except STREAM_ERRORS as error:
                log.debug("write failed: %s", error)
                self._drop_all(peer, state)
                return
        state.queue.append(frame)
        state.wake.set()

    async def flush(self, seconds_max: float) -> None:
        """Waits until what was queued is written, at most so long."""
        with anyio.move_on_after(seconds_max):
            while any(s.queue or s.writing for s in self._peers.values() if s.streams):  # noqa: ASYNC110
                await anyio.sleep(0.01)

    async def _dial(self, peer: PeerID, state: _Peer) -> None:
        config, wait, failures = self._config, self._config.redial_seconds_min, 0
        try:
            while not state.streams and failures < config.forget_failures:
                try:
                    stream = await self._network.open_stream(peer, self._protocol)
                except PeerUnreachable as error:
                    log.debug("cannot dial %s: %s", peer, error)
                    failures += 1
                    # Two peers that dial each other at the same time must not do so again at the same time.
                    await anyio.sleep(wait * self._rng.uniform(0.5, 1.0))
                    wait = min(2 * wait, config.redial_seconds_max)
                    continue
                if self._tasks is not None:
                    self._tasks.start_soon(self._hold, peer, stream)
                return
        finally:
            state.dialling = False
            if not state.streams and failures >= config.forget_failures:
                self._peers.pop(peer, None)

    async def _accept(self, peer: PeerID, stream: ByteStream) -> None:
        if peer not in self._peers and len(self._peers) >= self._config.links_max:
            log.warning("refused a link from %s: there are %d already", peer, len(self._peers))
            return
        await self._hold(peer, stream)

    async def _hold(self, peer: PeerID, stream: ByteStream) -> None:
        """Reads a stream until it ends; while it lives, its peer can be written to."""
        state = self._peers.setdefault(peer, _Peer())
        state.streams.append(stream)
        if len(state.streams) == 1:
            state.queue.clear()
            self._on_up(peer)
        reader = FrameReader(stream, self._config.frame_bytes_max)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, state, stream)
                try:
                    while True:
                        self._on_message(peer, await reader.receive(None))
                except STREAM_ERRORS as error:
                    log.debug("link with %s ended: %s", peer, error)
                tasks.cancel_scope.cancel()
        finally:
            self._forget(peer, state, stream)
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                await stream.aclose()

    async def _write(self, state: _Peer, stream: ByteStream) -> None:
        """Writes the queue to `stream` while it is the peer's newest."""
        while True:
            while state.queue and state.streams[-1] is stream:
                frame = state.queue.popleft()
                state.writing = True
                try:
                    await send_frame(stream, frame, seconds_max=self._config.write_seconds_max)
                except STREAM_ERRORS as error:
                    log.debug("write failed: %s", error)
                    await stream.aclose()  # Ends the reader too.
                    return
                finally:
                    state.writing = False
                self.bytes_sent += len(frame)
            if state.wake.is_set():  # Two writers wait for one event: who replaced it would leave the other asleep.
                state.wake = anyio.Event()
            await state.wake.wait()

    def _forget(self, peer: PeerID, state: _Peer, stream: ByteStream) -> None:
        state.streams.remove(stream)
        state.wake.set()
        if state.streams:
            # Both had dialled. What was on its way over the lost stream is lost, so that all is to be said again.
            self._on_down(peer)
            self._on_up(peer)
        else:
            state.queue.clear()
            self._on_down(peer)
            if state.dialling or self._tasks is None:
                return
            if self._is_needed(peer):
                state.dialling = True
                self._tasks.start_soon(self._dial, peer, state)
            else:
                self._peers.pop(peer, None)

    def _drop_all(self, peer: PeerID, state: _Peer) -> None:
        state.queue.clear()
        if self._tasks is not None:
            for stream in state.streams:
                self._tasks.start_soon(stream.aclose)
