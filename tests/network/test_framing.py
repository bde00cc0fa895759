"""Frames survive any chunking, and any flip, cut or false length is a named error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import anyio
import pytest
from anyio.abc import ByteStream
from hypothesis import given
from hypothesis import strategies as st

from network.framing import (
    FrameCut,
    FrameDamaged,
    FrameError,
    FrameReader,
    FrameTooLong,
    send_frame,
)
from simulator.virtual_time import run_virtual

BYTES_MAX = 100_000
payloads = st.lists(st.binary(max_size=300), max_size=6)


class Tape(ByteStream):
    """Hands out the given chunks, then ends (or hangs); keeps what is sent."""

    def __init__(self, chunks: Sequence[bytes] = (), *, hangs: bool = False) -> None:
        self.chunks = [chunk for chunk in chunks if chunk]
        self.sent = b""
        self.hangs = hangs

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        if self.chunks:
            chunk = self.chunks.pop(0)
            if len(chunk) > max_bytes:
                self.chunks.insert(0, chunk[max_bytes:])
            return chunk[:max_bytes]
        if self.hangs:
            await anyio.sleep_forever()
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        if self.hangs:
            await anyio.sleep_forever()
        self.sent += item

    async def send_eof(self) -> None: ...

    async def aclose(self) -> None: ...


def encode(frames: Sequence[bytes]) -> bytes:
    async def main() -> bytes:
        tape = Tape()
        for payload in frames:
            await send_frame(tape, payload, seconds_max=1)
        return tape.sent

    return run_virtual(main)


def decode(chunks: Sequence[bytes], bytes_max: int = BYTES_MAX) -> tuple[list[bytes], Exception]:
    """The frames read and what ended the reading."""

    async def main() -> tuple[list[bytes], Exception]:
        reader = FrameReader(Tape(chunks), bytes_max)
        frames: list[bytes] = []
        while True:
            try:
                frames.append(await reader.receive(1))
            except (FrameError, anyio.EndOfStream) as error:
                return frames, error

    return run_virtual(main)


def split(wire: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(wire) + 1) for cut in cuts), len(wire)]
    return [wire[start:end] for start, end in itertools.pairwise(places)]


@given(payloads, st.lists(st.integers(0, 2000), max_size=8))
def test_frames_arrive_whole_however_the_stream_is_chunked(frames: list[bytes], cuts: list[int]) -> None:
    received, error = decode(split(encode(frames), cuts))
    assert received == frames
    assert isinstance(error, anyio.EndOfStream)


@given(payloads.filter(bool), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_never_yields_a_false_frame(frames: list[bytes], place: int, bit: int) -> None:
    wire = bytearray(encode(frames))
    wire[place % len(wire)] ^= 1 << bit
    received, error = decode([bytes(wire)])
    assert received == frames[: len(received)]
    assert isinstance(error, FrameError)


@given(payloads.filter(bool), st.integers(0))
def test_a_cut_inside_a_frame_is_no_clean_end(frames: list[bytes], place: int) -> None:
    wire = encode(frames)
    ends = [len(encode(frames[:count])) for count in range(len(frames) + 1)]
    place %= len(wire)
    received, error = decode([wire[:place]])
    assert received == frames[: len(received)]
    assert isinstance(error, anyio.EndOfStream if place in ends else FrameCut)


@given(st.binary(max_size=400))
def test_noise_is_rejected(noise: bytes) -> None:
    received, error = decode([noise])
    assert received == []
    assert isinstance(error, FrameError) or noise == b""


def test_a_false_length_is_refused_before_its_bytes_are_waited_for() -> None:
    received, error = decode([encode([bytes(1001)])[:2]], bytes_max=1000)
    assert received == []
    assert isinstance(error, FrameTooLong)
    assert decode([encode([bytes(1000)])], bytes_max=1000)[0] == [bytes(1000)]


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff\xff\x01", b"\x80\x00"])
def test_a_malformed_length_is_damage(length: bytes) -> None:
    assert isinstance(decode([length + bytes(20)])[1], FrameDamaged)


@pytest.mark.parametrize(("num_bytes", "overhead"), [(0, 9), (127, 9), (128, 10), (16_384, 11), (80_000, 11)])
def test_the_overhead_is_small(num_bytes: int, overhead: int) -> None:
    assert len(encode([bytes(num_bytes)])) == num_bytes + overhead


def test_an_error_stays() -> None:
    async def main() -> None:
        good = encode_now(b"good")
        reader = FrameReader(Tape([b"\x80\x00", good]), BYTES_MAX)
        for _ in range(2):
            with pytest.raises(FrameDamaged):
                await reader.receive(None)

    def encode_now(payload: bytes) -> bytes:
        return wire[payload]

    wire = {b"good": encode([b"good"])}
    run_virtual(main)


def test_a_timed_out_receive_loses_nothing() -> None:
    wire = encode([b"first", b"second"])

    async def main() -> list[bytes]:
        tape = Tape([wire[:9]], hangs=True)
        reader = FrameReader(tape, BYTES_MAX)
        with pytest.raises(TimeoutError):
            await reader.receive(5)
        assert anyio.current_time() == 5
        tape.chunks.append(wire[9:])
        return [await reader.receive(5), await reader.receive(None)]

    assert run_virtual(main) == [b"first", b"second"]


def test_a_send_to_a_frozen_receiver_times_out() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await send_frame(Tape(hangs=True), b"payload", seconds_max=7)
        assert anyio.current_time() == 7

    run_virtual(main)


def test_streams_errors_pass_through() -> None:
    class Broken(Tape):
        async def receive(self, max_bytes: int = 65536) -> bytes:
            raise anyio.BrokenResourceError

    read: Callable[[], object] = lambda: run_virtual(FrameReader(Broken(), 10).receive, 1.0)  # noqa: E731
    with pytest.raises(anyio.BrokenResourceError):
        read()
