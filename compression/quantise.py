"""Values: kept coefficients to small levels with scales, and back by arithmetic that rounds the same everywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import final

import torch
from torch import Tensor

from compression.scales import SCALE_MAX, decode_scales, encode_scales
from compression.slabs import slab_elements

# Magnitude j of a b-bit level is `offset + book[j] * step`. The 4-bit book has the proportions of the Lloyd-Max
# quantiser of a Gaussian (.128, .388, .657, .942, 1.256, 1.618, 2.069, 2.733 sigma).
_BOOKS = {
    1: (0,),
    2: (0, 1),
    4: (0, 10, 20, 31, 43, 57, 75, 100),
    8: tuple(range(128)),
}
# At most so many values share their scales, and at least so many. Small blocks cost little, as scales travel as
# coded differences: on the momentum of a small GPT a scale for every chunk of 32 kept values costs 1 % more than one
# a tensor, and the error of bits(1) falls from .43 to .17. Dense values have no indices beside which scales are small.
_BLOCKS = {1: 64, 2: 64, 4: 128, 8: 512}
_BLOCK_MIN = 16
_MANTISSAS = {1: 2, 2: 3, 4: 4, 8: 7}
_LLOYD_ROUNDS = {2: 3, 4: 3}


class Values(ABC):
    """How the kept coefficients of one tensor become levels. The levels' dtype is `level_dtype`."""

    level_bits: int
    level_dtype: torch.dtype
    scale_columns: int
    scale_mantissa: int

    @abstractmethod
    def blocks(self, count: int, alike: int | None) -> int:
        """How many rows of scales `count` values have; `alike`: that many in a row come from one chunk."""

    @abstractmethod
    def quantise(self, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Finite float32 (count,) to levels (count,) and float32 scales (blocks, columns)."""

    @abstractmethod
    def dequantise(self, levels: Tensor, scales: Tensor) -> Tensor:
        """float32 (count,); the same bits on every device."""


@final
@dataclass(frozen=True, slots=True)
class Floats(Values):
    """The values themselves at a float's precision; what is too large for it becomes its largest number."""

    name: str

    @property
    def level_dtype(self) -> torch.dtype:  # type: ignore[override]
        return FLOATS[self.name]

    @property
    def level_bits(self) -> int:  # type: ignore[override]
        return 8 * self.level_dtype.itemsize

    @property
    def scale_columns(self) -> int:  # type: ignore[override]
        return 0

    @property
    def scale_mantissa(self) -> int:  # type: ignore[override]
        return 0

    def blocks(self, count: int, alike: int | None) -> int:
        return 0

    def quantise(self, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        bound = torch.finfo(self.level_dtype).max
        return values.clamp(-bound, bound).to(self.level_dtype), values.new_zeros(0, 0)

    def dequantise(self, levels: Tensor, scales: Tensor) -> Tensor:
        return levels.to(torch.float32)

    def __str__(self) -> str:
        return self.name


FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@final
@dataclass(frozen=True, slots=True)
class Bits(Values):
    """A sign and a `bits - 1` bit magnitude: `sign * (offset + book[j] * step)`, offset and step fitted to each block.

    With 1 bit that is the mean magnitude, with 2 the four levels of Lloyd's quantiser (+-.45 and +-1.51 sigma for a
    Gaussian; for top-k values, whose magnitudes start at a threshold, whatever fits them), with 4 its shape stretched
    to fit, with 8 even steps between the extremes. Levels are uint8: the sign in the top of the `bits` bits.

    Scales have at most 8 significant bits and the book 7, so `book[j] * step` is exact in float32 and the sum rounds
    once, fused or not. Zeros are sent as the smallest magnitude, or as zero in a block whose offset is zero.
    """

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in _BOOKS:
            raise ValueError(f"bits({self.bits}): the number of bits must be one of {', '.join(map(str, _BOOKS))}")

    @property
    def level_bits(self) -> int:  # type: ignore[override]
        return self.bits

    @property
    def level_dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.uint8

    @property
    def scale_columns(self) -> int:  # type: ignore[override]
        return 1 if self.bits == 1 else 2

    @property
    def scale_mantissa(self) -> int:  # type: ignore[override]
        return _MANTISSAS[self.bits]

    def blocks(self, count: int, alike: int | None) -> int:
        longest = _BLOCKS[self.bits]
        return ceil(count / (longest if alike is None else min(longest, max(_BLOCK_MIN, alike))))

    def quantise(self, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        table = _blocked(values, blocks)
        levels = torch.empty(table.shape, dtype=torch.uint8, device=values.device)
        scales = values.new_empty(len(table), self.scale_columns)
        step = max(1, slab_elements(values.device) // max(1, table.shape[1]))
        for top in range(0, len(table), step):
            rows = slice(top, top + step)
            magnitudes = table[rows].abs().clamp_max_(SCALE_MAX)
            scales[rows] = self._fit(magnitudes)
            index = self._assign(magnitudes, scales[rows])
            levels[rows] = index | ((table[rows] < 0).to(torch.uint8) << (self.bits - 1))
        return levels.view(-1)[: len(values)], scales

    def dequantise(self, levels: Tensor, scales: Tensor) -> Tensor:
        table = _blocked(levels, len(scales))
        values = torch.empty(table.shape, dtype=torch.float32, device=levels.device)
        step = max(1, slab_elements(levels.device) // max(1, table.shape[1]))
        for top in range(0, len(table), step):
            rows = slice(top, top + step)
            values[rows] = self._values(table[rows], scales[rows])
        return values.view(-1)[: len(levels)]

    def _values(self, levels: Tensor, scales: Tensor) -> Tensor:
        signs = 1 - 2 * (levels >> (self.bits - 1)).to(torch.float32)
        if self.bits == 1:
            return signs * scales[:, :1]
        index = (levels & (2 ** (self.bits - 1) - 1)).to(torch.float32)
        book = _book(self.bits, levels.device)[index.to(torch.int64)] if self.bits == 4 else index
        steps = book * scales[:, 1:]  # Exact.
        return signs * (steps + scales[:, :1])

    def _fit(self, magnitudes: Tensor) -> Tensor:
        if self.bits == 1:
            return self._rounded(magnitudes.mean(dim=1, keepdim=True))
        if self.bits == 8:
            low, high = torch.aminmax(magnitudes, dim=1, keepdim=True)
            offset = decode_scales(encode_scales(low, self.scale_mantissa, "down"), self.scale_mantissa)
            step = decode_scales(encode_scales((high - offset) / 127, self.scale_mantissa, "up"), self.scale_mantissa)
            return torch.cat([offset, step], dim=1)
        return self._rounded(self._lloyd(magnitudes))

    def _lloyd(self, magnitudes: Tensor) -> Tensor:
        """Alternates nearest levels and least squares; the start lies between a Gaussian's and an exponential's fit."""
        book = _book(self.bits, magnitudes.device)
        mean = magnitudes.mean(dim=1, keepdim=True)
        spread = (magnitudes - mean).abs_().mean(dim=1, keepdim=True) * 1.3
        low, high = (0.5, 1.35) if self.bits == 2 else (1.0, 3.0)
        offset = (mean - low * spread).clamp_min_(0)
        step = (low + high) * spread / float(_BOOKS[self.bits][-1])
        for _ in range(_LLOYD_ROUNDS[self.bits]):
            index = self._assign(magnitudes, torch.cat([offset, step], dim=1))
            levels = index.to(torch.float32) if self.bits == 2 else book[index.to(torch.int64)]
            centre = levels.mean(dim=1, keepdim=True)
            covariance = (levels * magnitudes).mean(dim=1, keepdim=True) - centre * mean
            variance = levels.square_().mean(dim=1, keepdim=True) - centre.square()
            step = torch.where(variance > 0, covariance / variance, step).clamp_min_(0)
            offset = (mean - step * centre).clamp_min_(0)
        return torch.cat([offset, step], dim=1)

    def _assign(self, magnitudes: Tensor, scales: Tensor) -> Tensor:
        """The nearest magnitude's index (uint8); the lower one where two are equally near or the step is zero."""
        if self.bits == 1:
            return torch.zeros_like(magnitudes, dtype=torch.uint8)
        offset, step = scales[:, :1], scales[:, 1:]
        if self.bits == 8:
            places = (magnitudes - offset) * torch.where(step > 0, 1 / step, torch.zeros_like(step))
            return places.round_().clamp_(0, 127).to(torch.uint8)
        book = _BOOKS[self.bits]
        index = torch.zeros_like(magnitudes, dtype=torch.uint8)
        for below, above in pairwise(book):  # Seven comparisons cost less than one binary search.
            index += magnitudes > offset + (below + above) / 2 * step
        return index

    def _rounded(self, scales: Tensor) -> Tensor:
        return decode_scales(encode_scales(scales, self.scale_mantissa), self.scale_mantissa)

    def __str__(self) -> str:
        return f"bits({self.bits})"


def _blocked(values: Tensor, blocks: int) -> Tensor:
    """(count,) as (blocks, length) with equal lengths; the last value fills up the last block, which is never empty."""
    if blocks == 0:
        return values.new_zeros(0, 0)
    length = ceil(len(values) / blocks)
    missing = blocks * length - len(values)
    return (torch.cat([values, values[-1:].expand(missing)]) if missing else values).view(blocks, length)


@lru_cache(maxsize=64)
def _book(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(_BOOKS[bits], dtype=torch.float32, device=device)
