"""Bit fields and Golomb-Rice codes, a whole array at once, in integers only: written here, read back from anyone.

A Rice code of parameter r is the low r bits of a number and its quotient by 2^r in unary (that many zeros, then a
one). The low bits of all numbers come first, then all quotients, so that both directions are array operations.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from compression.seam import InvalidPacket

Integers = NDArray[np.int64]
BitArray = NDArray[np.uint8]
FIELD_BITS_MAX = 32


def best_parameter(mean: Integers) -> Integers:
    """The Rice parameter for geometric numbers of this mean (rounded up): floor(log2(ln 2 (mean + 1))), about."""
    scaled = np.maximum(1, ((mean + 1) * 45) >> 6)
    parameter: Integers = np.frexp(scaled.astype(np.float64))[1].astype(np.int64) - 1  # Exact: bit length less one.
    return parameter


def field_bits(values: Integers, widths: Integers) -> BitArray:
    """Each value in as many bits as its width, the highest first."""
    ends = np.cumsum(widths)
    total = int(ends[-1]) if len(ends) else 0
    shifts = np.repeat(ends, widths) - 1 - np.arange(total)
    return ((np.repeat(values, widths) >> shifts) & 1).astype(np.uint8)


def unary_bits(quotients: Integers) -> BitArray:
    """Each quotient as that many zeros and a one."""
    ends = np.cumsum(quotients + 1)
    bits = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    bits[ends - 1] = 1
    return bits


def zigzag(values: Integers) -> Integers:
    """0, -1, 1, -2 ... to 0, 1, 2, 3 ..."""
    return np.where(values < 0, -2 * values - 1, 2 * values)


def unzigzag(codes: Integers) -> Integers:
    return np.where(codes & 1, -(codes + 1) // 2, codes // 2)


@final
class BitReader:
    """Reads a stranger's bits in order. Nothing it allocates exceeds a small multiple of the data's own length."""

    def __init__(self, data: bytes) -> None:
        self._bits: BitArray = np.unpackbits(np.frombuffer(data, dtype=np.uint8))
        self._at = 0

    def fields(self, widths: Integers, name: str) -> Integers:
        """The inverse of `field_bits`; widths are ours, at most `FIELD_BITS_MAX`."""
        ends = np.cumsum(widths)
        total = int(ends[-1]) if len(ends) else 0
        if total > len(self._bits) - self._at:
            raise InvalidPacket(f"{name}: truncated, {total} bits expected and {len(self._bits) - self._at} left")
        shifts = np.repeat(ends, widths) - 1 - np.arange(total)
        weighted = self._bits[self._at : self._at + total].astype(np.int64) << shifts
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weighted)])
        self._at += total
        values: Integers = sums[ends] - sums[ends - widths]
        return values

    def field(self, width: int, name: str) -> int:
        return int(self.fields(np.array([width], dtype=np.int64), name)[0])

    def unary(self, count: int, name: str) -> Integers:
        """The inverse of `unary_bits`."""
        ones = np.flatnonzero(self._bits[self._at :])[:count]
        if len(ones) < count:
            raise InvalidPacket(f"{name}: truncated, {count} unary codes expected and {len(ones)} found")
        ends = np.concatenate([np.full(1, -1, dtype=np.int64), ones])
        self._at += int(ends[-1]) + 1
        quotients: Integers = np.diff(ends) - 1
        return quotients

    def truncate(self, data_bytes: int) -> None:
        """From now on, only the first bytes exist."""
        self._bits = self._bits[: 8 * data_bytes]

    def finish(self, name: str) -> None:
        """Only zeros may follow, to the end of the byte."""
        left = self._bits[self._at :]
        if len(left) >= 8:
            raise InvalidPacket(f"{name}: {len(left) // 8} bytes too many")
        if left.any():
            raise InvalidPacket(f"{name}: padding is not zero")

    @property
    def bytes_used(self) -> int:
        return -(-self._at // 8)
