"""Which coefficients a contribution sends: how many of each chunk, and where; or the seeds they are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np

from compression import subsets
from compression.bitstream import (
    PARAMETER_BITS,
    BitReader,
    Fields,
    Integers,
    Unary,
    best_parameter,
    number_parts,
    read_numbers,
)
from compression.seam import InvalidPacket
from compression.select import Selection

# Split codes need tables: about (kept)^2 / 2 entries for each of up to 16 sizes of every length of chunks.
_TABLE_ENTRIES_MAX = 1 << 22


@final
@dataclass(frozen=True, slots=True)
class Chunked:
    """For every chunk its length and how many values it may send; for every tensor its number of chunks."""

    lengths: Integers
    capacities: Integers
    per_tensor: Integers
    starts: Integers  # Where each chunk begins within its tensor.
    split_coded: bool

    @staticmethod
    @lru_cache(maxsize=64)
    def of(selection: Selection, sizes: tuple[int, ...]) -> Chunked | None:
        """All chunks of all tensors in order; None when every coefficient is sent."""
        known = [part for part in map(selection.chunks, sizes) if part is not None]
        if len(known) < len(sizes) or not sizes:
            return None
        lengths = np.concatenate([part.lengths() for part in known])
        capacities = np.concatenate([part.capacities() for part in known])
        starts = np.concatenate([np.arange(part.count) * part.length for part in known])
        kept, longest = int(capacities.max(initial=0)), int(lengths.max(initial=0))
        entries = kept * kept // 2 * len(np.unique(lengths)) * 16
        return Chunked(
            lengths=lengths,
            capacities=capacities,
            per_tensor=np.array([part.count for part in known], dtype=np.int64),
            starts=starts,
            split_coded=kept <= subsets.KEPT_MAX and longest <= subsets.LENGTH_MAX and entries <= _TABLE_ENTRIES_MAX,
        )

    def tensor_sums(self, values: Integers) -> Integers:
        """Sums a value of every chunk over the chunks of each tensor."""
        sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
        ends = np.cumsum(self.per_tensor)
        totals: Integers = sums[ends] - sums[ends - self.per_tensor]
        return totals


# Counts: one bit when all chunks are full; else which are not, and how much they lack.


def counts_of(indices: list[Integers], chunks: Chunked) -> Integers:
    first = np.minimum(np.cumsum(chunks.per_tensor) - chunks.per_tensor, max(0, len(chunks.lengths) - 1))
    lengths = np.where(chunks.per_tensor > 0, chunks.lengths[first], 1) if len(chunks.lengths) else np.ones_like(first)
    counts = [
        np.bincount(places // length, minlength=int(number))
        for places, length, number in zip(indices, lengths, chunks.per_tensor, strict=True)
    ]
    joined: Integers = np.concatenate(counts).astype(np.int64) if counts else np.zeros(0, dtype=np.int64)
    return joined


def count_parts(counts: Integers, chunks: Chunked) -> list[Fields | Unary]:
    lacking = chunks.capacities - counts
    assert (lacking >= 0).all()
    short = np.flatnonzero(lacking)
    if not len(short):
        return [Fields.one(1, 1)]
    gaps = np.diff(short, prepend=-1) - 1
    number = Fields.one(len(short), len(counts).bit_length())
    return [Fields.one(0, 1), number, *number_parts(gaps), *number_parts(lacking[short] - 1)]


def read_counts(reader: BitReader, chunks: Chunked) -> Integers:
    if reader.field(1, "full"):
        return chunks.capacities
    number = reader.field(len(chunks.capacities).bit_length(), "counts")
    if not 1 <= number <= len(chunks.capacities):
        raise InvalidPacket(f"counts: {number} of {len(chunks.capacities)} chunks are not full")
    short = np.cumsum(read_numbers(reader, number, "counts") + 1) - 1
    if int(short[-1]) >= len(chunks.capacities) or (short < 0).any():
        raise InvalidPacket("counts: of a chunk that does not exist")
    counts: Integers = chunks.capacities.copy()
    counts[short] -= read_numbers(reader, number, "counts") + 1
    if (counts < 0).any():
        raise InvalidPacket("counts: below zero")
    return counts


# Indices


def index_parts(indices: list[Integers], chunks: Chunked, counts: Integers) -> list[Fields | Unary]:
    places = np.concatenate(indices) if indices else np.zeros(0, dtype=np.int64)
    places = places - np.repeat(chunks.starts, counts)
    if chunks.split_coded:
        return [*subsets.encode(places, counts, chunks.lengths)]
    gaps = np.diff(places, prepend=-1) - 1
    first = (np.cumsum(counts) - counts)[counts > 0]
    gaps[first] = places[first]
    width, unary = (np.repeat(values, counts) for values in _gap_parameters(chunks.lengths, counts))
    return [Fields(gaps & ((1 << width) - 1), width), Unary((gaps >> width)[unary == 1])]


def read_indices(reader: BitReader, chunks: Chunked, counts: Integers) -> Integers:
    if chunks.split_coded:
        return subsets.decode(reader, counts, chunks.lengths) + np.repeat(chunks.starts, counts)
    width, unary = (np.repeat(values, counts) for values in _gap_parameters(chunks.lengths, counts))
    gaps = reader.fields(width, "indices")
    coded = unary == 1
    gaps[coded] += reader.unary(int(coded.sum()), "indices") << width[coded]
    ends = np.cumsum(gaps + 1)
    before = np.concatenate([np.zeros(1, dtype=np.int64), ends])[np.cumsum(counts) - counts]
    places = ends - 1 - np.repeat(before, counts)
    if (places >= np.repeat(chunks.lengths, counts)).any():
        raise InvalidPacket("indices: beyond the end of a chunk")
    indices: Integers = places + np.repeat(chunks.starts, counts)
    return indices


def _gap_parameters(lengths: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """For each chunk the Rice parameter of its gaps, and 1 where a gap can exceed the low bits, so has a quotient."""
    total = np.where(counts == 1, 4 * lengths, lengths - counts)
    width = best_parameter(total, counts + 1)
    longest = np.frexp(np.maximum(0, lengths - counts).astype(np.float64))[1].astype(np.int64)
    width = np.minimum(width, longest)
    return width, (longest > width).astype(np.int64)


def index_bits_max(chunks: Chunked) -> int:
    """No indices take more, counts included."""
    bits = 1 + len(chunks.capacities).bit_length() + 2 * PARAMETER_BITS
    bits += int((np.frexp(chunks.capacities.astype(np.float64))[1] + 4).sum())
    if chunks.split_coded:
        # Fewer places have fewer sets, up to half of a chunk; a bit a chunk for where bits begin.
        most = np.minimum(chunks.capacities, (chunks.lengths + 1) // 2)
        return bits + subsets.bits_max(most, chunks.lengths) + len(most)
    width, _ = _gap_parameters(chunks.lengths, chunks.capacities)
    # For each gap its low bits, and as its share of all quotients at most five bits (the Rice parameter is near the
    # mean's logarithm, so quotients are below 3 on average).
    return bits + int((chunks.capacities * (width + 6)).sum())


def index_bits_estimate(chunks: Chunked) -> int:
    """Of full chunks whose indices are spread evenly."""
    lengths, counts = chunks.lengths, chunks.capacities
    if chunks.split_coded:
        return 1 + subsets.bits_max(counts, lengths)
    width, unary = _gap_parameters(lengths, counts)
    quotients = np.zeros(len(counts))
    for multiple in range(1, 17):  # P(gap >= g) = C(n - g, k) / C(n, k), about (1 - g / (n - (k - 1) / 2))^k.
        reach = multiple * 2.0**width / (lengths - (counts - 1) / 2)
        quotients += np.maximum(0.0, 1 - reach) ** counts
    return 1 + int((counts * (width + unary * (1 + quotients))).sum())
