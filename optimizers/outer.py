"""Outer steps: from an anchor and the merged pseudo-gradient to the next anchor, the same bits at every peer."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from optimizers.schedule import Schedule, float32, integer_power
from optimizers.seam import OuterOptimizer, Tensors

CONSTANT = Schedule(kind="constant", warmup=0)


@dataclass(frozen=True, slots=True)
class OuterSettings:
    """`kind` and its numbers; those that a kind does not use are ignored. Weight decay is p *= 1 - lr * wd."""

    kind: str = "sgd"
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def validate(self, prefix: str = "outer") -> None:
        """Raises `ValueError` naming the setting and its value."""
        if self.kind not in OUTERS:
            raise ValueError(f"{prefix}.kind = {self.kind!r}: must be one of {', '.join(OUTERS)}")
        if not 0 < self.lr < 1e6:
            raise ValueError(f"{prefix}.lr = {self.lr}: must be above 0 and below 1e6")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{prefix}.{name} = {getattr(self, name)}: must be at least 0 and below 1")
        if not 0 <= self.weight_decay * self.lr < 1:
            raise ValueError(f"{prefix}.weight_decay = {self.weight_decay}: times lr it must be at least 0 and below 1")
        if not 1e-30 < self.eps < 1:
            raise ValueError(f"{prefix}.eps = {self.eps}: must be above 1e-30 and below 1")


def build_outer(settings: OuterSettings, schedule: Schedule = CONSTANT) -> OuterOptimizer:
    """The outer optimiser of `settings`, whose learning rate follows `schedule`."""
    settings.validate()
    return _CLASSES[settings.kind](settings, schedule)


class ElementwiseOuter(OuterOptimizer):
    """What the outer optimisers share: one parameter at a time, with its buffers.

    Numbers are rounded to float32 before they meet a tensor, and a tensor is never divided by a number (CUDA would
    multiply by the reciprocal). What is left, + - * of tensors and numbers, / and the square root of tensors, is
    correctly rounded by IEEE 754 on every device, so the order of the operations written here fixes the result.
    """

    BUFFERS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: OuterSettings, schedule: Schedule = CONSTANT) -> None:
        self.settings = settings
        self.schedule = schedule

    def init(self, anchor: Tensors) -> dict[str, Tensor]:
        names = sorted(anchor)
        return {f"{buffer}.{name}": torch.zeros_like(anchor[name]) for buffer in self.BUFFERS for name in names}

    def update(
        self, anchor: Tensors, delta: Tensors, state: Tensors, *, round_index: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        new_anchor, new_state = dict(anchor), dict(state)
        lr = self.settings.lr * self.schedule.factor(round_index)
        keep = float32(1 - lr * self.settings.weight_decay)
        for name in sorted(delta):
            buffers = tuple(state[f"{buffer}.{name}"] for buffer in self.BUFFERS)
            step, new_buffers = self.step(delta[name], buffers, round_index)
            decayed = anchor[name] * keep if keep != 1.0 else anchor[name]
            new_anchor[name] = decayed - step * float32(lr)
            new_state |= {f"{buffer}.{name}": value for buffer, value in zip(self.BUFFERS, new_buffers, strict=True)}
        return new_anchor, new_state

    @abstractmethod
    def step(self, delta: Tensor, buffers: tuple[Tensor, ...], round_index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The direction that lr multiplies, and the next buffers."""


@final
class SGD(ElementwiseOuter):
    """p -= lr * delta (SparseLoCo; with lr 1, plain averaging of weights)."""

    def step(self, delta: Tensor, buffers: tuple[Tensor, ...], round_index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return delta, ()


@final
class Sign(ElementwiseOuter):
    """p -= lr * sign(delta) (DeMo, arXiv 2411.19870); nothing moves where the merged delta is exactly zero."""

    def step(self, delta: Tensor, buffers: tuple[Tensor, ...], round_index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return torch.sign(delta), ()


@final
class HeavyBall(ElementwiseOuter):
    """buf = mu * buf + delta ; p -= lr * buf (as torch.optim.SGD has it without `nesterov`; NoLoCo's momentum)."""

    BUFFERS = ("momentum",)

    def step(self, delta: Tensor, buffers: tuple[Tensor, ...], round_index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        buffer = buffers[0] * float32(self.settings.momentum) + delta
        return buffer, (buffer,)


@final
class Nesterov(ElementwiseOuter):
    """buf = mu * buf + delta ; p -= lr * (delta + mu * buf) (DiLoCo, arXiv 2311.08105; as torch.optim.SGD has it)."""

    BUFFERS = ("momentum",)

    def step(self, delta: Tensor, buffers: tuple[Tensor, ...], round_index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        mu = float32(self.settings.momentum)
        buffer = buffers[0] * mu + delta
        return delta + buffer * mu, (buffer,)


@final
class AdamW(ElementwiseOuter):
    """AdamW on the merged gradient, both moments bias-corrected by the round: data parallel training."""

    BUFFERS = ("mean", "square")

    def step(self, delta: Tensor, buffers: tuple[Tensor, ...], round_index: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        beta1, beta2, eps = self.settings.beta1, self.settings.beta2, float32(self.settings.eps)
        mean = buffers[0] * float32(beta1) + delta * float32(1 - beta1)
        square = buffers[1] * float32(beta2) + delta * delta * float32(1 - beta2)
        mean_corrected = mean * float32(1 / (1 - integer_power(beta1, round_index + 1)))
        square_corrected = square * float32(1 / (1 - integer_power(beta2, round_index + 1)))
        return mean_corrected / (square_corrected.sqrt() + eps), (mean, square)


_CLASSES: dict[str, type[ElementwiseOuter]] = {
    "sgd": SGD,
    "sign": Sign,
    "heavyball": HeavyBall,
    "nesterov": Nesterov,
    "adamw": AdamW,
}
OUTERS = tuple(_CLASSES)
