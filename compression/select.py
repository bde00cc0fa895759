"""Selections: which coefficients of a tensor are sent. By size, ties to the lowest index; or by lot from a seed."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compression.slabs import positions, ranks, slab_elements

CHUNK_MAX = 1 << 16
SEED_BITS = 32
# Candidates are searched by the maxima of this many groups for each value kept: fewer let more candidates through.
_GROUPS_PER_KEPT = 4
_SUBNORMAL_MIN = 2.0**-149


@final
@dataclass(frozen=True, slots=True)
class Chunks:
    """A flat tensor cut into `count` chunks of `length`, the last of `tail` elements; `kept` / `kept_tail` of each."""

    count: int
    length: int
    tail: int
    kept: int
    kept_tail: int

    def lengths(self) -> NDArray[np.int64]:
        return self._filled(self.length, self.tail)

    def capacities(self) -> NDArray[np.int64]:
        """At most how many coefficients each chunk sends."""
        return self._filled(self.kept, self.kept_tail)

    def _filled(self, value: int, last: int) -> NDArray[np.int64]:
        values = np.full(self.count, value, dtype=np.int64)
        values[self.count - 1 :] = last
        return values


class Selection(ABC):
    """Chooses coefficients; `drawn` ones by a seed that the packet carries, so that no index travels."""

    drawn: bool = False

    @abstractmethod
    def chunks(self, size: int) -> Chunks | None:
        """How `size` coefficients are cut; None when all are sent."""

    @property
    @abstractmethod
    def alike(self) -> int | None:
        """How many values of one chunk follow each other, which scales may want to know; None when all are sent."""

    @abstractmethod
    def select(self, coefficients: Tensor, size: int, start: int = 0) -> Tensor | None:
        """Ascending positions (int64) of a tensor of `size` coefficients, never of a zero; None when all are sent.

        `coefficients` are those from `start` on: whole chunks, the last of them perhaps the tensor's last.
        """

    def draw(self, size: int, seed: int) -> Tensor:
        """The positions, for a drawn selection."""
        raise NotImplementedError

    def kept_share(self, size: int) -> float:
        """The least share of the energy of `size` coefficients that is sent; 0 when nothing is certain."""
        chunks = self.chunks(size)
        if chunks is None or not size:
            return 1.0
        return min(chunks.kept / chunks.length, chunks.kept_tail / chunks.tail)


@final
@dataclass(frozen=True, slots=True)
class All(Selection):
    """Every coefficient, in order."""

    def chunks(self, size: int) -> Chunks | None:
        return None

    @property
    def alike(self) -> int | None:
        return None

    def select(self, coefficients: Tensor, size: int, start: int = 0) -> Tensor | None:
        return None

    def __str__(self) -> str:
        return "all"


@final
@dataclass(frozen=True, slots=True)
class TopK(Selection):
    """The `kept` largest magnitudes of every `chunk` coefficients: in proportion for a shorter chunk, at least one.

    A tensor is cut into as few equal chunks as fit, whatever the transform's tiles are.
    """

    kept: int
    chunk: int

    def __post_init__(self) -> None:
        _check_share(self, self.kept, self.chunk)

    def chunks(self, size: int) -> Chunks | None:
        return _cut(size, self.kept, self.chunk)

    @property
    def alike(self) -> int | None:
        return self.kept

    def select(self, coefficients: Tensor, size: int, start: int = 0) -> Tensor | None:
        chunks = _cut(size, self.kept, self.chunk)
        end = start + coefficients.numel()
        alike = chunks.count if chunks.tail == chunks.length else max(0, chunks.count - 1)
        whole = min(end, alike * chunks.length) - start
        chosen: list[Tensor] = []
        table = coefficients[:whole].view(-1, max(1, chunks.length))
        step = max(1, slab_elements(coefficients.device) // max(1, chunks.length))
        for top in range(0, len(table), step):
            place = start + top * chunks.length
            chosen.append(largest(table[top : top + step].abs(), chunks.kept) + place)
        if start + whole < end:
            chosen.append(largest(coefficients[whole:].abs().view(1, -1), chunks.kept_tail) + (start + whole))
        return torch.cat(chosen) if chosen else coefficients.new_zeros(0, dtype=torch.int64)

    def __str__(self) -> str:
        return f"topk({self.kept}/{self.chunk})"


@final
@dataclass(frozen=True, slots=True)
class GlobalTopK(Selection):
    """The `kept` largest magnitudes of every `of`, counted over the whole tensor: some places get many, others none."""

    kept: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.kept <= self.of:
            raise ValueError(f"{self}: needs 1 <= k <= n")

    def chunks(self, size: int) -> Chunks | None:
        kept = _share(self.kept, self.of, size)
        return Chunks(1, size, size, kept, kept) if size else Chunks(0, 0, 0, 0, 0)

    @property
    def alike(self) -> int | None:
        return CHUNK_MAX

    def select(self, coefficients: Tensor, size: int, start: int = 0) -> Tensor | None:
        assert (start, size) == (0, coefficients.numel())
        if not size:
            return coefficients.new_zeros(0, dtype=torch.int64)
        return largest(coefficients.abs().view(1, -1), _share(self.kept, self.of, size))

    def __str__(self) -> str:
        return f"globaltopk({self.kept}/{self.of})"


@final
@dataclass(frozen=True, slots=True)
class Drawn(Selection):
    """`kept` of every `chunk` coefficients by lot: one in each of `kept` equal parts, each place as likely as another.

    A packet carries the seed. `random`: it follows from the tensor, so every peer and round draws anew. `mask`: it is
    the chain's, which all peers of a round share, so that they speak of the same coefficients.
    """

    kind: str
    kept: int
    chunk: int
    drawn = True

    def __post_init__(self) -> None:
        _check_share(self, self.kept, self.chunk)

    @property
    def shared(self) -> bool:
        return self.kind == "mask"

    def chunks(self, size: int) -> Chunks | None:
        return _cut(size, self.kept, self.chunk)

    @property
    def alike(self) -> int | None:
        return None  # A chunk is no more alike than its neighbours.

    def select(self, coefficients: Tensor, size: int, start: int = 0) -> Tensor | None:
        raise AssertionError("drawn, not selected")

    def seed_of(self, tensor: Tensor) -> int:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return zlib.crc32(raw.tobytes())

    def draw(self, size: int, seed: int) -> Tensor:
        chunks = _cut(size, self.kept, self.chunk)
        counts = chunks.capacities()
        part = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        length, kept = np.repeat(chunks.lengths(), counts), np.repeat(counts, counts)
        low, high = part * length // kept, (part + 1) * length // kept
        lots = _mixed((np.arange(len(part), dtype=np.uint64) << np.uint64(SEED_BITS)) | np.uint64(seed))
        within = low + (lots % (high - low).astype(np.uint64)).astype(np.int64)
        return torch.from_numpy(within + np.repeat(np.arange(chunks.count) * chunks.length, counts))

    def kept_share(self, size: int) -> float:
        chunks = _cut(size, self.kept, self.chunk)
        return 1.0 if (chunks.kept, chunks.kept_tail) == (chunks.length, chunks.tail) else 0.0

    def __str__(self) -> str:
        return f"{self.kind}({self.kept}/{self.chunk})"


def largest(magnitudes: Tensor, kept: int) -> Tensor:
    """Ascending flat positions of the `kept` largest of each row of (rows, length), without zeros.

    Fast when few are kept: the kept-th largest of some groups' maxima is at most the kept-th largest value, so only
    what reaches it is a candidate (about 15 % more than are kept), and the exact choice is made among candidates.
    """
    rows, length = magnitudes.shape
    group = length // (_GROUPS_PER_KEPT * kept)
    if group < 2:
        return positions(keep_largest(magnitudes, kept))
    groups = length // group
    maxima = magnitudes[:, : group * groups].view(rows, group, groups).amax(dim=1)
    if magnitudes.device.type == "cpu":  # numpy compares and partitions several times faster here.
        return torch.from_numpy(_largest_of_candidates(magnitudes.numpy(), maxima.numpy(), kept))
    bar = maxima.topk(kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    candidates = positions(magnitudes >= bar.clamp_min_(_SUBNORMAL_MIN))
    row = candidates // length
    per_row = torch.bincount(row, minlength=rows)
    width = max(kept, int(per_row.max()))
    place = row * width + ranks(row, per_row)
    table = magnitudes.new_zeros(rows * width).index_copy_(0, place, magnitudes.view(-1)[candidates])
    return candidates[keep_largest(table.view(rows, width), kept).view(-1)[place]]


def _largest_of_candidates(
    magnitudes: NDArray[np.float32], maxima: NDArray[np.float32], kept: int
) -> NDArray[np.int64]:
    rows, length = magnitudes.shape
    bar = np.partition(maxima, maxima.shape[1] - kept, axis=1)[:, -kept, None]
    candidates = np.flatnonzero(magnitudes >= np.maximum(bar, np.float32(_SUBNORMAL_MIN)))
    values = magnitudes.reshape(-1)[candidates]
    row = candidates // length
    per_row = np.bincount(row, minlength=rows)
    width = max(kept, int(per_row.max()))
    table = np.zeros((rows, width), dtype=np.float32)
    first = np.cumsum(per_row) - per_row
    table.reshape(-1)[row * width + np.arange(len(row)) - first[row]] = values
    least = np.partition(table, width - kept, axis=1)[:, width - kept][row]
    keep = values >= least
    if (np.bincount(row[keep], minlength=rows) > kept).any():  # Of equal ones the leftmost.
        above, equal = values > least, values == least
        room = kept - np.bincount(row[above], minlength=rows)
        seen = np.cumsum(equal)
        before = np.concatenate([np.zeros(1, dtype=np.int64), seen])[first]
        keep = above | (equal & (seen - before[row] <= room[row]))
    chosen: NDArray[np.int64] = candidates[keep]
    return chosen


def keep_largest(magnitudes: Tensor, kept: int) -> Tensor:
    """The mask of the `kept` largest of each row; of equal ones the leftmost; never a zero."""
    bar = magnitudes.topk(min(kept, magnitudes.shape[1]), dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = magnitudes > bar
    equal = magnitudes == bar
    room = kept - above.sum(dim=1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=1) <= room))) & (magnitudes > 0)


def _check_share(selection: Selection, kept: int, chunk: int) -> None:
    if not 1 <= kept <= chunk <= CHUNK_MAX:
        raise ValueError(f"{selection}: needs 1 <= k <= n <= {CHUNK_MAX}")


def _share(kept: int, of: int, size: int) -> int:
    return max(1, (2 * kept * size + of) // (2 * of))


def _cut(size: int, kept: int, chunk: int) -> Chunks:
    if size == 0:
        return Chunks(0, 0, 0, 0, 0)
    count = ceil(size / chunk)
    length = ceil(size / count)
    tail = size - (count - 1) * length
    return Chunks(count, length, tail, _share(kept, chunk, length), _share(kept, chunk, tail))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) of every number: integers, so the same lots everywhere."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
