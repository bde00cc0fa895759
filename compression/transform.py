"""Transforms: a tensor to flat coefficients and back, the way back with the same bits on every machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import final

import torch
from torch import Tensor

from compression.cosines import real_basis
from compression.exact import SparseTiles, inverse_tiles
from compression.slabs import empty, slab_elements

DCT_LENGTH_MAX = 128
# The way back has float64 and two buffers in the cache.
_INVERSE_SHARE = 2


class Transform(ABC):
    """An invertible linear map; `size` coefficients stand for a tensor of `shape`."""

    @abstractmethod
    def size(self, shape: tuple[int, ...]) -> int:
        """The number of coefficients: at least the number of elements; zero for an empty tensor."""

    @abstractmethod
    def forward(self, tensor: Tensor) -> Tensor:
        """Flat float32 coefficients, shape (size,)."""

    @abstractmethod
    def pieces(self, tensor: Tensor, multiple: int) -> Iterator[tuple[int, Tensor]]:
        """The same in pieces that fit a cache, each with its start, a multiple of `multiple`; perhaps all in one."""

    @abstractmethod
    def inverse(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A float32 tensor of `shape`; bit for bit the same on every device and thread count."""

    @abstractmethod
    def inverse_sparse(self, indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The same bits as `inverse` of coefficients that are `values` at ascending `indices` and zero elsewhere."""

    @abstractmethod
    def inverse_all(self, coefficients: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """The same bits as `inverse` of each tensor's part; small tensors with tiles of one size together."""

    @property
    @abstractmethod
    def error_bound(self) -> float:
        """Rounding alone: |inverse(forward(tensor)) - tensor| is at most this times |tensor| (Euclidean)."""


@final
@dataclass(frozen=True, slots=True)
class Identity(Transform):
    """The elements themselves."""

    def size(self, shape: tuple[int, ...]) -> int:
        return prod(shape)

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(torch.float32).reshape(-1)

    def pieces(self, tensor: Tensor, multiple: int) -> Iterator[tuple[int, Tensor]]:
        flat = self.forward(tensor)
        step = max(1, slab_elements(tensor.device) // max(1, multiple)) * max(1, multiple)
        for start in range(0, max(1, len(flat)), step):
            yield start, flat[start : start + step]

    def inverse(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        return coefficients.reshape(shape)

    def inverse_sparse(self, indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        flat = torch.zeros(prod(shape), dtype=torch.float32, device=values.device)
        return flat.index_copy_(0, indices, values).view(shape)

    def inverse_all(self, coefficients: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        parts = coefficients.split_with_sizes([prod(shape) for shape in shapes]) if shapes else ()
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def error_bound(self) -> float:
        return 0.0

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
        coefficients = empty((tiling.size,), tensor.device)
        for start, piece in self._slabs(tensor, tiling):
            coefficients[start : start + len(piece)] = piece
        return coefficients

    def pieces(self, tensor: Tensor, multiple: int) -> Iterator[tuple[int, Tensor]]:
        tiling = Tiling.of(tuple(tensor.shape), self.length)
        if not tiling.size or (tiling.height * tiling.width) % multiple:
            yield 0, self.forward(tensor)
        else:
            yield from self._slabs(tensor, tiling)

    def _slabs(self, tensor: Tensor, tiling: Tiling) -> Iterator[tuple[int, Tensor]]:
        matrix = tiling.pad(tensor.detach().reshape(tiling.rows, tiling.columns))
        for start, down, across in tiling.slabs(slab_elements(tensor.device)):
            tiles = _forward_tiles(tiling.cut(matrix, down, across).to(torch.float32))
            yield start * tiling.height * tiling.width, tiles.reshape(-1)

    def inverse(self, coefficients: Tensor, shape: tuple[int, ...]) -> Tensor:
        tiling = Tiling.of(shape, self.length)
        device = coefficients.device
        if device.type == "mps":  # It has no float64.
            return self.inverse(coefficients.cpu(), shape).to(device)
        tiles = coefficients.view(-1, tiling.height, tiling.width)
        return self._assembled(lambda first, count: inverse_tiles(tiles[first : first + count]), tiling, shape, device)

    def inverse_sparse(self, indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
        tiling = Tiling.of(shape, self.length)
        if values.device.type != "cpu" or min(tiling.height, tiling.width) == 1:
            dense = torch.zeros(tiling.size, dtype=torch.float32, device=values.device)
            return self.inverse(dense.index_copy_(0, indices, values), shape)
        sparse = SparseTiles(indices, values, tiling.height, tiling.width)
        return self._assembled(sparse.inverse, tiling, shape, values.device)

    def inverse_all(self, coefficients: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        tilings = [Tiling.of(shape, self.length) for shape in shapes]
        parts = coefficients.split_with_sizes([tiling.size for tiling in tilings]) if shapes else ()
        if coefficients.device.type == "mps":
            return [part.to(coefficients.device) for part in self.inverse_all(coefficients.cpu(), shapes)]
        groups: dict[tuple[int, int], list[int]] = {}
        restored: dict[int, Tensor] = {}
        for place, tiling in enumerate(tilings):
            if tiling.size > slab_elements(coefficients.device):
                restored[place] = self.inverse(parts[place], shapes[place])
            else:
                groups.setdefault((tiling.height, tiling.width), []).append(place)
        for (height, width), places in groups.items():
            tiles = torch.cat([parts[place] for place in places]).view(-1, height, width)
            joined = self._assembled_tiles(tiles)
            first = 0
            for place in places:
                tiling = tilings[place]
                count = tiling.down * tiling.across
                matrix = empty(tiling.padded, coefficients.device)
                whole = tiling.cut(matrix, slice(None), slice(None))
                whole.copy_(joined[first : first + count].view(whole.shape))
                restored[place] = matrix[: tiling.rows, : tiling.columns].reshape(shapes[place])
                first += count
        return [restored[place] for place in range(len(shapes))]

    def _assembled_tiles(self, tiles: Tensor) -> Tensor:
        count, height, width = tiles.shape
        joined = empty(tuple(tiles.shape), tiles.device)
        step = max(1, slab_elements(tiles.device) // _INVERSE_SHARE // (height * width))
        for first in range(0, count, step):
            joined[first : first + step] = inverse_tiles(tiles[first : first + step])
        return joined

    def _assembled(
        self, inverse: Callable[[int, int], Tensor], tiling: Tiling, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        """`inverse(first, count)` gives that many tiles."""
        matrix = empty(tiling.padded, device)
        for start, down, across in tiling.slabs(slab_elements(device) // _INVERSE_SHARE):
            target = tiling.cut(matrix, down, across)
            target.copy_(inverse(start, target.shape[0] * target.shape[1]).view(target.shape))
        return matrix[: tiling.rows, : tiling.columns].reshape(shape)

    @property
    def error_bound(self) -> float:
        """float32 sums of 64 terms each way forward, and coefficients rounded to 2^-24 of their tile's largest."""
        return 2e-5

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

    def slabs(self, elements: int) -> Iterator[tuple[int, slice, slice]]:
        """Tiles that follow each other, about `elements` elements: the first's number, ranges down and across."""
        tiles = max(1, elements // (self.height * self.width))
        wide = min(self.across, tiles)
        high = max(1, tiles // max(1, wide))
        for top in range(0, self.down, high):
            for left in range(0, self.across, wide):
                yield top * self.across + left, slice(top, top + high), slice(left, left + wide)


def _forward_tiles(tiles: Tensor) -> Tensor:
    """(..., height, width) float32 to coefficients; ordinary float32 products, whose last bits may differ by device."""
    height, width = tiles.shape[-2:]
    if width > 1:
        tiles = torch.mm(tiles.reshape(-1, width), _real(width, tiles.device).T).view(tiles.shape)
    return torch.matmul(_real(height, tiles.device), tiles) if height > 1 else tiles


@lru_cache(maxsize=1024)
def _real(length: int, device: torch.device) -> Tensor:
    return torch.tensor(real_basis(length), dtype=torch.float32, device=device)
