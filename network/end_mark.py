"""Half-close over a stream that cannot: the end is sent as a mark, and a stream that ends without it is broken.

The daemon closes both directions of a stream as soon as one of them ends, and passes on a peer's death as a normal
end. So each `send` is a chunk with its length (3 bytes) before it, and a chunk of length 0 is the end.
"""

from __future__ import annotations

from contextlib import suppress
from typing import final

import anyio
from anyio.abc import ByteStream

_LENGTH_BYTES = 3
_CHUNK_BYTES_MAX = (1 << (8 * _LENGTH_BYTES)) - 1
_END = bytes(_LENGTH_BYTES)
_RECEIVE_BYTES = 262144
# Below this size one copy is cheaper than a second send.
_JOIN_BYTES_MAX = 65536


@final
class EndMarkedStream(ByteStream):
    """Raises `BrokenResourceError` where `stream` ends without the mark."""

    def __init__(self, stream: ByteStream, close_seconds_max: float) -> None:
        """Closing tries for at most `close_seconds_max` to send the mark."""
        self._stream = stream
        self._close_seconds_max = close_seconds_max
        self._send_guard = anyio.ResourceGuard("sending to")
        self._receive_guard = anyio.ResourceGuard("receiving from")
        self._closed = False
        self._end_sent = False
        self._may_send_end = True
        self._end_received = False
        self._buffer = b""
        self._place = 0
        self._length = b""
        self._chunk_bytes_left = 0

    async def receive(self, max_bytes: int = 65536) -> bytes:
        with self._receive_guard:
            while True:
                if self._closed:
                    raise anyio.ClosedResourceError
                if self._end_received:
                    raise anyio.EndOfStream
                if self._place == len(self._buffer):
                    try:
                        self._buffer = await self._stream.receive(_RECEIVE_BYTES)
                    except anyio.EndOfStream as error:
                        raise anyio.BrokenResourceError from error
                    self._place = 0
                elif self._chunk_bytes_left:
                    data = self._take(min(self._chunk_bytes_left, max_bytes))
                    self._chunk_bytes_left -= len(data)
                    return data
                else:
                    self._take_length()

    async def send(self, item: bytes) -> None:
        with self._send_guard:
            self._check_sendable()
            for start in range(0, len(item), _CHUNK_BYTES_MAX):
                chunk = item[start : start + _CHUNK_BYTES_MAX] if len(item) > _CHUNK_BYTES_MAX else item
                length = len(chunk).to_bytes(_LENGTH_BYTES, "big")
                # Cancelled inside a chunk, the end could only be taken for a part of it.
                self._may_send_end = False
                if len(chunk) <= _JOIN_BYTES_MAX:
                    await self._stream.send(length + chunk)
                else:
                    await self._stream.send(length)
                    await self._stream.send(chunk)
                self._may_send_end = True

    async def send_eof(self) -> None:
        if self._end_sent and not self._closed:
            return
        with self._send_guard:
            self._check_sendable()
            self._end_sent = True
            self._may_send_end = False
            await self._stream.send(_END)

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            if self._may_send_end:
                with anyio.move_on_after(self._close_seconds_max), suppress(anyio.BrokenResourceError):
                    await self._stream.send(_END)
            await self._stream.aclose()

    def _check_sendable(self) -> None:
        if self._closed or self._end_sent:
            raise anyio.ClosedResourceError
        if not self._may_send_end:
            raise anyio.BrokenResourceError("an earlier send was cut short")

    def _take(self, bytes_max: int) -> bytes:
        data = self._buffer[self._place : self._place + bytes_max]
        self._place += len(data)
        return data

    def _take_length(self) -> None:
        self._length += self._take(_LENGTH_BYTES - len(self._length))
        if len(self._length) == _LENGTH_BYTES:
            self._chunk_bytes_left = int.from_bytes(self._length, "big")
            self._length = b""
            self._end_received = self._chunk_bytes_left == 0
