"""Training alone: H inner steps from an anchor, and the loss on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from optimizers.inner import build_inner, set_learning_rate
from optimizers.presets import Method
from optimizers.seam import Tensors

Loss = Callable[[nn.Module, Tensor], Tensor]
Sample = Callable[[int, int], Tensor]


class Diverged(ArithmeticError):
    """The loss or the weights are no longer finite; nothing of this round may be sent."""


@dataclass(frozen=True, slots=True)
class InnerResult:
    """`delta` is anchor - weights (float32, on the CPU), `tokens` those trained on, `loss` the mean over the steps."""

    delta: dict[str, Tensor]
    tokens: int
    loss: float


@final
class Trainer:
    """Holds the module and the inner optimisers, whose moments live on from round to round. Not thread-safe; blocks.

    `loss` maps (module, batch) to a scalar; `sample` maps (round, step) to the batch that this peer trains on then.
    """

    def __init__(self, model: nn.Module, loss: Loss, sample: Sample, method: Method, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.loss = loss
        self.sample = sample
        self.method = method
        self.device = device
        self.optimizers = build_inner(method.inner, self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run_inner_steps(
        self, anchor: Tensors, round_index: int, should_stop: Callable[[], bool] = lambda: False
    ) -> InnerResult:
        """The method's inner steps from `anchor`. Asks `should_stop` after each step, and then returns what it has.

        Raises `Diverged`, after which the inner moments are fresh ones.
        """
        self.load(anchor)
        self.model.train()
        losses: list[float] = []
        tokens = 0
        for step in range(self.method.inner_steps):
            batch = self.sample(round_index, step).to(self.device)
            loss = self.loss(self.model, batch)
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            tokens += batch.numel() - batch.shape[0]
            if self.optimizers:
                self.step(round_index + step / self.method.inner_steps)
            if should_stop():
                break
        delta = self.difference(anchor) if self.optimizers else self.mean_gradient(len(losses))
        if not all(bool(value.isfinite().all()) for value in delta.values()):
            self.optimizers = build_inner(self.method.inner, self.model)
            raise Diverged(f"round {round_index}: the weights are no longer finite; the losses were {losses[-3:]}")
        return InnerResult(delta, tokens, sum(losses) / len(losses))

    def validation_loss(self, anchor: Tensors, batches: Sequence[Tensor]) -> float:
        """The mean loss over `batches`, in nats a byte."""
        self.load(anchor)
        self.model.eval()
        with torch.no_grad():
            return sum(float(self.loss(self.model, batch.to(self.device))) for batch in batches) / len(batches)

    def load(self, anchor: Tensors) -> None:
        """Puts the anchor into the module and forgets gradients."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(anchor[name])
                parameter.grad = None

    def step(self, position: float) -> None:
        set_learning_rate(self.optimizers, self.method.inner.lr * self.method.schedule.factor(position))
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self) -> None:
        if self.method.inner.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.method.inner.clip)

    def difference(self, anchor: Tensors) -> dict[str, Tensor]:
        return {name: anchor[name] - p.detach().to("cpu", torch.float32) for name, p in self.parameters.items()}

    def mean_gradient(self, batches: int) -> dict[str, Tensor]:
        """lr times the mean of the gradients at the anchor, its norm clipped."""
        for parameter in self.parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = gradient / batches
        self.clip()
        lr = self.method.inner.lr
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return {name: gradient.detach().to("cpu", torch.float32) * lr for name, gradient in gradients.items()}
