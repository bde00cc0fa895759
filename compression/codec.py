"""A contribution's packets to bytes and back; the only place that parses a stranger's tensors.

Layout, highest bit first:

    header    version, chain, a check of the tensors' shapes and types (`header.py`)
    bits      1 bit `coded`, where levels can be
              sparse: 1 bit `full`; when it is 0, which chunks are not and what they lack
              drawn: 32 bits of seed, for all tensors or for each
              for each scale column, first the tensors' first scales, then all others: differences, Rice-coded
              sparse: the set of indices of every chunk (`subsets.py`; gaps, Rice-coded, for very many)
              coded: frequencies
              zeros to the end of the byte
    levels    1, 2, 4, 8, 16 or 32 bits each; or signs and low bits so, and the rest entropy-coded (`entropy.py`)

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

from compression import entropy
from compression.bitstream import (
    PARAMETER_BITS,
    BitReader,
    Fields,
    Integers,
    Unary,
    as_fields,
    number_parts,
    packed,
    read_numbers,
    unzigzag,
    zigzag,
)
from compression.header import Description as Description
from compression.header import check_header, header_of
from compression.header import describe as describe
from compression.header import layout_of as layout_of
from compression.indices import (
    Chunked,
    count_parts,
    counts_of,
    index_bits_estimate,
    index_bits_max,
    index_parts,
    read_counts,
    read_indices,
)
from compression.levels import (
    COUNT_MIN,
    SAVED_SHARE,
    coded_bytes,
    codes_of,
    counts_if_worth_it,
    levels_of,
    plain_bytes,
    plain_length,
    read_coded,
    read_plain,
    read_table,
    table_parts,
)
from compression.scales import decode_scales, encode_scales, scale_code_max
from compression.seam import InvalidPacket, Packet
from compression.select import SEED_BITS, Drawn, Selection
from compression.values import Values

# Where the differences of scales start: 2^-13, an ordinary size for a coefficient of a delta.
_FIRST_EXPONENT = 80 - 13


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """What both sides know of a contribution: the coefficients of each tensor, how they are chosen and quantised."""

    name: str
    sizes: tuple[int, ...]
    selection: Selection
    values: Values
    layout: bytes

    def blocks(self, count: int) -> int:
        """How many rows of scales `count` values of a tensor have."""
        return self.values.blocks(count, self.selection.alike)

    def counts_max(self) -> Integers:
        """At most how many values each tensor sends."""
        chunks = self.chunks()
        return np.array(self.sizes, dtype=np.int64) if chunks is None else chunks.tensor_sums(chunks.capacities)

    def count_max(self) -> int:
        return int(self.counts_max().sum())

    def chunks(self) -> Chunked | None:
        return Chunked.of(self.selection, self.sizes)

    def seeds(self) -> int:
        """How many seeds travel."""
        if not isinstance(self.selection, Drawn):
            return 0
        return min(1, len(self.sizes)) if self.selection.shared else len(self.sizes)


def pack(packets: list[Packet], frame: Frame) -> bytes:
    """The bytes of packets made by the frame's own selection and values."""
    assert len(packets) == len(frame.sizes)
    parts: list[Fields | Unary] = []
    chunks = frame.chunks()
    seeds = frame.seeds()
    indices = [packet.indices.detach().cpu().numpy() for packet in packets if packet.indices is not None]
    if seeds:
        assert seeds == len(packets) or len({packet.seed for packet in packets}) == 1
        numbers = np.array([packet.seed for packet in packets[:seeds]], dtype=np.int64)
        parts.append(Fields(numbers, np.full(seeds, SEED_BITS, dtype=np.int64)))
        parts += _scale_parts(packets, frame.values)
    elif chunks is not None:
        counts = counts_of(indices, chunks)
        parts += count_parts(counts, chunks)
        parts += _scale_parts(packets, frame.values)
        parts += index_parts(indices, chunks, counts)
    else:
        parts += _scale_parts(packets, frame.values)
    codes = codes_of([packet.levels for packet in packets], frame.values)
    fields = as_fields(parts)
    levels, table = _coded_or_plain(codes, frame.values, int(fields.widths.sum()))
    if frame.values.symbol_bits:
        fields = as_fields([Fields.one(len(table) > 0, 1), fields, *table])
    return header_of(frame.name, frame.layout) + packed(fields) + levels


def _coded_or_plain(codes: NDArray[np.unsignedinteger], values: Values, bits: int) -> tuple[bytes, list[Fields]]:
    occurrences = counts_if_worth_it(codes, values, bits)
    if occurrences is None:
        return plain_bytes(codes, values.level_bits), []
    scaled = entropy.frequencies(occurrences)
    return coded_bytes(codes, values, scaled), table_parts(scaled)


def unpack(data: bytes, frame: Frame) -> list[Packet]:
    """Parses a stranger's bytes; raises `InvalidPacket` naming the field, and nothing else."""
    limit = size_max(frame)
    if len(data) > limit:
        raise InvalidPacket(f"length: {len(data)} bytes, at most {limit} possible")
    reader = BitReader(data[check_header(data, frame.name, frame.layout) :])
    coded = reader.field(1, "coded") if frame.values.symbol_bits else 0
    chunks = frame.chunks()
    seeds = [0] * len(frame.sizes)
    counts = None
    per_tensor = np.array(frame.sizes, dtype=np.int64)
    if frame.seeds():
        read = reader.fields(np.full(frame.seeds(), SEED_BITS, dtype=np.int64), "seeds").tolist()
        seeds = read if len(read) == len(seeds) else read * len(seeds)
    if chunks is not None:
        counts = chunks.capacities if frame.seeds() else read_counts(reader, chunks)
        per_tensor = chunks.tensor_sums(counts)
    # Nothing large is allocated before this: a short packet cannot claim many levels.
    level_bits = frame.values.level_bits - (frame.values.symbol_bits if coded else 0)
    if plain_length(int(per_tensor.sum()), level_bits) > len(data):
        raise InvalidPacket(f"levels: truncated, {int(per_tensor.sum())} of them expected in {len(data)} bytes")
    rows = [frame.blocks(int(count)) for count in per_tensor]
    scales = _read_scales(reader, rows, frame.values)
    indices = _indices(reader, frame, chunks, counts, seeds)
    joined = _read_levels(reader, coded, int(per_tensor.sum()), frame.values)
    levels = _split(joined, per_tensor.tolist())
    if indices is None:
        return [Packet(None, *pair) for pair in zip(levels, scales, strict=True)]
    return [Packet(*parts) for parts in zip(indices, levels, scales, seeds, strict=True)]


def _indices(
    reader: BitReader, frame: Frame, chunks: Chunked | None, counts: Integers | None, seeds: list[int]
) -> list[Tensor] | None:
    if isinstance(frame.selection, Drawn):
        return [frame.selection.draw(size, seed) for size, seed in zip(frame.sizes, seeds, strict=True)]
    if chunks is None or counts is None:
        return None
    joined = torch.from_numpy(read_indices(reader, chunks, counts))
    return _split(joined, chunks.tensor_sums(counts).tolist())


def _read_levels(reader: BitReader, coded: int, count: int, values: Values) -> Tensor:
    bits = reader.bits_used - (1 if values.symbol_bits else 0)
    scaled = read_table(reader, values) if coded else None
    data = reader.rest("header")
    if scaled is not None:
        codes = read_coded(data, count, values, scaled)
    else:
        length = plain_length(count, values.level_bits)
        if len(data) != length:
            wrong = "truncated" if len(data) < length else "too many"
            raise InvalidPacket(f"levels: {wrong}, {length} bytes expected and {len(data)} left")
        codes = read_plain(data, count, values.level_bits)
    if (counts_if_worth_it(codes, values, bits) is not None) != bool(coded):
        raise InvalidPacket("coded: not what takes fewer bytes")
    return levels_of(codes, values)


def size_max(frame: Frame) -> int:
    """No contribution of this frame is longer, in bytes."""
    chunks = frame.chunks()
    bits = 0 if chunks is None or frame.seeds() else index_bits_max(chunks)
    return _size(frame, bits, scale_bits=frame.values.scale_mantissa + 12)


def size_estimate(frame: Frame) -> int:
    """About how long a contribution is, in bytes, when every chunk is full and its indices are spread evenly.
    Coded levels count as those of Gaussian values.
    """
    chunks = frame.chunks()
    bits = 0 if chunks is None or frame.seeds() else index_bits_estimate(chunks)
    size = _size(frame, bits, scale_bits=frame.values.scale_mantissa + 2)
    count, values = frame.count_max(), frame.values
    dense = frame.seeds() > 0 or 16 * count >= sum(frame.sizes)
    entropy_bits = values.symbol_entropy(dense=dense)
    symbols = 2**values.symbol_bits
    table_bits = symbols + entropy.PRECISION * min(symbols, 1.5 * 2**entropy_bits)
    saved = int(count * (values.symbol_bits - entropy_bits - 0.05) - table_bits) // 8
    return size - saved if count >= COUNT_MIN and saved * SAVED_SHARE >= size else size


def _size(frame: Frame, index_bits: int, *, scale_bits: int) -> int:
    rows = sum(frame.blocks(int(count)) for count in frame.counts_max())
    bits = 1 + index_bits + SEED_BITS * frame.seeds()
    bits += frame.values.scale_columns * (2 * PARAMETER_BITS + rows * scale_bits)
    header = len(header_of(frame.name, frame.layout))
    return header + -(-bits // 8) + plain_length(frame.count_max(), frame.values.level_bits)


# Scales


def _scale_parts(packets: list[Packet], values: Values) -> list[Fields | Unary]:
    parts: list[Fields | Unary] = []
    tables = [packet.scales.detach().cpu() for packet in packets]
    scales = torch.cat(tables) if tables else torch.zeros(0, values.scale_columns)
    codes = encode_scales(scales.contiguous(), values.scale_mantissa)
    assert torch.equal(decode_scales(codes, values.scale_mantissa), scales)
    firsts = _firsts([len(table) for table in tables])
    for column in range(values.scale_columns):
        series, start = _series(codes.numpy(), column, values)
        parts += number_parts(zigzag(np.diff(series[firsts], prepend=start)))
        parts += number_parts(zigzag(np.diff(series, prepend=0)[~firsts]))
    return parts


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


def _read_scales(reader: BitReader, rows: list[int], values: Values) -> list[Tensor]:
    firsts = _firsts(rows)
    table = np.zeros((len(firsts), values.scale_columns), dtype=np.int64)
    tensor = np.cumsum(firsts) - 1
    for column in range(values.scale_columns):
        base, start = _series(table, column, values)
        first = np.cumsum(unzigzag(read_numbers(reader, int(firsts.sum()), "scales"))) + start
        steps = np.zeros(len(firsts), dtype=np.int64)
        steps[~firsts] = unzigzag(read_numbers(reader, int((~firsts).sum()), "scales"))
        walked = np.cumsum(steps)
        codes = first[tensor] + walked - walked[firsts][tensor] - base
        if ((codes < 0) | (codes > scale_code_max(values.scale_mantissa))).any():
            raise InvalidPacket("scales: out of range")
        table[:, column] = codes
    return _split(decode_scales(torch.from_numpy(table), values.scale_mantissa), rows)


def _split(joined: Tensor, sizes: list[int]) -> list[Tensor]:
    """One view a tensor."""
    return list(torch.split_with_sizes(joined, sizes)) if sizes else []
