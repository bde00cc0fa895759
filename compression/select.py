"""Selections: which coefficients of a tensor are sent; ties go to the lowest index."""

from __future__ import annotations

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
# Candidates are searched by the maxima of this many groups for each value kept: fewer let more candidates through.
_GROUPS_PER_KEPT = 4


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
    """Chooses coefficients by their size alone."""

    @abstractmethod
    def chunks(self, size: int) -> Chunks | None:
        """How `size` coefficients are cut; None when all are sent."""

    @property
    @abstractmethod
    def alike(self) -> int | None:
        """How many values of one chunk follow each other, which scales may want to know; None when all are sent."""

    @abstractmethod
    def select(self, coefficients: Tensor) -> Tensor | None:
        """Ascending positions (int64) in the flat coefficients, never of a zero; None when all are sent."""


@final
@dataclass(frozen=True, slots=True)
class All(Selection):
    """Every coefficient, in order."""

    def chunks(self, size: int) -> Chunks | None:
        return None

    @property
    def alike(self) -> int | None:
        return None

    def select(self, coefficients: Tensor) -> Tensor | None:
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
        if not 1 <= self.kept <= self.chunk <= CHUNK_MAX:
            raise ValueError(f"{self}: needs 1 <= k <= n <= {CHUNK_MAX}")

    def chunks(self, size: int) -> Chunks | None:
        if size == 0:
            return Chunks(0, 0, 0, 0, 0)
        count = ceil(size / self.chunk)
        length = ceil(size / count)
        tail = size - (count - 1) * length
        return Chunks(count, length, tail, self._share(length), self._share(tail))

    @property
    def alike(self) -> int | None:
        return self.kept

    def _share(self, length: int) -> int:
        return max(1, (2 * self.kept * length + self.chunk) // (2 * self.chunk))

    def select(self, coefficients: Tensor) -> Tensor | None:
        chunks = self.chunks(coefficients.numel())
        assert chunks is not None
        chosen: list[Tensor] = []
        whole = max(0, chunks.count - 1) * chunks.length
        table = coefficients[:whole].view(-1, max(1, chunks.length))
        step = max(1, slab_elements(coefficients.device) // max(1, chunks.length))
        for top in range(0, chunks.count - 1, step):
            chosen.append(largest(table[top : top + step].abs(), chunks.kept) + top * chunks.length)
        if chunks.count:
            chosen.append(largest(coefficients[whole:].abs().view(1, -1), chunks.kept_tail) + whole)
        return torch.cat(chosen) if chosen else coefficients.new_zeros(0, dtype=torch.int64)

    def __str__(self) -> str:
        return f"topk({self.kept}/{self.chunk})"


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
    bar = maxima.topk(kept, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    candidates = positions((magnitudes >= bar) & (magnitudes > 0))
    row = candidates // length
    per_row = torch.bincount(row, minlength=rows)
    column = ranks(row, per_row)
    width = max(kept, int(per_row.max()))
    table = magnitudes.new_zeros(rows, width)
    table[row, column] = magnitudes.view(-1)[candidates]
    return candidates[keep_largest(table, kept)[row, column]]


def keep_largest(magnitudes: Tensor, kept: int) -> Tensor:
    """The mask of the `kept` largest of each row; of equal ones the leftmost; never a zero."""
    bar = magnitudes.topk(min(kept, magnitudes.shape[1]), dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    above = magnitudes > bar
    equal = magnitudes == bar
    room = kept - above.sum(dim=1, keepdim=True)
    return (above | (equal & (equal.cumsum(dim=1) <= room))) & (magnitudes > 0)
