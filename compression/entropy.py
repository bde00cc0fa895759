"""An entropy coder for small symbols: many range-coded lanes side by side (rANS, arXiv 1311.2540), in integers only.

A lane holds a state 2^16 <= x < 2^32. Coding symbol s of frequency f (of 2^14) makes it about 2^14 / f times larger;
whenever it would grow past 2^32 its low 16 bits are written. The lanes take the symbols in turn, so that both
directions are array operations. What is decoded is the one input that gives these bytes: every state must end where
it began and every word must be used.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from compression.bitstream import Integers
from compression.seam import InvalidPacket

PRECISION = 14
SYMBOLS_MAX = 256
# Symbols a lane: a lane costs about 24 bits more than its content, and few long lanes are slow.
_LANE_SYMBOLS = ((1 << 18, 2048), (1 << 17, 1024), (1 << 14, 512), (0, 256))  # From so many symbols on.
_LOW = 1 << 16
_LOG_BITS = 16

Symbols = NDArray[np.uint8]


def frequencies(counts: Integers) -> Integers:
    """Counts scaled to a sum of 2^14, at least 1 for what occurs; all zero if nothing does."""
    total = int(counts.sum())
    if total == 0:
        return np.zeros_like(counts)
    scaled = np.where(counts > 0, np.maximum(1, (counts << PRECISION) // total), 0)
    while (missing := (1 << PRECISION) - int(scaled.sum())) != 0:
        largest = int(scaled.argmax())
        scaled[largest] += max(missing, 1 - int(scaled[largest]) // 2)  # Never down to zero.
    return scaled


def cost_bits(counts: Integers) -> int:
    """About how long `encode` makes symbols of these counts; the same integer everywhere."""
    logs = _logarithms()[frequencies(counts)]
    total = int(counts.sum())
    return (int((counts * ((PRECISION << _LOG_BITS) - logs)).sum()) >> _LOG_BITS) + 24 * _lanes(total)


def encode(symbols: Symbols, scaled: Integers) -> bytes:
    """The states of all lanes, then their words; `scaled` are the frequencies of the symbols."""
    lanes = _lanes(len(symbols))
    rows = -(-len(symbols) // lanes) if lanes else 0
    frequency = scaled.astype(np.uint64)
    first = np.cumsum(frequency) - frequency
    state = np.full(lanes, _LOW, dtype=np.uint64)
    words: list[NDArray[np.uint16]] = []
    for row in range(rows - 1, -1, -1):
        chosen = symbols[row * lanes : (row + 1) * lanes]
        x = state[: len(chosen)]
        f = frequency[chosen]
        full = np.flatnonzero(x >= f << np.uint64(32 - PRECISION))
        words.append(x[full].astype(np.uint16))
        x[full] >>= np.uint64(16)
        quotient = x // f
        x += quotient * (np.uint64(1 << PRECISION) - f) + first[chosen]
    head = state.astype("<u4").tobytes()
    return head + (np.concatenate(words[::-1]).astype("<u2").tobytes() if words else b"")


def decode(data: bytes, count: int, scaled: Integers) -> Symbols:
    """`count` symbols; raises `InvalidPacket`. `scaled` sums to 2^14, unless `count` is zero."""
    lanes = _lanes(count)
    if len(data) < 4 * lanes or len(data) % 2:
        raise InvalidPacket(f"levels: truncated, {len(data)} bytes for {lanes} coded lanes")
    state = np.frombuffer(data[: 4 * lanes], dtype="<u4").astype(np.uint32)
    words = np.frombuffer(data[4 * lanes :], dtype="<u2").astype(np.uint32)
    if (state < _LOW).any():
        raise InvalidPacket("levels: no coder ends in such a state")
    symbol = np.repeat(np.arange(len(scaled)), scaled)
    frequency = scaled[symbol].astype(np.uint32)
    offset = (np.arange(len(symbol)) - (np.cumsum(scaled) - scaled)[symbol]).astype(np.uint32)
    slots = np.empty(count, dtype=np.uint16)
    used = 0
    for start in range(0, count, max(1, lanes)):
        x = state[: count - start]
        slot = x & np.uint32((1 << PRECISION) - 1)
        slots[start : start + len(x)] = slot
        x >>= np.uint32(PRECISION)
        x *= frequency[slot]
        x += offset[slot]
        low = np.flatnonzero(x < _LOW)
        taken = words[used : used + len(low)]
        used += len(low)
        if used > len(words):
            raise InvalidPacket("levels: truncated, a coded lane has no more words")
        x[low] = (x[low] << np.uint32(16)) | taken
    if used != len(words):
        raise InvalidPacket(f"levels: {len(words) - used} coded words too many")
    if (state != _LOW).any():
        raise InvalidPacket("levels: a coded lane does not end where it began")
    return symbol.astype(np.uint8)[slots]


def _lanes(count: int) -> int:
    return -(-count // next(length for least, length in _LANE_SYMBOLS if count >= least))


@cache
def _logarithms() -> Integers:
    """floor(2^16 log2(f)) of f = 0 .. 2^14 (0 for 0), a binary digit at a time: no library's `log` may matter."""
    values = np.arange((1 << PRECISION) + 1, dtype=np.uint64)
    whole = np.frexp(np.maximum(values, 1).astype(np.float64))[1].astype(np.uint64) - np.uint64(1)
    mantissa = np.maximum(values, 1) << (np.uint64(31) - whole)  # In [2^31, 2^32): a number in [1, 2).
    logs = whole
    for _ in range(_LOG_BITS):
        mantissa = (mantissa * mantissa) >> np.uint64(31)
        digit = (mantissa >= np.uint64(1 << 32)).astype(np.uint64)
        mantissa >>= digit
        logs = (logs << np.uint64(1)) | digit
    result: Integers = logs.astype(np.int64)
    return result
