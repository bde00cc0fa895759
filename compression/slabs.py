"""What transforms, selections and quantisers share: slabs that fit a cache, and finding set elements."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Slabs small enough for a CPU's second-level cache; an accelerator wants few large kernels.
_SLAB_CPU = 1 << 17
_SLAB_ACCELERATOR = 1 << 25


def slab_elements(device: torch.device) -> int:
    """About how many elements to work on at once."""
    return _SLAB_CPU if device.type == "cpu" else _SLAB_ACCELERATOR


def empty(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float32, not set. On a CPU from numpy, which asks for huge pages: half the time of first touching it."""
    if device.type == "cpu":
        return torch.from_numpy(np.empty(shape, dtype=np.float32))
    return torch.empty(shape, dtype=torch.float32, device=device)


def positions(mask: Tensor) -> Tensor:
    """Ascending flat positions (int64) of the set elements."""
    if mask.device.type == "cpu":  # numpy is about six times faster here.
        return torch.from_numpy(np.flatnonzero(mask.contiguous().numpy()))
    return mask.reshape(-1).nonzero().view(-1)


def ranks(group: Tensor, sizes: Tensor) -> Tensor:
    """For items sorted by `group`, with `sizes` items in each: the rank of each item within its group."""
    return torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]
