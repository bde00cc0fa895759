"""The stream of one meeting between two peers: messages in order, written by a task of its own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import final

import anyio
from anyio.abc import ByteStream

from averaging.gossip_messages import GossipMessage, Payload, encode_gossip, parse_gossip
from averaging.record import Malformed
from network.framing import STREAM_ERRORS, FrameReader, send_frame

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX = 1.0
QUEUE_MESSAGES_MAX = 1024


@asynccontextmanager
async def open_channel(
    stream: ByteStream, frame_bytes_max: int, seconds_max: float, count: Callable[[int, bool], None]
) -> AsyncIterator[Channel]:
    """Closes the stream in the end; what was sent before the body ended well is still written, within a limit.

    `count` is told the bytes of each frame that was written, and whether it held a contribution.
    """
    channel = Channel(stream, frame_bytes_max, seconds_max, count)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.keep_writing)
            yield channel
            with anyio.move_on_after(CLOSE_SECONDS_MAX):
                await channel.wait_written()
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS_MAX):
            await stream.aclose()


@final
class Channel:
    """Made by `open_channel`. Both sides may send large messages at once: sending never waits."""

    def __init__(
        self, stream: ByteStream, frame_bytes_max: int, seconds_max: float, count: Callable[[int, bool], None]
    ) -> None:
        self._stream = stream
        self._reader = FrameReader(stream, frame_bytes_max)
        self._seconds_max = seconds_max
        self._count = count
        self._queue: deque[tuple[bytes, bool]] = deque()
        self._wake = anyio.Event()
        self._written = anyio.Event()
        self._is_gone = False

    def send(self, message: GossipMessage) -> None:
        """Queued; dropped if the other side is gone."""
        assert len(self._queue) < QUEUE_MESSAGES_MAX
        self._queue.append((encode_gossip(message), isinstance(message, Payload)))
        self._wake.set()

    async def receive(self, seconds: float | None) -> GossipMessage | None:
        """The next message; None if the other side is gone, broke the rules, or said nothing for `seconds`."""
        try:
            return parse_gossip(await self._reader.receive(seconds))
        except (Malformed, *STREAM_ERRORS) as error:
            log.debug("a meeting's stream ended: %r", error)
            return None

    async def keep_writing(self) -> None:
        while True:
            while self._queue and not self._is_gone:
                frame, is_payload = self._queue[0]
                try:
                    await send_frame(self._stream, frame, seconds_max=self._seconds_max)
                except STREAM_ERRORS as error:
                    log.debug("a meeting's stream takes nothing more: %r", error)
                    self._is_gone = True
                    await self._stream.aclose()  # Ends the reader too.
                    break
                self._queue.popleft()
                self._count(len(frame), is_payload)
            self._written.set()
            self._wake = anyio.Event()
            await self._wake.wait()

    async def wait_written(self) -> None:
        """Until all that was queued is on its way, or lost."""
        while self._queue and not self._is_gone:
            self._written = anyio.Event()
            self._wake.set()
            await self._written.wait()
