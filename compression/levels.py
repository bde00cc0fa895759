"""Levels of all tensors as bytes: as they are, or their frequent part entropy-coded where that saves enough."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compression import entropy
from compression.bitstream import BitReader, Fields, Integers
from compression.seam import InvalidPacket
from compression.values import Values

# Coded when at least 1 / 128 of the packet is saved, and when there are enough to fill the lanes.
SAVED_SHARE = 128
COUNT_MIN = 1 << 13

Codes = NDArray[np.unsignedinteger]


def codes_of(levels: list[Tensor], values: Values) -> Codes:
    """All levels as unsigned integers."""
    flat = torch.cat([level.detach().cpu() for level in levels]) if levels else torch.zeros(0, dtype=values.level_dtype)
    assert flat.dtype == values.level_dtype
    if flat.dtype == torch.uint8:
        codes: Codes = flat.numpy()
        return codes
    integers = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).numpy()
    return integers.view(np.uint16 if integers.dtype.itemsize == 2 else np.uint32)


def levels_of(codes: Codes, values: Values) -> Tensor:
    """The inverse of `codes_of`, joined; raises `InvalidPacket` on NaN or infinity."""
    if values.level_dtype == torch.uint8:
        return torch.from_numpy(codes)
    signed = codes.view(np.int16 if codes.dtype.itemsize == 2 else np.int32)
    floats = torch.from_numpy(signed).view(values.level_dtype)
    if not bool(torch.isfinite(floats).all()):
        raise InvalidPacket("levels: not finite")
    return floats


def counts_if_worth_it(codes: Codes, values: Values, other_bits: int) -> Integers | None:
    """How often each symbol occurs, if coding them saves enough of a packet with so many other bits. Integers only:
    the reader holds the writer to this choice.
    """
    if not values.symbol_bits or len(codes) < COUNT_MIN:
        return None
    counts = np.bincount(_symbols(codes, values), minlength=1 << values.symbol_bits).astype(np.int64)
    cost = entropy.cost_bits(counts) + sum(int(part.widths.sum()) for part in table_parts(entropy.frequencies(counts)))
    saved = len(codes) * values.symbol_bits - cost
    return counts if saved * SAVED_SHARE >= other_bits + len(codes) * values.level_bits else None


def table_parts(scaled: Integers) -> list[Fields]:
    """Which symbols occur, and their frequencies."""
    present = (scaled > 0).astype(np.int64)
    some = scaled[scaled > 0] - 1
    widths = np.full(len(some), entropy.PRECISION, dtype=np.int64)
    return [Fields(present, np.ones(len(present), dtype=np.int64)), Fields(some, widths)]


def read_table(reader: BitReader, values: Values) -> Integers:
    present = reader.fields(np.ones(1 << values.symbol_bits, dtype=np.int64), "levels")
    scaled: Integers = present.copy()
    some = int(present.sum())
    scaled[present > 0] += reader.fields(np.full(some, entropy.PRECISION, dtype=np.int64), "levels")
    if int(scaled.sum()) != 1 << entropy.PRECISION:
        raise InvalidPacket("levels: frequencies do not add up")
    return scaled


def plain_bytes(codes: Codes, width: int) -> bytes:
    """Each code in `width` bits: 1, 2, 4, 8, 16, 24 or 32."""
    if width == 1:
        return np.packbits(codes.astype(np.uint8)).tobytes()
    if width >= 8:
        little = codes.astype(codes.dtype.newbyteorder("<"), copy=False)
        return little.view(np.uint8).reshape(len(codes), codes.dtype.itemsize)[:, : width // 8].tobytes()
    per_byte = 8 // width
    padded = np.concatenate([codes, np.zeros(-len(codes) % per_byte, dtype=codes.dtype)]).reshape(-1, per_byte)
    packed = np.zeros(len(padded), dtype=np.uint8)
    for place in range(per_byte):
        packed |= padded[:, place].astype(np.uint8) << np.uint8(8 - width * (place + 1))
    return packed.tobytes()


def plain_length(count: int, width: int) -> int:
    return -(-count * width // 8)


def read_plain(data: bytes, count: int, width: int) -> Codes:
    packed = np.frombuffer(data, dtype=np.uint8)
    if width >= 8:
        size = 1 if width == 8 else 2 if width == 16 else 4
        wide = np.zeros((count, size), dtype=np.uint8)
        wide[:, : width // 8] = packed.reshape(count, width // 8)
        little = wide.reshape(-1).view(np.dtype(f"<u{size}"))
        wide_codes: Codes = little.astype(little.dtype.newbyteorder("="), copy=False)
        return wide_codes
    shifts = np.arange(8 - width, -1, -width, dtype=np.uint8)
    codes = np.unpackbits(packed) if width == 1 else ((packed[:, None] >> shifts) & (2**width - 1)).reshape(-1)
    if codes[count:].any():
        raise InvalidPacket("levels: padding is not zero")
    few: Codes = codes[:count].copy()
    return few


def coded_bytes(codes: Codes, values: Values, scaled: Integers) -> bytes:
    """Signs and low bits as they are, then the symbols coded."""
    low = values.level_bits - 1 - values.symbol_bits
    signs = codes >> (values.level_bits - 1)
    joined = (signs << low) | (codes & ((1 << low) - 1))
    plain: Codes = joined.astype(np.uint8 if low + 1 <= 8 else codes.dtype)
    return plain_bytes(plain, low + 1) + entropy.encode(_symbols(codes, values), scaled)


def read_coded(data: bytes, count: int, values: Values, scaled: Integers) -> Codes:
    low = values.level_bits - 1 - values.symbol_bits
    length = plain_length(count, low + 1)
    if len(data) < length:
        raise InvalidPacket(f"levels: truncated, {length} bytes of signs expected and {len(data)} left")
    kind = np.dtype(f"u{max(1, values.level_bits // 8)}")
    plain = read_plain(data[:length], count, low + 1).astype(kind, copy=False)
    symbols = entropy.decode(data[length:], count, scaled)
    counts = np.bincount(symbols, minlength=1 << values.symbol_bits).astype(np.int64)
    if not np.array_equal(entropy.frequencies(counts), scaled):
        raise InvalidPacket("levels: frequencies are not those of the levels")
    signs = (plain >> low) << (values.level_bits - 1)
    joined = signs | (symbols.astype(kind) << low) | (plain & ((1 << low) - 1))
    codes: Codes = joined.astype(kind, copy=False)
    return codes


def _symbols(codes: Codes, values: Values) -> NDArray[np.uint8]:
    low = values.level_bits - 1 - values.symbol_bits
    return ((codes >> low) & ((1 << values.symbol_bits) - 1)).astype(np.uint8)
