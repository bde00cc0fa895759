"""Merging the flat coefficients of several contributions, elementwise, without making each of them dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from compression.seam import Flat

PIECE = 1 << 16
"""Coefficients merged at a time where all are dense, so that all members' fit a cache."""
# With more values than one in so many, dense pieces are faster; on an accelerator always.
_SPARSE = 4


def merge_flat(parts: Sequence[Flat], merge: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """What `merge` makes of the parts' dense coefficients, bit for bit. `merge` takes tensors of one shape, one a part,
    and must be elementwise: it sees only places where somebody sent something, and once a place where nobody did.
    """
    size = parts[0].size
    places = [part.positions.numpy() for part in parts if part.positions is not None and part.positions.is_cpu]
    if len(places) < len(parts) or _SPARSE * sum(map(len, places)) > size:
        return _merge_pieces(parts, merge)
    ordered = np.sort(np.concatenate(places))
    union = ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]
    rank = np.empty(size, dtype=np.int32)  # Only read where it is written.
    rank[union] = np.arange(len(union), dtype=np.int32)
    rows = []
    for part, place in zip(parts, places, strict=True):
        row = np.zeros(len(union), dtype=np.float32)
        row[rank[place]] = part.values.numpy()
        rows.append(torch.from_numpy(row))
    nobody = merge([torch.zeros(1) for _ in parts])
    merged = np.full(size, nobody.numpy()[0], dtype=np.float32)
    merged[union] = merge(rows).numpy()
    return torch.from_numpy(merged)


def split_flat(part: Flat, sizes: Sequence[int]) -> list[Flat]:
    """The coefficients of each tensor, of so many each, in order."""
    if part.positions is None:
        return [Flat(None, values, len(values)) for values in part.values.split_with_sizes(list(sizes))]
    starts = [0, *accumulate(sizes)]
    bounds = torch.searchsorted(part.positions, torch.tensor(starts, device=part.positions.device)).tolist()
    return [
        Flat(part.positions[low:high] - start, part.values[low:high], size)
        for start, size, low, high in zip(starts, sizes, bounds, bounds[1:], strict=False)
    ]


def _merge_pieces(parts: Sequence[Flat], merge: Callable[[list[Tensor]], Tensor]) -> Tensor:
    merged = torch.empty(parts[0].size, dtype=torch.float32, device=parts[0].values.device)
    pieces = zip(*(part.pieces(PIECE) for part in parts), strict=True)
    for target, values in zip(torch.split(merged, PIECE), pieces, strict=False):
        target.copy_(merge(list(values)))
    return merged
