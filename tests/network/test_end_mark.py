"""A marked stream carries any chunks, ends only with its mark, and closes within its limit."""

from __future__ import annotations

import anyio
import pytest
from anyio.abc import ByteStream
from hypothesis import given
from hypothesis import strategies as st

from network.end_mark import EndMarkedStream
from simulator.virtual_time import run_virtual


class Pipe(ByteStream):
    """What is sent can be received, in pieces of given sizes; then the end; `full` takes nothing."""

    def __init__(self, pieces: list[int] | None = None, *, full: bool = False) -> None:
        self.data = b""
        self.pieces = list(pieces or [])
        self.full = full
        self.closed = False

    async def send(self, item: bytes) -> None:
        if self.full:
            await anyio.sleep_forever()
        self.data += item

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self.data:
            raise anyio.EndOfStream
        size = min(self.pieces.pop() if self.pieces else max_bytes, max_bytes)
        data, self.data = self.data[:size], self.data[size:]
        return data

    async def send_eof(self) -> None:
        raise AssertionError("it cannot")

    async def aclose(self) -> None:
        self.closed = True


@given(
    st.lists(st.binary(max_size=200), max_size=8),
    st.lists(st.integers(1, 50), max_size=200),
    st.integers(1, 100),
    st.booleans(),
)
def test_chunks_arrive_whatever_the_pieces(
    chunks: list[bytes], pieces: list[int], max_bytes: int, closes: bool
) -> None:
    async def program() -> None:
        pipe = Pipe(pieces)
        sender, receiver = EndMarkedStream(pipe, 1), EndMarkedStream(pipe, 1)
        for chunk in chunks:
            await sender.send(chunk)
        await (sender.aclose() if closes else sender.send_eof())
        received = b""
        with pytest.raises(anyio.EndOfStream):
            while True:
                part = await receiver.receive(max_bytes)
                assert 0 < len(part) <= max_bytes
                received += part
        assert received == b"".join(chunks)

    run_virtual(program)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.integers(0))
def test_an_end_without_the_mark_is_a_break(chunks: list[bytes], cut: int) -> None:
    async def program() -> None:
        pipe = Pipe()
        sender, receiver = EndMarkedStream(pipe, 1), EndMarkedStream(pipe, 1)
        for chunk in chunks:
            await sender.send(chunk)
        await sender.send_eof()
        pipe.data = pipe.data[: cut % len(pipe.data)]
        received = b""
        with pytest.raises(anyio.BrokenResourceError):
            while True:
                received += await receiver.receive()
        assert b"".join(chunks).startswith(received)

    run_virtual(program)


def test_a_large_send_is_split_and_costs_three_bytes_a_chunk() -> None:
    async def program() -> None:
        pipe = Pipe()
        stream = EndMarkedStream(pipe, 1)
        await stream.send(b"x" * (1 << 24))
        assert len(pipe.data) == (1 << 24) + 2 * 3
        await stream.send_eof()
        assert b"".join([part async for part in stream]) == b"x" * (1 << 24)

    run_virtual(program)


def test_closing_waits_no_longer_than_its_limit_and_closes_the_stream_below() -> None:
    async def program() -> None:
        pipe = Pipe(full=True)
        stream = EndMarkedStream(pipe, 5)
        await stream.aclose()
        assert anyio.current_time() == 5
        assert pipe.closed

    run_virtual(program)


def test_after_a_cut_send_no_end_is_claimed() -> None:
    async def program() -> None:
        pipe = Pipe(full=True)
        stream = EndMarkedStream(pipe, 5)
        with anyio.move_on_after(1):
            await stream.send(b"never taken")
        with pytest.raises(anyio.BrokenResourceError):
            await stream.send(b"more")
        pipe.full = False
        await stream.aclose()
        assert pipe.data == b""

    run_virtual(program)
