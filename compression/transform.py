"""Transforms: a tensor to flat coefficients and back, the way back with the same bits on every machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil, prod
from typing import final

import torch
from torch import Tensor

from compression.cosines import BASIS_BITS, integer_basis, real_basis
from compression.slabs import positions, ranks, slab_elements

DCT_LENGTH_MAX = 128
COEFFICIENT_BITS = 24
# Tiles whose largest coefficient is below 2^-80 come back as zeros, so that no result is a subnormal float32, which
# some devices flush to zero and others do not.
_FIELD_MIN = 127 - 80


class Transform(ABC):
    """An invertible linear map; `size` coefficients stand for a tensor of `shape`."""

    @abstractmethod
    def size(self, shape: tuple[int, ...]) -> int:
        """The number of coefficients: at least the number of elements; zero for an empty tensor."""

    @abstractmethod
    def forward(self, tensor: Tensor) -> Tensor:
        """Flat float32 coefficients, shape (size,)."""

    @abstractmethod
    def inverse(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor of `shape`; bit for bit the same on every device and thread count."""


@final
@dataclass(frozen=True, slots=True)
class Identity(Transform):
    """The elements themselves."""

    def size(self, shape: tuple[int, ...]) -> int:
        return prod(shape)

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.float32).reshape(-1)

    def inverse(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        return coefficients.reshape(shape)

    def __str__(self) -> str:
        return "identity"


@final
@dataclass(frozen=True, slots=True)
class Dct(Transform):
    """The orthonormal DCT-II of tiles of at most `length` x `length` (arXiv 2411.19870 uses 64).

    A tensor is seen as a matrix: its first axis against all others; with at most one axis longer than 1, as one row.
    Each axis is cut into as few equal tiles as fit the length, so at most one element a tile is padding, whatever
    the axis (50,257 gives 786 tiles of 64). Coefficients lie tile by tile, row by row.
    """

    length: int

    def __post_init__(self) -> None:
        if not 2 <= self.length <= DCT_LENGTH_MAX:
            raise ValueError(f"dct({self.length}): the length must be from 2 to {DCT_LENGTH_MAX}")

    def size(self, shape: tuple[int, ...]) -> int:
        return Tiling.of(shape, self.length).size

    def forward(self, tensor: Tensor) -> Tensor:
        tiling = Tiling.of(tuple(tensor.shape), self.length)
        tensor = tensor.detach()
        matrix = tiling.pad(tensor.reshape(tiling.rows, tiling.columns))
        tiles = torch.empty(tiling.tiles, device=tensor.device, dtype=torch.float32)
        for down, across in tiling.slabs(slab_elements(tensor.device)):
            tiles[down, across] = _forward_tiles(tiling.cut(matrix, down, across).to(torch.float32))
        return tiles.view(-1)

    def inverse(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        tiling = Tiling.of(shape, self.length)
        device = coefficients.device
        if device.type == "mps":  # It has no float64.
            return self.inverse(coefficients.cpu(), shape).to(device)
        tiles = coefficients.view(tiling.tiles)
        matrix = torch.empty(tiling.padded, device=device, dtype=torch.float32)
        for down, across in tiling.slabs(slab_elements(device)):
            slab = tiles[down, across]
            restored = inverse_tiles(slab.reshape(-1, tiling.height, tiling.width))
            tiling.cut(matrix, down, across).copy_(restored.view(slab.shape))
        return matrix[: tiling.rows, : tiling.columns].reshape(shape)

    def __str__(self) -> str:
        return f"dct({self.length})"


@final
@dataclass(frozen=True, slots=True)
class Tiling:
    """How a matrix of `rows` x `columns` is cut: `down` x `across` tiles of `height` x `width`."""

    rows: int
    columns: int
    height: int
    width: int
    down: int
    across: int

    @staticmethod
    def of(shape: tuple[int, ...], length: int) -> Tiling:
        axes = [axis for axis in shape if axis != 1]
        rows, columns = (axes[0], prod(axes[1:])) if len(axes) > 1 else (1, prod(axes))
        if rows * columns == 0:
            return Tiling(0, 0, 1, 1, 0, 0)
        down, across = ceil(rows / length), ceil(columns / length)
        return Tiling(rows, columns, ceil(rows / down), ceil(columns / across), down, across)

    @property
    def tiles(self) -> tuple[int, int, int, int]:
        return self.down, self.across, self.height, self.width

    @property
    def size(self) -> int:
        return self.down * self.across * self.height * self.width

    @property
    def padded(self) -> tuple[int, int]:
        return self.down * self.height, self.across * self.width

    def pad(self, matrix: Tensor) -> Tensor:
        rows, columns = self.padded
        if (rows, columns) == (self.rows, self.columns):
            return matrix
        return torch.nn.functional.pad(matrix, (0, columns - self.columns, 0, rows - self.rows))

    def cut(self, matrix: Tensor, down: slice, across: slice) -> Tensor:
        """A view of the padded matrix as tiles: (down, across, height, width)."""
        return matrix.view(self.down, self.height, self.across, self.width).permute(0, 2, 1, 3)[down, across]

    def slabs(self, elements: int) -> Iterator[tuple[slice, slice]]:
        """Ranges of tiles, down and across, of about `elements` elements."""
        tiles = max(1, elements // (self.height * self.width))
        wide = min(self.across, tiles)
        high = max(1, tiles // max(1, wide))
        for top in range(0, self.down, high):
            for left in range(0, self.across, wide):
                yield slice(top, top + high), slice(left, left + wide)


def _forward_tiles(tiles: Tensor) -> Tensor:
    """(..., height, width) float32 to coefficients; ordinary float32 products, whose last bits may differ by device."""
    height, width = tiles.shape[-2:]
    if width > 1:
        tiles = torch.mm(tiles.reshape(-1, width), _real(width, tiles.device).T).view(tiles.shape)
    return torch.matmul(_real(height, tiles.device), tiles) if height > 1 else tiles


def inverse_tiles(tiles: Tensor) -> Tensor:
    """(tiles, height, width) float32 coefficients to elements, exactly: equal bits whatever the order of the sums.

    Each tile is scaled by a power of two and rounded to integers |q| <= 2^24; the basis is cosines x 2^22 rounded.
    Both products then only ever add integers, and `_assert_exact` holds every partial sum below 2^53, where float64
    addition is exact, hence associative: neither thread count nor blocking nor fused multiply-add can change a bit.
    That also makes it safe to leave out rows of zeros where few are set, as after a top-k.
    """
    row_maxima = tiles.abs().amax(dim=2)
    field = row_maxima.amax(dim=1).view(torch.int32) >> 23  # The biased exponent: the tile < 2^(field - 126).
    exponent = (field - 126).view(-1, 1, 1)
    occupied = (row_maxima > 0) & (field >= _FIELD_MIN)[:, None]
    rows_max = int(occupied.sum(dim=1).max()) if len(tiles) else 0
    if rows_max == 0:
        return torch.zeros_like(tiles)
    if rows_max <= tiles.shape[1] // 2:
        return _inverse_rows(tiles, exponent, occupied, rows_max)
    return inverse_dense(tiles, exponent)


def inverse_dense(tiles: Tensor, exponent: Tensor) -> Tensor:
    """All rows of all tiles; `exponent` (tiles, 1, 1): each tile is below 2^exponent."""
    count, height, width = tiles.shape
    _assert_exact(height, width)
    rows = _inverse_width((tiles * _upscale(exponent)).view(-1, width)).view(count, height, width)
    if height > 1:
        rows = torch.matmul(_integer(height, tiles.device).T, rows)
    return rows.to(torch.float32).mul_(_downscale(exponent, height))


def _inverse_rows(tiles: Tensor, exponent: Tensor, occupied: Tensor, rows_max: int) -> Tensor:
    """The same bits from the occupied rows alone: (tiles, height) says which; no tile has more than `rows_max`."""
    count, height, width = tiles.shape
    _assert_exact(height, width)
    chosen = positions(occupied)
    tile, row = chosen // height, chosen % height
    place = tile * rows_max + ranks(tile, occupied.sum(dim=1))
    rows = _inverse_width(tiles.view(-1, width)[chosen] * _upscale(exponent)[tile, 0])
    table = rows.new_zeros(count * rows_max, width).index_copy_(0, place, rows).view(count, rows_max, width)
    basis = rows.new_zeros(count * rows_max, height).index_copy_(0, place, _integer(height, tiles.device)[row])
    sums = torch.bmm(basis.view(count, rows_max, height).transpose(1, 2), table)
    return sums.to(torch.float32).mul_(_downscale(exponent, height))


def _inverse_width(scaled: Tensor) -> Tensor:
    """The pass along the width of rows scaled to |q| <= 2^24; integers as float64."""
    integers = scaled.round_().to(torch.float64)
    width = scaled.shape[1]
    if width == 1:
        return integers
    return torch.mm(integers, _integer(width, scaled.device)).mul_(2.0**-BASIS_BITS).round_()


def _upscale(exponent: Tensor) -> Tensor:
    """Only moves exponents; a product that would be subnormal is far below 1/2 and rounds to zero either way."""
    return _power_of_two(COEFFICIENT_BITS - exponent.clamp_min(_FIELD_MIN - 126))


def _downscale(exponent: Tensor, height: int) -> Tensor:
    """Applied to sums already rounded to float32: as no result is subnormal, the order makes no difference.

    Zero for a tile below the smallest exponent.
    """
    bits = COEFFICIENT_BITS + (BASIS_BITS if height > 1 else 0)
    scale = _power_of_two((exponent - bits).clamp_min(-126))
    return torch.where(exponent >= _FIELD_MIN - 126, scale, torch.zeros_like(scale))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32, from its bits: no `pow`, which a device may round. -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).view(torch.float32)


@cache
def _assert_exact(height: int, width: int) -> None:
    """The bound behind exactness. With L(n) = max_i sum_u |basis[u, i]| (at most 2^22 sqrt(2n) + n/2), the sums of
    the first pass are at most 2^24 L(width), its results at most 2^24 L(width) / 2^22 + 1, and the sums of the second
    pass at most that times L(height): 2^51.7 for 64 x 64 and below 2^53 up to 128 x 128.
    """
    first = 2**COEFFICIENT_BITS * _column_sum_max(width)
    second = (first // 2**BASIS_BITS + 1) * _column_sum_max(height)
    assert first < 2**53
    assert second < 2**53


@cache
def _column_sum_max(length: int) -> int:
    if length == 1:
        return 1 << BASIS_BITS
    basis = integer_basis(length)
    return max(sum(abs(row[i]) for row in basis) for i in range(length))


@lru_cache(maxsize=1024)
def _integer(length: int, device: torch.device) -> Tensor:
    return torch.tensor(integer_basis(length), dtype=torch.float64, device=device)


@lru_cache(maxsize=1024)
def _real(length: int, device: torch.device) -> Tensor:
    return torch.tensor(real_basis(length), dtype=torch.float32, device=device)
