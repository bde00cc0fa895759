"""A contribution's packets to bytes and back; the only place that parses a stranger's tensors.

Layout, highest bit first:

    version   1 byte
    bits      sparse only: 1 bit `full`; when it is 0, the number of values of every chunk, fixed width
              for each scale column, first the tensors' first scales, then all others: 4 bits Rice parameter, then
              the differences of the scales' codes, Rice-coded
              sparse only: the gaps between the indices of every chunk, Rice-coded
              zeros to the end of the byte
    levels    the levels of all tensors, 1, 2, 4 or 8 bits each, or little-endian floats

Sizes, chunks and block counts follow from the parameters' specs, which both sides have, so they cost nothing, and
every contribution has one encoding only. Integers throughout: no model whose probabilities a machine could round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compression.quantise import Values
from compression.rice import BitArray, BitReader, Integers, best_parameter, field_bits, unary_bits, unzigzag, zigzag
from compression.scales import decode_scales, encode_scales, scale_code_max
from compression.seam import InvalidPacket, Packet
from compression.select import Selection

VERSION = 1
_PARAMETER_BITS = 4
# Where the differences of scales start: 2^-13, an ordinary size for a coefficient of a delta.
_FIRST_EXPONENT = 80 - 13


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """What both sides know of a contribution: the coefficients of each tensor, how they are chosen and quantised."""

    sizes: tuple[int, ...]
    selection: Selection
    values: Values

    def blocks(self, count: int) -> int:
        """How many rows of scales `count` values of a tensor have."""
        return self.values.blocks(count, self.selection.alike)

    def chunks(self) -> Chunked | None:
        """All chunks of all tensors in order; None when every coefficient is sent."""
        parts = [self.selection.chunks(size) for size in self.sizes]
        if not parts or parts[0] is None:
            return None
        known = [part for part in parts if part is not None]
        return Chunked(
            np.concatenate([part.lengths() for part in known]),
            np.concatenate([part.capacities() for part in known]),
            np.array([part.count for part in known], dtype=np.int64),
        )


@final
@dataclass(frozen=True, slots=True)
class Chunked:
    """For every chunk its length and how many values it may send; for every tensor its number of chunks."""

    lengths: Integers
    capacities: Integers
    per_tensor: Integers

    def tensor_sums(self, values: Integers) -> Integers:
        """Sums a value of every chunk over the chunks of each tensor."""
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
        ends = np.cumsum(self.per_tensor)
        totals: Integers = sums[ends] - sums[ends - self.per_tensor]
        return totals

    def starts(self) -> Integers:
        """Where each chunk begins within its tensor."""
        before = np.cumsum(self.lengths) - self.lengths
        first = np.minimum(np.cumsum(self.per_tensor) - self.per_tensor, max(0, len(before) - 1))
        starts: Integers = before - np.repeat(before[first] if len(before) else first, self.per_tensor)
        return starts


def pack(packets: list[Packet], frame: Frame) -> bytes:
    """The bytes of packets made by the frame's own selection and values."""
    assert len(packets) == len(frame.sizes)
    chunks = frame.chunks()
    bits: list[BitArray] = []
    counts = None
    if chunks is not None:
        counts = _counts(packets, chunks)
        bits += _count_bits(counts, chunks)
    bits += _scale_bits(packets, frame.values)
    if chunks is not None and counts is not None:
        bits += _index_bits(packets, chunks, counts)
    head = np.packbits(np.concatenate(bits)) if bits else np.zeros(0, dtype=np.uint8)
    return bytes([VERSION]) + head.tobytes() + _level_bytes(packets, frame.values)


def unpack(data: bytes, frame: Frame) -> list[Packet]:
    """Parses a stranger's bytes; raises `InvalidPacket` naming the field, and nothing else."""
    limit = size_max(frame)
    if len(data) > limit:
        raise InvalidPacket(f"length: {len(data)} bytes, at most {limit} possible")
    if not data:
        raise InvalidPacket("version: missing")
    if data[0] != VERSION:
        raise InvalidPacket(f"version: {data[0]}, this is {VERSION}")
    chunks = frame.chunks()
    reader = BitReader(data[1:])
    counts = None
    per_tensor = np.array(frame.sizes, dtype=np.int64)
    if chunks is not None:
        counts = _read_counts(reader, chunks)
        per_tensor = chunks.tensor_sums(counts)
    level_bytes = -(-int(per_tensor.sum()) * frame.values.level_bits // 8)
    if level_bytes + reader.bytes_used + 1 > len(data):
        raise InvalidPacket(f"levels: truncated, {level_bytes} bytes expected in a packet of {len(data)}")
    split = len(data) - level_bytes
    reader.truncate(split - 1)
    scales = _read_scales(reader, [frame.blocks(int(count)) for count in per_tensor], frame.values)
    indices = None
    if chunks is not None and counts is not None:
        indices = _read_indices(reader, chunks, counts)
    reader.finish("header" if indices is None else "indices")
    levels = _read_levels(data[split:], per_tensor, frame.values)
    if indices is None:
        return [Packet(None, *pair) for pair in zip(levels, scales, strict=True)]
    split_indices = _split(torch.from_numpy(indices), per_tensor.tolist())
    return [Packet(*parts) for parts in zip(split_indices, levels, scales, strict=True)]


def size_max(frame: Frame) -> int:
    """No contribution of this frame is longer, in bytes."""
    chunks = frame.chunks()
    bits = 0
    if chunks is not None:
        width, _ = _gap_parameters(chunks.lengths, chunks.capacities)
        # The flag and the counts; and for each gap its low bits, and as its share of all quotients at most five bits
        # (the Rice parameter is near the mean's logarithm, so quotients are below 3 on average).
        bits += 1 + int((_count_widths(chunks) + chunks.capacities * (width + 6)).sum())
    return _size(frame, bits, scale_bits=frame.values.scale_mantissa + 12)


def size_estimate(frame: Frame) -> int:
    """About how long a contribution is, in bytes, when every chunk is full and its indices are spread evenly."""
    chunks = frame.chunks()
    bits = 0.0
    if chunks is not None:
        lengths, counts = chunks.lengths, chunks.capacities
        width, unary = _gap_parameters(lengths, counts)
        quotients = np.zeros(len(counts))
        for multiple in range(1, 17):  # P(gap >= g) = C(n - g, k) / C(n, k), about (1 - g / (n - (k - 1) / 2))^k.
            reach = multiple * 2.0**width / (lengths - (counts - 1) / 2)
            quotients += np.maximum(0.0, 1 - reach) ** counts
        bits += 1 + float((counts * (width + unary * (1 + quotients))).sum())
    return _size(frame, int(bits), scale_bits=frame.values.scale_mantissa + 2)


def _size(frame: Frame, index_bits: int, *, scale_bits: int) -> int:
    chunks = frame.chunks()
    per_tensor = np.array(frame.sizes, dtype=np.int64)
    if chunks is not None:
        per_tensor = chunks.tensor_sums(chunks.capacities)
    rows = sum(frame.blocks(int(count)) for count in per_tensor)
    bits = index_bits + frame.values.scale_columns * (2 * _PARAMETER_BITS + rows * scale_bits)
    return 1 + -(-bits // 8) + -(-int(per_tensor.sum()) * frame.values.level_bits // 8)


# Counts


def _counts(packets: list[Packet], chunks: Chunked) -> Integers:
    counts = [
        np.bincount(_numpy(packet.indices) // length, minlength=int(number))
        for packet, length, number in zip(packets, _first_lengths(chunks), chunks.per_tensor, strict=True)
    ]
    return np.concatenate(counts).astype(np.int64) if counts else np.zeros(0, dtype=np.int64)


def _first_lengths(chunks: Chunked) -> Integers:
    """The length of every tensor's chunks but the last; 1 for an empty tensor."""
    first = np.minimum(np.cumsum(chunks.per_tensor) - chunks.per_tensor, max(0, len(chunks.lengths) - 1))
    return np.where(chunks.per_tensor > 0, chunks.lengths[first], 1) if len(chunks.lengths) else np.ones_like(first)


def _count_widths(chunks: Chunked) -> Integers:
    widths: Integers = np.frexp(chunks.capacities.astype(np.float64))[1].astype(np.int64)
    return widths


def _count_bits(counts: Integers, chunks: Chunked) -> list[BitArray]:
    assert (counts <= chunks.capacities).all()
    full = np.array([np.array_equal(counts, chunks.capacities)], dtype=np.uint8)
    return [full] if full[0] else [full, field_bits(counts, _count_widths(chunks))]


def _read_counts(reader: BitReader, chunks: Chunked) -> Integers:
    if reader.field(1, "full"):
        return chunks.capacities
    counts = reader.fields(_count_widths(chunks), "counts")
    if (counts > chunks.capacities).any():
        raise InvalidPacket("counts: more values in a chunk than it may send")
    if np.array_equal(counts, chunks.capacities):
        raise InvalidPacket("counts: sent although all chunks are full")
    return counts


# Indices


def _gap_parameters(lengths: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """For each chunk the Rice parameter of its gaps, and 1 where a gap can exceed the low bits, so has a quotient."""
    mean = (lengths - counts) // (counts + 1)
    width = np.where(counts == 1, best_parameter(2 * lengths), best_parameter(mean))
    longest = np.frexp(np.maximum(0, lengths - counts).astype(np.float64))[1].astype(np.int64)
    width = np.minimum(width, longest)
    return width, (longest > width).astype(np.int64)


def _index_bits(packets: list[Packet], chunks: Chunked, counts: Integers) -> list[BitArray]:
    flat = [_numpy(packet.indices) for packet in packets]
    indices = np.concatenate(flat) if flat else np.zeros(0, dtype=np.int64)
    places = indices - np.repeat(chunks.starts(), counts)
    gaps = np.diff(places, prepend=-1) - 1
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = places[first]
    width, unary = (np.repeat(values, counts) for values in _gap_parameters(chunks.lengths, counts))
    low = gaps & ((1 << width) - 1)
    return [field_bits(low, width), unary_bits((gaps >> width)[unary == 1])]


def _read_indices(reader: BitReader, chunks: Chunked, counts: Integers) -> Integers:
    width, unary = (np.repeat(values, counts) for values in _gap_parameters(chunks.lengths, counts))
    gaps = reader.fields(width, "indices")
    coded = unary == 1
    gaps[coded] += reader.unary(int(coded.sum()), "indices") << width[coded]
    ends = np.cumsum(gaps + 1)
    before = np.concatenate([np.zeros(1, dtype=np.int64), ends])[np.cumsum(counts) - counts]
    places = ends - 1 - np.repeat(before, counts)
    if (places >= np.repeat(chunks.lengths, counts)).any():
        raise InvalidPacket("indices: beyond the end of a chunk")
    indices: Integers = places + np.repeat(chunks.starts(), counts)
    return indices


# Scales


def _scale_bits(packets: list[Packet], values: Values) -> list[BitArray]:
    bits: list[BitArray] = []
    tables = [packet.scales.cpu() for packet in packets]
    scales = torch.cat(tables) if tables else torch.zeros(0, values.scale_columns)
    codes = encode_scales(scales.contiguous(), values.scale_mantissa)
    assert torch.equal(decode_scales(codes, values.scale_mantissa), scales)
    firsts = _firsts([len(table) for table in tables])
    for column in range(values.scale_columns):
        series, start = _series(codes.numpy(), column, values)
        bits += _number_bits(zigzag(np.diff(series[firsts], prepend=start)))
        bits += _number_bits(zigzag(np.diff(series, prepend=0)[~firsts]))
    return bits


def _firsts(rows: list[int]) -> NDArray[np.bool_]:
    """Which scales are the first of their tensor: those differ from tensor to tensor, the others little within one."""
    lengths = np.array(rows, dtype=np.int64)
    firsts = np.zeros(sum(rows), dtype=np.bool_)
    firsts[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
    return firsts


def _series(codes: Integers, column: int, values: Values) -> tuple[Integers, int]:
    """The column as what is coded, and where it starts: steps are relative to the offsets beside them."""
    if column:
        return codes[:, column] - codes[:, column - 1], 0
    return codes[:, column], _FIRST_EXPONENT << values.scale_mantissa


def _number_bits(numbers: Integers) -> list[BitArray]:
    if not len(numbers):
        return []
    width = _cheapest_parameter(numbers)
    widths = np.full(len(numbers), width, dtype=np.int64)
    header = field_bits(np.array([width]), np.array([_PARAMETER_BITS]))
    return [header, field_bits(numbers & ((1 << width) - 1), widths), unary_bits(numbers >> width)]


def _cheapest_parameter(numbers: Integers) -> int:
    costs = [int((numbers >> width).sum()) + width * len(numbers) for width in range(2**_PARAMETER_BITS)]
    return costs.index(min(costs))


def _read_scales(reader: BitReader, rows: list[int], values: Values) -> list[Tensor]:
    firsts = _firsts(rows)
    table = np.zeros((len(firsts), values.scale_columns), dtype=np.int64)
    tensor = np.cumsum(firsts) - 1
    for column in range(values.scale_columns):
        base, start = _series(table, column, values)
        first = np.cumsum(unzigzag(_read_numbers(reader, int(firsts.sum())))) + start
        steps = np.zeros(len(firsts), dtype=np.int64)
        steps[~firsts] = unzigzag(_read_numbers(reader, int((~firsts).sum())))
        walked = np.cumsum(steps)
        codes = first[tensor] + walked - walked[firsts][tensor] - base
        if ((codes < 0) | (codes > scale_code_max(values.scale_mantissa))).any():
            raise InvalidPacket("scales: out of range")
        table[:, column] = codes
    return _split(decode_scales(torch.from_numpy(table), values.scale_mantissa), rows)


def _read_numbers(reader: BitReader, count: int) -> Integers:
    if not count:
        return np.zeros(0, dtype=np.int64)
    width = reader.field(_PARAMETER_BITS, "scales")
    numbers = reader.fields(np.full(count, width, dtype=np.int64), "scales")
    numbers += reader.unary(count, "scales") << width
    if _cheapest_parameter(numbers) != width:
        raise InvalidPacket(f"scales: {width} is not the shortest Rice parameter")
    return numbers


# Levels


def _level_bytes(packets: list[Packet], values: Values) -> bytes:
    levels = [packet.levels.detach().cpu() for packet in packets]
    flat = torch.cat(levels) if levels else torch.zeros(0, dtype=values.level_dtype)
    assert flat.dtype == values.level_dtype
    if flat.dtype != torch.uint8:
        integers = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).numpy()
        return integers.astype(integers.dtype.newbyteorder("<")).tobytes()
    width = values.level_bits
    codes: NDArray[np.uint8] = flat.numpy()
    if width == 1:
        return np.packbits(codes).tobytes()
    per_byte = 8 // width
    codes = np.concatenate([codes, np.zeros(-len(codes) % per_byte, dtype=np.uint8)]).reshape(-1, per_byte)
    packed = np.zeros(len(codes), dtype=np.uint8)
    for place in range(per_byte):
        packed |= codes[:, place] << np.uint8(8 - width * (place + 1))
    return packed.tobytes()


def _read_levels(data: bytes, per_tensor: Integers, values: Values) -> list[Tensor]:
    count = int(per_tensor.sum())
    sizes = per_tensor.tolist()
    if values.level_dtype != torch.uint8:
        kind = "i2" if values.level_bits == 16 else "i4"
        integers = np.frombuffer(data, dtype=f"<{kind}").astype(kind)
        floats = torch.from_numpy(integers).view(values.level_dtype)
        if not bool(torch.isfinite(floats).all()):
            raise InvalidPacket("levels: not finite")
        return _split(floats, sizes)
    width = values.level_bits
    packed = np.frombuffer(data, dtype=np.uint8)
    shifts = np.arange(8 - width, -1, -width, dtype=np.uint8)
    codes = np.unpackbits(packed) if width == 1 else ((packed[:, None] >> shifts) & (2**width - 1)).reshape(-1)
    if codes[count:].any():
        raise InvalidPacket("levels: padding is not zero")
    return _split(torch.from_numpy(codes[:count].copy()), sizes)


def _numpy(indices: Tensor | None) -> Integers:
    assert indices is not None
    array: Integers = indices.detach().cpu().numpy()
    return array


def _split(joined: Tensor, sizes: list[int]) -> list[Tensor]:
    """One view a tensor."""
    return list(torch.split_with_sizes(joined, sizes)) if sizes else []
