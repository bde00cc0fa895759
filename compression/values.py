"""Values: how the kept coefficients of a tensor become levels and scales; and the plainest of them, floats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil
from typing import final

import torch
from torch import Tensor

from compression.scales import decode_scales, encode_scales
from compression.slabs import slab_elements


class Values(ABC):
    """`str(values)` is the name. Levels are non-negative integers or floats of `level_bits`, as `level_dtype`.

    For the entropy coder a level is, from its highest bit: a sign, `symbol_bits` that are worth coding, and the rest.
    """

    level_bits: int
    level_dtype: torch.dtype
    symbol_bits: int
    scale_columns: int
    scale_mantissa: int

    @abstractmethod
    def blocks(self, count: int, alike: int | None) -> int:
        """How many rows of scales `count` values have; `alike`: that many in a row come from one chunk."""

    @abstractmethod
    def symbol_entropy(self, *, dense: bool) -> float:
        """About how many bits a coded symbol takes: of Gaussian values, or of the largest 1 in 64 of them."""

    @abstractmethod
    def error_bound(self, count: int, alike: int | None) -> float:
        """No finite values of 2^-60 to 2^100 or 0 have |decoded - values| / |values| (Euclidean) above this."""

    @abstractmethod
    def quantise(self, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Finite float32 (count,) to levels (count,) and float32 scales (blocks, columns)."""

    def dequantise(self, levels: Tensor, scales: Tensor) -> Tensor:
        """float32 (count,); the same bits on every device."""
        if not self.scale_columns:
            return self.values_at(levels, [])
        table = blocked(levels, len(scales))
        values = torch.empty(table.shape, dtype=torch.float32, device=levels.device)
        step = slab_rows(table)
        for top in range(0, len(table), step):
            rows = slice(top, top + step)
            values[rows] = self.values_at(table[rows], list(scales[rows].T[:, :, None]))
        return values.view(-1)[: len(levels)]

    @abstractmethod
    def values_at(self, levels: Tensor, scales: list[Tensor]) -> Tensor:
        """Elementwise: each column of scales has the levels' shape or broadcasts to it."""


FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# float16 reaches from 2^-24 to 2^16 only: each block of values is moved there by a power of two.
_BLOCK = {"fp32": 0, "bf16": 0, "fp16": 512}
_TOP_EXPONENT = 15
_SIGNIFICANT_BITS = {"fp32": 24, "bf16": 8, "fp16": 11}


@final
@dataclass(frozen=True, slots=True)
class Floats(Values):
    """The values themselves at a float's precision; for bf16, what is too large becomes its largest number."""

    name: str

    @property
    def level_dtype(self) -> torch.dtype:  # type: ignore[override]
        return FLOATS[self.name]

    @property
    def level_bits(self) -> int:  # type: ignore[override]
        return 8 * self.level_dtype.itemsize

    @property
    def symbol_bits(self) -> int:  # type: ignore[override]
        """The exponent, and for fp16 three bits of the mantissa."""
        return 8

    @property
    def scale_columns(self) -> int:  # type: ignore[override]
        return 1 if _BLOCK[self.name] else 0

    @property
    def scale_mantissa(self) -> int:  # type: ignore[override]
        return 0

    def blocks(self, count: int, alike: int | None) -> int:
        return ceil(count / _BLOCK[self.name]) if _BLOCK[self.name] else 0

    def symbol_entropy(self, *, dense: bool) -> float:
        exponent = 2.55 if dense else 0.05
        return exponent if self.name != "fp16" else exponent + (2.94 if dense else 2.34)

    def error_bound(self, count: int, alike: int | None) -> float:
        return 0.0 if self.name == "fp32" else 2.0 ** -_SIGNIFICANT_BITS[self.name] * 1.001

    def quantise(self, values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        if not self.scale_columns:
            bound = torch.finfo(self.level_dtype).max
            return values.clamp(-bound, bound).to(self.level_dtype), values.new_zeros(blocks, 0)
        table = blocked(values, blocks)
        high = table.abs().amax(dim=1, keepdim=True) if blocks else table.new_zeros(0, 1)
        scales = decode_scales(encode_scales(high * 2.0**-_TOP_EXPONENT, 0, "up"), 0)
        # A scale of zero has only values below 2^-64, which are zero then.
        levels = table * torch.where(scales > 0, 1 / scales, torch.zeros_like(scales))
        levels = levels.clamp_(-(2.0**_TOP_EXPONENT), 2.0**_TOP_EXPONENT)
        return levels.to(self.level_dtype).view(-1)[: len(values)], scales

    def values_at(self, levels: Tensor, scales: list[Tensor]) -> Tensor:
        floats = levels.to(torch.float32)
        return floats * scales[0] if scales else floats

    def __str__(self) -> str:
        return self.name


def blocked(values: Tensor, blocks: int) -> Tensor:
    """(count,) as (blocks, length) with equal lengths; the last value fills up the last block, which is never empty."""
    if blocks == 0:
        return values.new_zeros(0, 0)
    length = ceil(len(values) / blocks)
    missing = blocks * length - len(values)
    return (torch.cat([values, values[-1:].expand(missing)]) if missing else values).view(blocks, length)


def slab_rows(table: Tensor) -> int:
    """How many rows of a table to work on at once."""
    return max(1, slab_elements(table.device) // max(1, table.shape[1]))
