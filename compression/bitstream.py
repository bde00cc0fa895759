"""Bit fields and Golomb-Rice codes, a whole array at a time, in integers: written here, read back from anyone.

A Rice code of parameter r is the low r bits of a number and its quotient by 2^r in unary (that many zeros, then a
one). The low bits of all numbers come first, then all quotients, so that both directions are array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from compression.seam import InvalidPacket

Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]
_UNARY_SHIFT = 5
FIELD_BITS_MAX = 56
"""A field and the seven bits before it fit 64 bits."""


@final
@dataclass(frozen=True, slots=True)
class Fields:
    """Each value in as many bits as its width, the highest first."""

    values: Integers
    widths: Integers

    @staticmethod
    def none() -> Fields:
        return Fields(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    @staticmethod
    def one(value: int, width: int) -> Fields:
        return Fields(np.array([value], dtype=np.int64), np.array([width], dtype=np.int64))


@final
@dataclass(frozen=True, slots=True)
class Unary:
    """Each value as that many zeros and a one."""

    values: Integers


def as_fields(parts: Sequence[Fields | Unary]) -> Fields:
    """All in one: a unary code is a field of value 1, after fields of zeros where it is long."""
    values: list[Integers] = []
    widths: list[Integers] = []
    for part in parts:
        if isinstance(part, Fields):
            values.append(part.values)
            widths.append(part.widths)
            continue
        zeros, rest = part.values >> _UNARY_SHIFT, part.values & ((1 << _UNARY_SHIFT) - 1)
        ends = np.cumsum(zeros + 1) - 1
        total = int(ends[-1]) + 1 if len(ends) else 0
        value, width = np.zeros(total, dtype=np.int64), np.full(total, 1 << _UNARY_SHIFT, dtype=np.int64)
        value[ends] = 1
        width[ends] = rest + 1
        values.append(value)
        widths.append(width)
    none = np.zeros(0, dtype=np.int64)
    return Fields(np.concatenate([none, *values]), np.concatenate([none, *widths]))


def packed(fields: Fields) -> bytes:
    """The fields' bits and zeros to the end of the byte. Those of one 64-bit word follow each other: they are added."""
    some = fields.widths > 0
    widths = fields.widths[some].astype(np.uint64)
    values = fields.values[some].astype(np.uint64)
    if not len(widths):
        return b""
    ends = np.cumsum(widths)
    total = int(ends[-1])
    starts = ends - widths
    word = (starts >> np.uint64(6)).astype(np.int64)
    over = (starts & np.uint64(63)) + widths  # Where the field ends, counted from its word's start.
    spills = over > np.uint64(64)
    left = np.where(spills, np.uint64(0), np.uint64(64) - over)
    right = np.where(spills, over - np.uint64(64), np.uint64(0))
    first = np.flatnonzero(np.diff(word, prepend=-1))
    words = np.zeros(int(word[-1]) + 2, dtype=np.uint64)
    words[word[first]] = np.add.reduceat((values << left) >> right, first)
    # At most one field spills into each word.
    words[word[spills] + 1] += values[spills] << (np.uint64(64) - right[spills])
    return words.astype(">u8").tobytes()[: -(-total // 8)]


def best_parameter(total: Integers, number: Integers) -> Integers:
    """The Rice parameter for geometric numbers with this sum: floor(log2(0.97 (mean + 1/2)))."""
    scaled = np.maximum(1, (2 * total + number) * 31 // (64 * number))
    parameter: Integers = np.frexp(scaled.astype(np.float64))[1].astype(np.int64) - 1  # Exact: bit length less one.
    return parameter


def zigzag(values: Integers) -> Integers:
    """0, -1, 1, -2 ... to 0, 1, 2, 3 ..."""
    return np.where(values < 0, -2 * values - 1, 2 * values)


def unzigzag(codes: Integers) -> Integers:
    return np.where(codes & 1, -(codes + 1) // 2, codes // 2)


@final
class BitReader:
    """Reads a stranger's bits in order. Nothing it allocates exceeds a small multiple of what it was asked for."""

    def __init__(self, data: bytes) -> None:
        self._bytes: Bytes = np.frombuffer(data + bytes(8), dtype=np.uint8)
        self._end = 8 * len(data)
        self._at = 0

    def fields(self, widths: Integers, name: str) -> Integers:
        """The inverse of `Fields`; widths are ours, at most `FIELD_BITS_MAX`."""
        ends = np.cumsum(widths)
        total = int(ends[-1]) if len(ends) else 0
        if total > self._end - self._at:
            raise InvalidPacket(f"{name}: truncated, {total} bits expected and {self._end - self._at} left")
        starts = ends - widths + self._at
        self._at += total
        windows = np.lib.stride_tricks.as_strided(self._bytes, (len(self._bytes) - 7, 8), (1, 1), writeable=False)
        words = windows[starts >> 3].view(">u8").reshape(-1).astype(np.uint64)
        # Two steps to the right, as a shift by 64 is not defined.
        shifted = (words << (starts & 7).astype(np.uint64)) >> np.uint64(1) >> (63 - widths).astype(np.uint64)
        values: Integers = shifted.astype(np.int64)
        return values

    def field(self, width: int, name: str) -> int:
        return int(self.fields(np.array([width], dtype=np.int64), name)[0])

    def unary(self, count: int, name: str) -> Integers:
        """The inverse of `Unary`."""
        first, shift = self._at >> 3, self._at & 7
        span = (3 * count >> 3) + 16
        while True:
            window = self._bytes[first : min(first + span, self._end >> 3)]
            ones = np.flatnonzero(np.unpackbits(window)[shift:])
            if len(ones) >= count or first + span >= self._end >> 3:
                break
            span *= 2
        if len(ones) < count:
            raise InvalidPacket(f"{name}: truncated, {count} unary codes expected and {len(ones)} found")
        ends = np.concatenate([np.full(1, -1, dtype=np.int64), ones[:count]])
        self._at += int(ends[-1]) + 1
        quotients: Integers = np.diff(ends) - 1
        return quotients

    @property
    def bits_used(self) -> int:
        return self._at

    def rest(self, name: str) -> bytes:
        """What follows the byte that was begun, whose last bits must be zeros."""
        used = -(-self._at // 8)
        if self._at % 8 and int(self._bytes[used - 1]) & ((1 << (8 * used - self._at)) - 1):
            raise InvalidPacket(f"{name}: padding is not zero")
        return self._bytes[used : self._end >> 3].tobytes()


PARAMETER_BITS = 5


def number_parts(numbers: Integers) -> list[Fields | Unary]:
    """Numbers >= 0 as Rice codes of the one parameter that makes them shortest, which comes first."""
    if not len(numbers):
        return []
    width = _cheapest_parameter(numbers)
    low = numbers & ((1 << width) - 1)
    return [
        Fields.one(width, PARAMETER_BITS),
        Fields(low, np.full(len(numbers), width, dtype=np.int64)),
        Unary(numbers >> width),
    ]


def read_numbers(reader: BitReader, count: int, name: str) -> Integers:
    """The inverse of `number_parts`; another parameter than the shortest is refused."""
    if not count:
        return np.zeros(0, dtype=np.int64)
    width = reader.field(PARAMETER_BITS, name)
    numbers = reader.fields(np.full(count, width, dtype=np.int64), name)
    numbers += reader.unary(count, name) << width
    if _cheapest_parameter(numbers) != width:
        raise InvalidPacket(f"{name}: {width} is not the shortest Rice parameter")
    return numbers


def _cheapest_parameter(numbers: Integers) -> int:
    costs = [int((numbers >> width).sum()) + width * len(numbers) for width in range(2**PARAMETER_BITS)]
    return costs.index(min(costs))
