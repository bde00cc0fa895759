"""The inverse DCT in integers: equal bits whatever the order of the sums, from dense tiles or from a few coefficients.

Each tile is scaled by a power of two and rounded to integers |q| <= 2^24; the basis is cosines x 2^22 rounded. Both
products then only ever add integers, and `_assert_exact` holds every partial sum below 2^53, where float64 addition is
exact, hence associative: neither thread count nor blocking nor library nor fused multiply-add can change a bit. That
also makes it safe to leave out zeros, and to multiply by powers of two wherever it is cheapest.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compression.cosines import BASIS_BITS, integer_basis
from compression.slabs import positions, ranks

COEFFICIENT_BITS = 24
# Tiles whose largest coefficient is below 2^-80 come back as zeros, so that no result is a subnormal float32, which
# some devices flush to zero and others do not.
_EXPONENT_MIN = -79
# Above this share of a tile's rows, leaving out empty ones costs more than it saves.
_DENSE_SHARE = 0.75


def inverse_tiles(tiles: Tensor) -> Tensor:
    """(tiles, height, width) float32 coefficients to elements: float64 that rounds to float32 once, when copied."""
    row_maxima = tiles.abs().amax(dim=2)
    exponent = (row_maxima.amax(dim=1).view(torch.int32) >> 23) - 126  # The tile is below 2^exponent.
    occupied = (row_maxima > 0) & (exponent >= _EXPONENT_MIN)[:, None]
    rows_max = int(occupied.sum(dim=1).max()) if len(tiles) else 0
    if rows_max == 0:
        return torch.zeros_like(tiles)
    if rows_max <= tiles.shape[1] * _DENSE_SHARE:
        return _inverse_rows(tiles, exponent, occupied, rows_max)
    return inverse_dense(tiles, exponent)


def inverse_dense(tiles: Tensor, exponent: Tensor) -> Tensor:
    """All rows of all tiles; `exponent` (tiles,): each tile is below 2^exponent."""
    count, height, width = tiles.shape
    _assert_exact(height, width)
    rows = _inverse_width((tiles * _upscale(exponent).view(-1, 1, 1)).view(-1, width)).view(count, height, width)
    rows.mul_(_downscale(exponent, height).view(-1, 1, 1))
    return torch.matmul(_integer(height, tiles.device).T, rows) if height > 1 else rows


def _inverse_rows(tiles: Tensor, exponent: Tensor, occupied: Tensor, rows_max: int) -> Tensor:
    """The same from the occupied rows alone: (tiles, height) says which; no tile has more than `rows_max`."""
    count, height, width = tiles.shape
    _assert_exact(height, width)
    chosen = positions(occupied)
    tile = chosen // height
    rows = _inverse_width(tiles.view(-1, width)[chosen] * _upscale(exponent)[tile, None])
    rows.mul_(_downscale(exponent, height)[tile, None])
    return _expanded(rows, tile, chosen % height, (count, height, rows_max))


def _inverse_width(scaled: Tensor) -> Tensor:
    """The pass along the width of rows scaled to |q| <= 2^24; integers as float64."""
    integers = scaled.round_().to(torch.float64)
    width = scaled.shape[1]
    if width == 1:
        return integers
    return torch.mm(integers, _fractions(width, scaled.device)).round_()


def _expanded(rows: Tensor, tile: Tensor, row: Tensor, extent: tuple[int, int, int]) -> Tensor:
    """The pass along the height: rows of the given tiles, at most `rows_max` a tile, to (tiles, height, width)."""
    count, height, rows_max = extent
    width = rows.shape[1]
    if rows_max > height * _DENSE_SHARE:
        dense = rows.new_zeros(count * height, width).index_copy_(0, tile * height + row, rows)
        return torch.matmul(_integer(height, rows.device).T, dense.view(count, height, width))
    place = tile * rows_max + ranks(tile, torch.bincount(tile, minlength=count))
    table = rows.new_zeros(count * rows_max, width).index_copy_(0, place, rows).view(count, rows_max, width)
    basis = rows.new_zeros(count * rows_max, height).index_copy_(0, place, _integer(height, rows.device)[row])
    return torch.bmm(basis.view(count, rows_max, height).transpose(1, 2), table)


@final
class SparseTiles:
    """Few coefficients of many tiles, on a CPU, height and width above 1: `inverse` costs one dense product a tile.

    `indices`: ascending positions in the flat tiles; `values`: float32.
    """

    def __init__(self, indices: Tensor, values: Tensor, height: int, width: int) -> None:
        _assert_exact(height, width)
        self._height, self._width = height, width
        places, numbers = indices.numpy(), values.numpy()
        rows = places // width
        tiles = rows // height
        begun = _runs(tiles)
        largest = np.maximum.reduceat(np.abs(numbers), begun) if len(begun) else numbers
        exponent = torch.from_numpy((largest.view(np.int32) >> 23) - 126)
        runs = torch.from_numpy(np.diff(begun, append=len(places)))
        self._scaled = (values * torch.repeat_interleave(_upscale(exponent), runs)).round_().to(torch.float64)
        self._column = torch.from_numpy(places - rows * width)
        # The first coefficient of each occupied row makes the row; the few others are added to it.
        starts = _runs(rows)
        others = np.flatnonzero(np.diff(rows, prepend=-1) == 0)
        self._first = torch.from_numpy(starts)
        self._other = torch.from_numpy(others)
        self._other_row = torch.from_numpy(np.searchsorted(starts, others, side="right") - 1)
        self._row = torch.from_numpy(rows[starts])
        self._downscale = torch.repeat_interleave(_downscale(exponent, height), runs)[self._first]
        self._scratch = (torch.zeros(0), torch.zeros(0))

    def inverse(self, first: int, count: int) -> Tensor:
        """Tiles `first` to `first + count` as `inverse_tiles` gives them, to be copied before the next call."""
        height, width = self._height, self._width
        if self._scratch[0].shape != (count, height, width):
            made = [torch.empty(count, height, width, dtype=torch.float64) for _ in range(2)]
            self._scratch = (made[0], made[1])
        dense, result = self._scratch
        dense.zero_()
        low, high = np.searchsorted(self._row.numpy(), [first * height, (first + count) * height]).tolist()
        begin, end = np.searchsorted(self._other_row.numpy(), [low, high]).tolist()
        rows = self._terms(self._first[low:high])
        rows.index_add_(0, self._other_row[begin:end] - low, self._terms(self._other[begin:end]))
        rows.round_().mul_(self._downscale[low:high, None])
        dense.view(-1, width).index_copy_(0, self._row[low:high] - first * height, rows)
        basis = _integer(height, dense.device).T.expand(count, height, height)
        return torch.bmm(basis, dense, out=result)

    def _terms(self, chosen: Tensor) -> Tensor:
        return _fractions(self._width, chosen.device)[self._column[chosen]].mul_(self._scaled[chosen, None])


def _runs(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each run of equal numbers begins."""
    return np.flatnonzero(np.diff(groups, prepend=-1))


def _upscale(exponent: Tensor) -> Tensor:
    """Only moves exponents; a product that would be subnormal is far below 1/2 and rounds to zero either way."""
    return _power_of_two(COEFFICIENT_BITS - exponent.clamp_min(_EXPONENT_MIN))


def _downscale(exponent: Tensor, height: int) -> Tensor:
    """float64: applied before the last sums, exactly, so that they round once; zero for a tile too small.

    Results are multiples of at least 2^-126, so none of them is a subnormal float32.
    """
    bits = COEFFICIENT_BITS + (BASIS_BITS if height > 1 else 0)
    scale = _power_of_two((exponent - bits).clamp_min(-126))
    return torch.where(exponent >= _EXPONENT_MIN, scale, torch.zeros_like(scale)).to(torch.float64)


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
def _fractions(length: int, device: torch.device) -> Tensor:
    """The basis times 2^-22: sums are the integers' times that, exactly, and a pass is saved."""
    return _integer(length, device) * 2.0**-BASIS_BITS


@lru_cache(maxsize=1024)
def _integer(length: int, device: torch.device) -> Tensor:
    return torch.tensor(integer_basis(length), dtype=torch.float64, device=device)
