"""Compressing many small tensors together: the same packets as one by one, in a tenth of the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from compression.seam import Packet
from compression.select import TopK, largest
from compression.slabs import slab_elements
from compression.transform import Transform
from compression.values import Values

SMALL = 1 << 16
"""Elements: up to this, a tensor costs more for its calls than for its size."""


def batches(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names in order, cut so that what is compressed together fits a cache; alone what is large or no float."""
    cut: list[list[str]] = []
    room, device = 0, torch.device("meta")
    for name in sorted(tensors):
        tensor = tensors[name]
        alone = tensor.numel() > SMALL or not tensor.dtype.is_floating_point
        if not cut or alone or tensor.numel() > room or tensor.device != device:
            cut.append([])
            room, device = 2 * slab_elements(tensor.device), tensor.device
        cut[-1].append(name)
        room = 0 if alone else room - tensor.numel()
    return cut


def compress_together(
    tensors: Sequence[Tensor], transform: Transform, selection: TopK, values: Values
) -> list[Packet] | None:
    """None when some tensor is not finite: who compresses one by one finds out which."""
    coefficients = [transform.forward(tensor) for tensor in tensors]
    flat = torch.cat(coefficients)
    if flat.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(flat))).all()):
        return None
    starts = [0, *accumulate(map(len, coefficients))]
    positions = _select(flat, starts, selection)
    kept = flat[positions]
    bounds = torch.searchsorted(positions, torch.tensor(starts, device=flat.device)).tolist()
    counts = [end - begin for begin, end in pairwise(bounds)]
    rows = [values.blocks(count, selection.alike) for count in counts]
    levels, scales = _quantise(list(kept.split_with_sizes(counts)), rows, values)
    own = [part - start for part, start in zip(positions.split_with_sizes(counts), starts, strict=False)]
    return [Packet(*parts) for parts in zip(own, levels, scales, strict=True)]


def _select(flat: Tensor, starts: list[int], selection: TopK) -> Tensor:
    """Chunks of one length and number of values are the rows of one table."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}  # To where rows begin, and how many follow.
    for start, end in pairwise(starts):
        chunks = selection.chunks(end - start)
        assert chunks is not None
        if chunks.count > 1:
            groups.setdefault((chunks.length, chunks.kept), []).append((start, chunks.count - 1))
        if chunks.count:
            tail = start + (chunks.count - 1) * chunks.length
            groups.setdefault((chunks.tail, chunks.kept_tail), []).append((tail, 1))
    found = [torch.zeros(0, dtype=torch.int64, device=flat.device)]
    for (length, kept), runs in groups.items():
        table = torch.cat([flat[start : start + count * length].view(count, length) for start, count in runs])
        places = largest(table.abs_(), kept)
        row = places // length
        begins = [start + length * i for start, count in runs for i in range(count)]
        found.append(torch.tensor(begins, device=flat.device)[row] + places - row * length)
    return torch.cat(found).sort().values


def _quantise(parts: list[Tensor], rows: list[int], values: Values) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks of one length from all tensors at once; a tensor whose last block is shorter alone."""
    groups: dict[int, list[int]] = {}
    for place, (part, blocks) in enumerate(zip(parts, rows, strict=True)):
        length = len(part) // blocks if blocks and len(part) % blocks == 0 else -1 - place
        groups.setdefault(length, []).append(place)
    levels: dict[int, Tensor] = {}
    scales: dict[int, Tensor] = {}
    for places in groups.values():
        own = [rows[place] for place in places]
        joined = values.quantise(torch.cat([parts[place] for place in places]), sum(own))
        sizes = [len(parts[place]) for place in places]
        levels.update(zip(places, joined[0].split_with_sizes(sizes), strict=True))
        scales.update(zip(places, joined[1].split_with_sizes(own), strict=True))
    order = range(len(parts))
    return [levels[place] for place in order], [scales[place] for place in order]
