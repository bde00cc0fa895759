"""Scales as small integers: a float's exponent and the first bits of its mantissa, so that nothing is computed."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Scales lie in [2^-80, 2^100] or are zero: no level times a scale is a subnormal or infinite float32.
SCALE_MAX = 2.0**100
Towards = Literal["near", "up", "down"]
_FIELD_MIN = 127 - 80
_FIELD_MAX = 127 + 100


def scale_code_max(mantissa: int) -> int:
    """The code of 2^100 with `mantissa` bits of mantissa; codes are 0 (zero) to this."""
    return ((_FIELD_MAX - _FIELD_MIN) << mantissa) + 1


def encode_scales(scales: Tensor, mantissa: int, towards: Towards = "near") -> Tensor:
    """Non-negative finite float32 to int64 codes; a scale too small is zero, one too large the largest."""
    drop = 23 - mantissa
    add = {"near": 1 << (drop - 1), "up": (1 << drop) - 1, "down": 0}[towards]
    codes = ((scales.view(torch.int32).to(torch.int64) + add) >> drop) - (_FIELD_MIN << mantissa) + 1
    return codes.clamp_(0, scale_code_max(mantissa))


def decode_scales(codes: Tensor, mantissa: int) -> Tensor:
    """float32; codes in 0 .. `scale_code_max`."""
    bits = (codes - 1 + (_FIELD_MIN << mantissa)) << (23 - mantissa)
    scales = bits.to(torch.int32).view(torch.float32)
    return torch.where(codes > 0, scales, torch.zeros_like(scales))
