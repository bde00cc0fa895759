"""The models by name: build one with the same initial bits on every machine, and its loss."""

from __future__ import annotations

import hashlib
import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.gpt import GPT, ModelConfig

MODELS = {
    "gpt-nano": ModelConfig(layers=3, width=64, heads=2, context=64),
    "gpt-mini": ModelConfig(layers=5, width=128, heads=4, context=128),
    "gpt-small": ModelConfig(layers=8, width=320, heads=5, context=256),
}
"""About 0.18, 1.05 and 10 million parameters."""

_ZERO_AT_START = ("attention_out.weight", "mlp_out.weight", "head.weight")


def build_model(name: str, seed: int) -> nn.Module:
    """The named model on the CPU, float32; raises `ValueError` for an unknown name.

    The weights are a function of (name, seed) alone, bit for bit, on any machine, torch version and thread count:
    every weight is an integer of a hash stream times one float32 constant, a single rounding. No generator of torch
    is used: `normal_` goes through log and cos, whose last bits depend on the vector unit.
    """
    model = GPT(model_config(name))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(parameter_name, parameter.shape, seed))
    return model


def model_config(name: str) -> ModelConfig:
    """Raises `ValueError` naming the models there are."""
    if name not in MODELS:
        raise ValueError(f"model = {name!r}: must be one of {', '.join(sorted(MODELS))}")
    return MODELS[name]


def loss_fn(model: nn.Module, batch_BT1: Tensor) -> Tensor:
    """Mean cross-entropy in nats a byte; `batch_BT1` (B, T + 1) int64 holds the inputs and, one later, the targets."""
    logits_BTV = model(batch_BT1[:, :-1])
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch_BT1[:, 1:].flatten())


def initial_weight(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Uniform with standard deviation 1 / sqrt(fan-in); embeddings with 1; zero where a branch joins the stream."""
    if name.endswith(_ZERO_AT_START):
        return torch.zeros(shape)
    deviation = 1.0 if name.startswith("embedding") else 1 / math.sqrt(shape[-1])
    return uniform_weights(f"{seed}/{name}", shape) * torch.tensor(deviation * math.sqrt(3.0), dtype=torch.float32)


def uniform_weights(label: str, shape: torch.Size) -> Tensor:
    """Float32 in (-1, 1), exact multiples of 2^-24, symmetric about zero, from SHAKE-128 of the label."""
    stream = bytearray(hashlib.shake_128(label.encode()).digest(4 * shape.numel()))
    integers = torch.frombuffer(stream, dtype=torch.int32)
    assert sys.byteorder == "little"
    return ((integers >> 8).float() + 0.5).mul(2.0**-23).view(shape)
