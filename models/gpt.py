"""A small modern byte-level GPT: pre-RMSNorm, rotary positions, QK-norm, squared ReLU, no biases, a head of its own.

Shapes are suffixes: B batch, T time, D width, V vocabulary, N heads, H head width, F width of the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What shapes a model. `context` is the longest input in bytes; `mlp_ratio` is F / D."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int = 256
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context", "vocabulary", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"model {name} = {getattr(self, name)}: must be at least 1")
        if self.width % (2 * self.heads) != 0:
            raise ValueError(f"model width = {self.width}: must be an even multiple of heads = {self.heads}")


@final
class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Only its weights are parameters; norms have no gains."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        cosine_TH, sine_TH = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cosine_TH", cosine_TH, persistent=False)
        self.register_buffer("sine_TH", sine_TH, persistent=False)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits (B, T, V) for int64 bytes (B, T), T at most `context`."""
        time = bytes_BT.shape[1]
        if time > self.config.context:
            raise ValueError(f"input of {time} bytes: the model's context is {self.config.context}")
        rotary = (self.get_buffer("cosine_TH")[:time], self.get_buffer("sine_TH")[:time])
        x_BTD: Tensor = rms_norm(self.embedding(bytes_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        logits_BTV: Tensor = self.head(rms_norm(x_BTD))
        return logits_BTV


@final
class Block(nn.Module):
    """Attention, then the MLP, each added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.width * config.mlp_ratio
        self.heads = config.heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, hidden, bias=False)
        self.mlp_out = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attend(rms_norm(x_BTD), rotary)
        hidden_BTF = F.relu(self.mlp_in(rms_norm(x_BTD))).square()
        out_BTD: Tensor = x_BTD + self.mlp_out(hidden_BTF)
        return out_BTD

    def attend(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        q_BNTH = rotate(rms_norm(self.split(self.query(x_BTD))), rotary)
        k_BNTH = rotate(rms_norm(self.split(self.key(x_BTD))), rotary)
        v_BNTH = self.split(self.value(x_BTD))
        mixed_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
        out_BTD: Tensor = self.attention_out(mixed_BNTH.transpose(1, 2).flatten(2))
        return out_BTD

    def split(self, x_BTD: Tensor) -> Tensor:
        batch, time, width = x_BTD.shape
        return x_BTD.view(batch, time, self.heads, width // self.heads).transpose(1, 2)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotate(x_BNTH: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: the two halves of a head are the coordinates of H / 2 planes, turned by their position."""
    cosine_TH, sine_TH = rotary
    left, right = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cosine_TH + torch.cat((-right, left), dim=-1) * sine_TH


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles_TH = torch.outer(torch.arange(context, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles_TH.cos().float(), angles_TH.sin().float()
