"""Messages on a byte stream: length (varint), 8-byte digest, payload; damage and cuts are named errors.

A dead peer's stream may end as if all were well, and a length is a stranger's claim: hence the digest and the limit.
That the *right number* of frames came is for the caller to check: a stream may end cleanly between any two.
"""

from __future__ import annotations

from abc import abstractmethod
from hashlib import blake2b
from typing import NoReturn, final

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

DIGEST_BYTES = 8
LENGTH_BYTES_MAX = 5
# Below this size one copy is cheaper than a second send.
_JOIN_BYTES_MAX = 65536
_RECEIVE_BYTES = 262144


class FrameError(Exception):
    """The other side broke the framing; the stream is of no more use."""


class FrameTooLong(FrameError):
    """A frame announces more bytes than the reader allows."""


class FrameDamaged(FrameError):
    """A frame's length is malformed, or its digest does not fit its payload."""


class FrameCut(FrameError):
    """The stream ended inside a frame."""


STREAM_ERRORS = (FrameError, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError)
"""All that `send_frame` and `FrameReader.receive` raise because of the world: to be turned into data by the caller."""


class PromptStream(ByteSendStream):
    """A stream that often knows at once that a send need not wait: most of a small frame's cost is its deadline."""

    @abstractmethod
    def send_at_once(self, item: bytes) -> bool:
        """Sends all of `item`, or, where that would wait, nothing of it: then False. Raises what `send` raises."""


def send_frame_at_once(stream: ByteSendStream, payload: bytes) -> bool:
    """As `send_frame`, if that need not wait; else nothing is sent: then False."""
    if len(payload) > _JOIN_BYTES_MAX or not isinstance(stream, PromptStream):
        return False
    return stream.send_at_once(_encode_length(len(payload)) + _digest(payload) + payload)


async def send_frame(stream: ByteSendStream, payload: bytes, *, seconds_max: float) -> None:
    """Send one frame of 9 to 13 bytes more than `payload`.

    Raises `TimeoutError` after `seconds_max` (a frozen receiver blocks the sender): then close the stream, for a part
    of the frame may have left.
    """
    header = _encode_length(len(payload)) + _digest(payload)
    if len(payload) <= _JOIN_BYTES_MAX and isinstance(stream, PromptStream) and stream.send_at_once(header + payload):
        return
    # A bare scope, for `anyio.fail_after` takes twice as long as all the rest here.
    with anyio.CancelScope(deadline=anyio.current_time() + seconds_max) as scope:
        if len(payload) <= _JOIN_BYTES_MAX:
            await stream.send(header + payload)
        else:
            await stream.send(header)
            await stream.send(payload)
    if scope.cancelled_caught:
        raise TimeoutError(f"a frame of {len(payload)} bytes was not taken within {seconds_max} s")


@final
class FrameReader:
    """Reads frames of at most `bytes_max` payload bytes from `stream`; a cancelled `receive` loses nothing."""

    def __init__(self, stream: ByteReceiveStream, bytes_max: int) -> None:
        self._stream = stream
        self._bytes_max = bytes_max
        self._buffer = bytearray()
        self._error: FrameError | None = None

    async def receive(self, seconds_max: float | None) -> bytes:
        """The next frame's payload, within `seconds_max` (None: wait for ever, for links that may be idle).

        Raises `anyio.EndOfStream` at a clean end, a `FrameError` (then, and ever after) for what a stranger did wrong,
        `TimeoutError`, and what the stream raises.
        """
        if self._error is not None:
            raise self._error
        payload = self._take_frame()
        if payload is not None:
            return payload
        if seconds_max is None:
            return await self._receive()
        with anyio.CancelScope(deadline=anyio.current_time() + seconds_max):
            return await self._receive()
        raise TimeoutError(f"no whole frame came within {seconds_max} s")

    async def _receive(self) -> bytes:
        while True:
            try:
                self._buffer += await self._stream.receive(_RECEIVE_BYTES)
            except anyio.EndOfStream as error:
                if not self._buffer:
                    raise
                self._fail(FrameCut(f"the stream ended {len(self._buffer)} bytes into a frame"), error)
            payload = self._take_frame()
            if payload is not None:
                return payload

    def _take_frame(self) -> bytes | None:
        """The frame at the head of the buffer, or None as long as a part of it is missing."""
        buffer = self._buffer
        num_bytes, head = 0, 0
        while True:
            if head == len(buffer):
                return None
            byte = buffer[head]
            num_bytes |= (byte & 0x7F) << (7 * head)
            head += 1
            if byte < 0x80:
                break
            if head == LENGTH_BYTES_MAX:
                self._fail(FrameDamaged(f"a frame's length takes more than {LENGTH_BYTES_MAX} bytes"))
        if head > 1 and byte == 0:
            self._fail(FrameDamaged("a frame's length is padded"))
        if num_bytes > self._bytes_max:
            self._fail(FrameTooLong(f"a frame of {num_bytes} bytes, allowed are {self._bytes_max}"))
        start = head + DIGEST_BYTES
        end = start + num_bytes
        if len(buffer) < end:
            return None
        with memoryview(buffer) as view:
            digest = bytes(view[head:start])
            payload = bytes(view[start:end])
        if _digest(payload) != digest:
            self._fail(FrameDamaged(f"the digest of a frame of {num_bytes} bytes does not fit"))
        del buffer[:end]
        return payload

    def _fail(self, error: FrameError, cause: BaseException | None = None) -> NoReturn:
        self._error = error
        self._buffer.clear()
        raise error from cause


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=DIGEST_BYTES).digest()


def _encode_length(num_bytes: int) -> bytes:
    if num_bytes >= 1 << (7 * LENGTH_BYTES_MAX):
        raise ValueError(f"a frame of {num_bytes} bytes is longer than the format allows")
    encoded = bytearray()
    while num_bytes > 0x7F:
        encoded.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    encoded.append(num_bytes)
    return bytes(encoded)
