"""Levels of 1, 2, 4 or 8 bits: fitted books (`bits`), even steps (`int`), powers of two (`e3m0`); scaled by block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, sqrt
from typing import final

import torch
from torch import Tensor

from compression.scales import SCALE_MAX, Towards, decode_scales, encode_scales
from compression.slabs import slab_elements
from compression.values import Values


@final
@dataclass(frozen=True, slots=True)
class Form:
    """Magnitude j of a level is `offset + book[j] * step`, or `book[j] * step` with one scale only.

    `block`: at most so many values share their scales. Those are few where values are dense; among top-k values, whose
    indices cost more, each chunk has its own, or few chunks together: it is worth it, as chunks differ. `mantissa`:
    bits of a scale beyond its exponent. `rounds` of Lloyd's iteration; none: the scales span the block's extremes.
    `entropy`: see `Values.symbol_entropy`.
    """

    bits: int
    book: tuple[int, ...]
    scales: int
    block: int
    mantissa: int
    rounds: int
    entropy: tuple[float, float] = (0.0, 0.0)


_BLOCK_MIN = {1: 16, 2: 48}  # By the number of scales.
# Scales have at most 8 significant bits and books 15, so that `book[j] * step` is exact in float32. The fitted books
# grow from step to step, for a Gaussian as much as for heavier tails: by 1/3 in all in 4 bits (a Lloyd quantiser of a
# Gaussian: .128 .388 .657 .942 1.256 1.618 2.069 2.733 sigma), up to five times in 8.
_GROWING_4 = (0, 8, 18, 29, 43, 60, 80, 104)
_GROWING_8 = tuple(64 * j + j * j for j in range(128))
FORMS = {
    "bits(1)": Form(1, (0,), scales=1, block=256, mantissa=2, rounds=0),
    "bits(2)": Form(2, (0, 1), scales=2, block=256, mantissa=3, rounds=3, entropy=(0.902, 0.788)),
    "bits(4)": Form(4, _GROWING_4, scales=2, block=256, mantissa=4, rounds=3, entropy=(2.755, 2.754)),
    "bits(8)": Form(8, _GROWING_8, scales=2, block=512, mantissa=7, rounds=0, entropy=(6.7, 6.74)),
    "int(4)": Form(4, tuple(range(8)), scales=1, block=256, mantissa=4, rounds=4, entropy=(2.51, 1.57)),
    "int(8)": Form(8, tuple(range(128)), scales=1, block=512, mantissa=7, rounds=0, entropy=(6.35, 5.51)),
    "e3m0": Form(4, (0, 1, 2, 4, 8, 16, 32, 64), scales=1, block=256, mantissa=4, rounds=4, entropy=(2.51, 0.97)),
}
# Places in a book are looked up in so many cells between its ends: only the encoder does, so it may be off by one.
_CELLS = 1 << 13


@final
@dataclass(frozen=True, slots=True)
class Levels(Values):
    """A sign and a magnitude of the form's book, the scales fitted to each block. uint8; the sign is the top bit.

    `bits(1)` is the mean magnitude; `bits(2)` the four levels of Lloyd's quantiser (+-.45 and +-1.51 sigma for a
    Gaussian; for top-k values, whose magnitudes start at a threshold, whatever fits them); `bits(4)` and `bits(8)`
    a fixed shape stretched to fit. Zeros are sent as the smallest magnitude.

    `book[j] * step` is exact and the sum with the offset rounds once, fused or not.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in FORMS:
            kind = self.name.partition("(")[0]
            exist = ", ".join(name for name in FORMS if name.startswith(kind + "("))
            raise ValueError(f"{self.name}: the number of bits does not exist; there are {exist}")

    @property
    def form(self) -> Form:
        return FORMS[self.name]

    @property
    def level_bits(self) -> int:  # type: ignore[override]
        return self.form.bits

    @property
    def level_dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.uint8

    @property
    def symbol_bits(self) -> int:  # type: ignore[override]
        return self.form.bits - 1

    @property
    def scale_columns(self) -> int:  # type: ignore[override]
        return self.form.scales

    @property
    def scale_mantissa(self) -> int:  # type: ignore[override]
        return self.form.mantissa

    def blocks(self, count: int, alike: int | None) -> int:
        longest = self.form.block
        if alike is not None:  # Whole chunks, until a scale costs little beside the indices.
            longest = min(longest, alike * ceil(_BLOCK_MIN[self.form.scales] / alike))
        return ceil(count / longest)

    def symbol_entropy(self, *, dense: bool) -> float:
        return self.form.entropy[0 if dense else 1]

    def error_bound(self, count: int, alike: int | None) -> float:
        """Least squares explain at least what the block's mean does, which is 1 / length of its energy in the worst
        case, less what rounding the scales takes; without a fit, half the widest step is the most an element loses.
        """
        longest = ceil(count / max(1, self.blocks(count, alike)))
        widest = max((above - below for below, above in pairwise(self.form.book)), default=0)
        spread = 1.02 * widest / self.form.book[-1] / 2 * sqrt(longest) if widest else 1.0
        if self.form.bits == 8:
            return min(1.0, spread)
        return sqrt(1 - 0.99 * (1 - 4.0 ** -(self.form.mantissa + 1)) * self._explained(longest))

    def _explained(self, longest: int) -> float:
        """The least share of a block's energy that the fit explains."""
        if self.form.scales == 2 or self.form.bits == 1:
            return 1 / max(1, longest)
        # From step = max / book[-1]: levels l > 0 hold values from (l + the one below) / 2 to (l + the one above) / 2.
        book = self.form.book
        low = min((below + level) / 2 / level for below, level in pairwise(book))
        high = max((level + above) / 2 / level for level, above in pairwise(book[1:]))
        energy = high * high + max(0, longest - 1) * (book[1] / 2 / book[-1]) ** 2
        return min(1.0, low * low / energy)

    def quantise(self, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        levels = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
        scales = values.new_empty(blocks, self.scale_columns)
        length = ceil(len(values) / max(1, blocks))
        step = max(1, slab_elements(values.device) // max(1, length))
        whole = len(values) // max(1, length)
        for top, bottom in [*pairwise([*range(0, whole, step), whole]), (whole, blocks)]:  # The last may be shorter.
            part = values[top * length : bottom * length]
            if not len(part):
                continue
            table = part.view(bottom - top, -1)
            magnitudes = table.abs().clamp_max_(SCALE_MAX)
            scales[top:bottom] = self._fit(magnitudes)
            index = self._assign(magnitudes, scales[top:bottom])
            index |= (table < 0).to(torch.uint8) << (self.form.bits - 1)
            levels[top * length : bottom * length] = index.view(-1)
        return levels, scales

    def values_at(self, levels: Tensor, scales: list[Tensor]) -> Tensor:
        form = self.form
        signs = 1 - 2 * (levels >> (form.bits - 1)).to(torch.float32)
        if form.bits == 1:
            return signs * scales[0]
        index = levels & (2 ** (form.bits - 1) - 1)
        book = index.to(torch.float32) if _even(form.book) else _taken(form.book, index)
        steps = book * scales[-1]  # Exact.
        return signs * (steps if form.scales == 1 else steps + scales[0])

    def _fit(self, magnitudes: Tensor) -> Tensor:
        form = self.form
        if form.bits == 1:
            return self._rounded(magnitudes.mean(dim=1, keepdim=True))
        if form.rounds:
            return self._rounded(self._lloyd(magnitudes))
        low, high = torch.aminmax(magnitudes, dim=1, keepdim=True)
        offset = self._rounded(low, "down") if form.scales == 2 else torch.zeros_like(low)
        step = self._rounded((high - offset) / form.book[-1], "up")
        return torch.cat([offset, step], dim=1) if form.scales == 2 else step

    def _lloyd(self, magnitudes: Tensor) -> Tensor:
        """Alternates nearest levels and least squares, offset and step not negative."""
        form = self.form
        mean = magnitudes.mean(dim=1, keepdim=True)
        offset, step = self._start(magnitudes, mean)
        for _ in range(form.rounds):
            index = self._assign(magnitudes, torch.cat([offset, step], dim=1) if form.scales == 2 else step)
            levels = index.to(torch.float32) if _even(form.book) else _taken(form.book, index)
            product = (levels * magnitudes).mean(dim=1, keepdim=True)
            square = levels.square().mean(dim=1, keepdim=True)
            alone = torch.where(square > 0, product / square, step)  # The step without an offset.
            if form.scales == 1:
                step = alone
                continue
            centre = levels.mean(dim=1, keepdim=True)
            variance = square - centre.square()
            step = torch.where(variance > 1e-6 * square, (product - centre * mean) / variance, step).clamp_min_(0)
            offset = mean - step * centre
            step = torch.where(offset < 0, alone, step)
            offset.clamp_min_(0)
        return torch.cat([offset, step], dim=1) if form.scales == 2 else step

    def _start(self, magnitudes: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """The block's largest at the book's end, so that outliers are not lost; 2 bits between two common fits."""
        last = float(self.form.book[-1])
        if self.form.bits == 2:  # A Gaussian's and an exponential's.
            spread = (magnitudes - mean).abs_().mean(dim=1, keepdim=True) * 1.3
            return (mean - 0.5 * spread).clamp_min_(0), 1.85 * spread
        low, high = torch.aminmax(magnitudes, dim=1, keepdim=True)
        if self.form.scales == 1:
            low = torch.zeros_like(low)
        return low, (high - low) / last

    def _assign(self, magnitudes: Tensor, scales: Tensor) -> Tensor:
        """The nearest magnitude's index (uint8), or its neighbour where two are about equally near."""
        book = self.form.book
        if len(book) == 1:
            return torch.zeros_like(magnitudes, dtype=torch.uint8)
        offset, step = (scales[:, :1] if scales.shape[1] == 2 else 0.0), scales[:, -1:]
        if len(book) == 2:
            return (magnitudes > offset + 0.5 * step).to(torch.uint8)
        places = (magnitudes - offset) * torch.where(step > 0, 1 / step, torch.zeros_like(step))
        if _even(book):
            return places.round_().clamp_(0, book[-1]).to(torch.uint8)
        cells = places.mul_((_CELLS - 1) / book[-1]).round_().clamp_(0, _CELLS - 1)
        return _cells(book, magnitudes.device)[cells.to(torch.int32)]

    def _rounded(self, scales: Tensor, towards: Towards = "near") -> Tensor:
        return decode_scales(encode_scales(scales, self.scale_mantissa, towards), self.scale_mantissa)

    def __str__(self) -> str:
        return self.name


def _even(book: tuple[int, ...]) -> bool:
    return len(book) == book[-1] + 1


def _taken(book: tuple[int, ...], index: Tensor) -> Tensor:
    return _book(book, index.device)[index.to(torch.int32)]


@lru_cache(maxsize=64)
def _book(book: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(book, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def _cells(book: tuple[int, ...], device: torch.device) -> Tensor:
    """The level of each cell's middle."""
    middles = torch.arange(_CELLS, dtype=torch.float64) * (book[-1] / (_CELLS - 1))
    bounds = torch.tensor([(below + above) / 2 for below, above in pairwise(book)], dtype=torch.float64)
    return torch.bucketize(middles, bounds).to(torch.uint8).to(device)
