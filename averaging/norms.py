"""Euclidean norms with the same bits everywhere: the sum of squares is exact, so its order does not matter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 15
"""Squares summed at a time: few enough for a cache, and for 35 of the 53 bits of a float64 to be kept a pass."""
_ROOM_BITS = 17
"""Two to this is more than twice a chunk."""


def norm(values: Tensor) -> float:
    """|values| of finite float32: the root of the correctly rounded sum of squares.

    The same on every device and thread count, in any order of the values, and with any number of zeros among them.
    """
    return math.sqrt(
        math.fsum(part for chunk in torch.split(values.reshape(-1), _CHUNK) for part in _exact_parts(chunk))
    )


def weighted_median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The least value that, with all below it, has half of the weight; of two with equal weights the lower."""
    reached, half = 0, sum(weights)
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += 2 * weight
        if reached >= half:
            return value
    raise AssertionError("nothing has no median")


def _exact_parts(chunk: Tensor) -> list[float]:
    """Numbers whose sum is exactly that of the squares.

    A square of a float32 has 48 bits: exact as float64. Adding a large power of two and taking it away again cuts all
    squares at one bit (Rump's extraction); what is above it are multiples of one unit whose sum stays below 2^53 units,
    so no order of summation rounds. The rest goes through the same again, until nothing is left.
    """
    rest = (chunk.cpu() if chunk.device.type == "mps" else chunk).to(torch.float64)
    rest = rest * rest
    parts = []
    while rest.numel():
        largest = float(rest.abs().max())
        if largest == 0:
            break
        unit = math.ldexp(1.0, math.frexp(largest)[1] + _ROOM_BITS)
        high = (rest + unit) - unit
        parts.append(float(high.sum()))
        rest = rest - high
    return parts
