"""Which k of n places are taken, in hardly more than log2 C(n, k) bits: a split code in integers, a level at a time.

A chunk is a binary tree: a node of `size` places has the left 2^j of them and the rest as children. A set of k places
in a node is numbered by (how many lie left, the left set's number, the right set's number). Exact numbers would have
hundreds of bits, so a node passes up only a carry below `m` <= 2^20 and writes the bits beneath it, `e` of them at
most, so that m 2^e is C(size, k) rounded up by about a millionth. How many bits a split writes follows from the carry
above it: a reader goes down level by level, all nodes at once, and every set has one code.

Chunks are then joined in pairs in the same way, so that no chunk ends on a whole bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
from numpy.typing import NDArray

from compression.bitstream import BitReader, Fields
from compression.bitstream import Integers as Integers
from compression.seam import InvalidPacket

CARRY_BITS = 20
KEPT_MAX = 256
LENGTH_MAX = 1 << 16
_ROW_BITS = CARRY_BITS + 1
_Nodes = tuple[Integers, Integers, Integers, Integers]  # Where each begins, its size, its places, its carry.


@final
@dataclass(frozen=True, slots=True)
class Tables:
    """A row for every (size, k), an entry for every row and number of places i that lie in its left child."""

    row_of_size: Integers  # The row of k = 0; k more for the others.
    multiplier: Integers  # m of each row.
    exponent: Integers  # e of each row.
    top_entry: Integers  # The entry of each row's largest i; smaller i follow.
    top_left: Integers  # That i.
    keys: Integers  # Of each entry: (row << 21) + the first carry; ascending.
    lefts: Integers  # i of each entry.
    shifts: Integers  # How many low bits of the joint number are written.

    def rows(self, sizes: Integers, counts: Integers) -> Integers:
        rows: Integers = self.row_of_size[sizes] + counts
        return rows


def encode(places: Integers, counts: Integers, lengths: Integers) -> list[Fields]:
    """`places` within their chunks, ascending, `counts` of them in each chunk: bit fields in the order of reading."""
    tables = tables_for(lengths, int(counts.max(initial=0)))
    levels = _levels(lengths)
    base = (np.repeat(np.arange(len(lengths)), counts) << levels) + places
    number = np.ones(len(places), dtype=np.int64)
    carry = np.zeros(len(places), dtype=np.int64)
    written: list[Fields] = []
    for level in range(1, levels + 1):
        base, number, carry, fields = _join_level(base, number, carry, level, _Chunks(lengths, levels, tables))
        written.append(fields)
    carries = np.zeros(len(lengths), dtype=np.int64)
    single = number == 1
    carries[base >> levels] = np.where(single, base & ((1 << levels) - 1), carry)
    multipliers = tables.multiplier[tables.rows(lengths, counts)]
    while len(carries) > 1:
        joint, product = _joint_chunks(carries, multipliers)
        shift, multipliers = _narrowed(product)
        carries = joint >> shift
        written.append(Fields(joint & _mask(shift), shift))
    if len(carries):
        written.append(Fields(carries, _bit_length(multipliers - 1)))
    return written[::-1]


def decode(reader: BitReader, counts: Integers, lengths: Integers) -> Integers:
    """The places, ascending in each chunk; raises `InvalidPacket`."""
    tables = tables_for(lengths, int(counts.max(initial=0)))
    levels = _levels(lengths)
    carry = _decode_chunks(reader, tables.multiplier[tables.rows(lengths, counts)])
    start = np.arange(len(lengths)) << levels
    found: list[Integers] = []
    size = lengths
    for level in range(levels, -1, -1):
        single = counts == 1
        found.append(start[single] + carry[single])
        more = np.flatnonzero(counts > 1)
        start, size, counts, carry = start[more], size[more], counts[more], carry[more]
        if not len(start):
            break
        start, size, counts, carry = _split_level(reader, (start, size, counts, carry), level, tables)
    places = np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
    return places & ((1 << levels) - 1)


def bits_max(counts: Integers, lengths: Integers) -> int:
    """No set of so many places takes more bits."""
    tables = tables_for(lengths, int(counts.max(initial=0)))
    rows = tables.rows(lengths, counts)
    bits = int(tables.exponent[rows].sum())
    multipliers = tables.multiplier[rows]
    while len(multipliers) > 1:
        _, product = _joint_chunks(np.zeros_like(multipliers), multipliers)
        shift, multipliers = _narrowed(product)
        bits += int(shift.sum())
    return bits + int(_bit_length(multipliers - 1).sum())


@final
@dataclass(frozen=True, slots=True)
class _Chunks:
    lengths: Integers
    levels: int
    tables: Tables


def _join_level(
    base: Integers, number: Integers, carry: Integers, level: int, chunks: _Chunks
) -> tuple[Integers, Integers, Integers, Fields]:
    """Nodes of `level - 1`, named by a place in each, to their parents; changes `number` and `carry`.

    A single place is its own carry.
    """
    half = 1 << (level - 1)
    node = base >> level
    pairs = np.flatnonzero(node[1:] == node[:-1])
    paired = np.zeros(len(base), dtype=np.bool_)
    paired[pairs] = paired[pairs + 1] = True
    lone = np.flatnonzero((number > 1) & ~paired)
    lone = lone[_right_sizes(base[lone], level, chunks) > 0]
    active = np.sort(np.concatenate([pairs, lone])) if len(lone) else pairs
    if not len(active):
        return base, number, carry, Fields.none()
    partner = np.minimum(active + 1, len(base) - 1)
    pair = paired[active]
    in_left = (base[active] & half) == 0
    own, own_number = _own_carry(base, number, carry, active, half), number[active]
    left_number = np.where(in_left, own_number, 0)
    right_number = np.where(pair, number[partner], own_number - left_number)
    right_carry = np.where(pair, _own_carry(base, number, carry, partner, half), np.where(in_left, 0, own))
    total = left_number + right_number
    size = _right_sizes(base[active], level, chunks)
    tables = chunks.tables
    joint = np.where(in_left, own, 0) * tables.multiplier[tables.rows(size, right_number)] + right_carry
    row = tables.rows(size + half, total)
    entry = tables.top_entry[row] + tables.top_left[row] - left_number
    shift = tables.shifts[entry]
    carry[active] = tables.keys[entry] - (row << _ROW_BITS) + (joint >> shift)
    number[active] = total
    keep = np.ones(len(base), dtype=np.bool_)
    keep[pairs + 1] = False
    return base[keep], number[keep], carry[keep], Fields(joint & _mask(shift), shift)


def _own_carry(base: Integers, number: Integers, carry: Integers, chosen: Integers, half: int) -> Integers:
    return np.where(number[chosen] == 1, base[chosen] & (half - 1), carry[chosen])


def _right_sizes(base: Integers, level: int, chunks: _Chunks) -> Integers:
    """The sizes of the right children of the nodes of `level` that hold these places."""
    start = (base >> level << level) & ((1 << chunks.levels) - 1)
    half = 1 << (level - 1)
    sizes: Integers = np.minimum(chunks.lengths[base >> chunks.levels] - start - half, half)
    return sizes


def _split_level(reader: BitReader, nodes: _Nodes, level: int, tables: Tables) -> _Nodes:
    """Nodes of two places and more of `level` to their children; a node without a right child stays as it is."""
    whole = nodes[1] > 1 << (level - 1)
    if whole.all():
        return _split(reader, nodes, level, tables)
    children = _split(reader, _chosen(nodes, whole), level, tables)
    start, size, counts, carry = (np.concatenate(pair) for pair in zip(children, _chosen(nodes, ~whole), strict=True))
    order = np.argsort(start, kind="stable")
    return start[order], size[order], counts[order], carry[order]


def _chosen(nodes: _Nodes, mask: NDArray[np.bool_]) -> _Nodes:
    start, size, counts, carry = nodes
    return start[mask], size[mask], counts[mask], carry[mask]


def _split(reader: BitReader, nodes: _Nodes, level: int, tables: Tables) -> _Nodes:
    start, size, counts, carry = nodes
    half = 1 << (level - 1)
    keys = (tables.rows(size, counts) << _ROW_BITS) + carry
    entry = np.searchsorted(tables.keys, keys, side="right") - 1
    shift = tables.shifts[entry]
    joint = ((keys - tables.keys[entry]) << shift) | reader.fields(shift, "indices")
    left_counts = tables.lefts[entry]
    right_counts = counts - left_counts
    right_multiplier = tables.multiplier[tables.rows(size - half, right_counts)]
    if (joint >= tables.multiplier[tables.row_of_size[half] + left_counts] * right_multiplier).any():
        raise InvalidPacket("indices: no set has this number")
    left_carry = joint // right_multiplier
    return (
        _woven(start, start + half),
        _woven(np.full_like(size, half), size - half),
        _woven(left_counts, right_counts),
        _woven(left_carry, joint - left_carry * right_multiplier),
    )


def _woven(left: Integers, right: Integers) -> Integers:
    woven = np.empty(2 * len(left), dtype=np.int64)
    woven[::2], woven[1::2] = left, right
    return woven


def _decode_chunks(reader: BitReader, multipliers: Integers) -> Integers:
    """The carry of every chunk."""
    steps: list[tuple[Integers, Integers, Integers]] = []
    while len(multipliers) > 1:
        _, product = _joint_chunks(np.zeros_like(multipliers), multipliers)
        shift, narrowed = _narrowed(product)
        steps.append((multipliers, product, shift))
        multipliers = narrowed
    carries = reader.fields(_bit_length(multipliers - 1), "indices")
    if (carries >= multipliers).any():
        raise InvalidPacket("indices: no set has this number")
    for below, product, shift in reversed(steps):
        joint = (carries << shift) | reader.fields(shift, "indices")
        if (joint >= product).any():
            raise InvalidPacket("indices: no set has this number")
        right = np.append(below, 1)[1 : 2 * len(joint) : 2]
        carries = _woven(*np.divmod(joint, right))[: len(below)]
    return carries


def _joint_chunks(carries: Integers, multipliers: Integers) -> tuple[Integers, Integers]:
    """The joint numbers of pairs, and how many there are of each; the last one alone if their number is odd."""
    if len(carries) % 2:
        carries, multipliers = np.append(carries, 0), np.append(multipliers, 1)
    return carries[::2] * multipliers[1::2] + carries[1::2], multipliers[::2] * multipliers[1::2]


def _narrowed(product: Integers) -> tuple[Integers, Integers]:
    """How many low bits to write so that the rest stays below 2^20, and the bound of the rest."""
    shift = np.maximum(0, _bit_length(product) - CARRY_BITS)
    return shift, -(-product >> shift)


def _mask(shift: Integers) -> Integers:
    mask: Integers = (np.int64(1) << shift) - 1
    return mask


def _bit_length(values: Integers) -> Integers:
    """Of 0 <= values < 2^53."""
    lengths: Integers = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    return lengths


def _levels(lengths: Integers) -> int:
    return int(max(0, int(lengths.max(initial=1)) - 1).bit_length())


def tables_for(lengths: Integers, kept_max: int) -> Tables:
    """Tables for chunks of these lengths; kept, as the same model asks again and again."""
    assert kept_max <= KEPT_MAX
    assert lengths.max(initial=0) <= LENGTH_MAX
    # A power of two, so that packets with a few places less do not need tables of their own.
    return _tables(tuple(np.unique(lengths).tolist()), 1 << max(0, kept_max - 1).bit_length())


@lru_cache(maxsize=16)
def _tables(lengths: tuple[int, ...], kept_max: int) -> Tables:
    sizes = {1}
    for length in lengths:
        while length > 1:
            half = 1 << ((length - 1).bit_length() - 1)
            sizes.update((length, half))
            while half > 1:
                half >>= 1
                sizes.add(half)
            length -= 1 << ((length - 1).bit_length() - 1)
    row_of_size = np.zeros(max(sizes) + 1, dtype=np.int64)
    parts: list[_Part] = []
    by_size: dict[int, _Part] = {}
    for size in sorted(sizes):
        row_of_size[size] = sum(len(part.multiplier) for part in parts)
        half = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0
        part = _leaf() if size == 1 else _joined(by_size[half], by_size[size - half], min(size, kept_max))
        by_size[size] = part
        parts.append(part)
    return _concatenated(row_of_size, parts)


@final
@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one size; entries by row (k), from the largest i down, with carries counted from each row's start."""

    multiplier: Integers
    exponent: Integers
    row: Integers
    left: Integers
    first: Integers
    shift: Integers


def _leaf() -> _Part:
    two, none = np.array([0, 1]), np.zeros(2, dtype=np.int64)
    return _Part(np.ones(2, dtype=np.int64), none, two, two, none, none)


def _joined(left: _Part, right: _Part, kept_max: int) -> _Part:
    total = np.arange(kept_max + 1)[:, None]
    in_left = np.arange(min(kept_max, len(left.multiplier) - 1), -1, -1)[None, :]
    in_right = total - in_left
    possible = (in_right >= 0) & (in_right < len(right.multiplier))
    other = np.where(possible, in_right, 0)
    product = np.where(possible, left.multiplier[in_left] * right.multiplier[other], 0)
    exponent = np.where(possible, left.exponent[in_left] + right.exponent[other], 0)
    highest = exponent.max(axis=1)
    # The common exponent of a row: no less than its children's, and such that all carries fit.
    common = highest + np.maximum(
        0, _bit_length(_ceiled(product, highest[:, None] - exponent).sum(axis=1)) - CARRY_BITS
    )
    common += _ceiled(product, common[:, None] - exponent).sum(axis=1) > 1 << CARRY_BITS
    shift = common[:, None] - exponent
    spans = _ceiled(product, shift)
    first = np.cumsum(spans, axis=1) - spans
    rows = np.broadcast_to(total, possible.shape)
    # No more low bits than the joint number has.
    shift = np.minimum(shift, _bit_length(np.maximum(product, 1) - 1))
    lefts = np.broadcast_to(in_left, possible.shape)
    return _Part(spans.sum(axis=1), common, rows[possible], lefts[possible], first[possible], shift[possible])


def _ceiled(product: Integers, shift: Integers) -> Integers:
    ceiled: Integers = -(-product >> np.minimum(shift, 62))
    return ceiled


def _concatenated(row_of_size: Integers, parts: list[_Part]) -> Tables:
    firsts = np.cumsum([0] + [len(part.multiplier) for part in parts])
    row = np.concatenate([part.row + first for part, first in zip(parts, firsts, strict=False)])
    lefts = np.concatenate([part.left for part in parts])
    top_entry = np.searchsorted(row, np.arange(firsts[-1]))
    return Tables(
        row_of_size=row_of_size,
        multiplier=np.concatenate([part.multiplier for part in parts]),
        exponent=np.concatenate([part.exponent for part in parts]),
        top_entry=top_entry,
        top_left=lefts[top_entry],
        keys=(row << _ROW_BITS) + np.concatenate([part.first for part in parts]),
        lefts=lefts,
        shifts=np.concatenate([part.shift for part in parts]),
    )
