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


PRECISIONS = ("auto", "fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What each peer decides by itself: it changes results no more than rounding does.

    Gradients of a batch are added up over parts of `micro_batch` sequences, 0 for all at once: less memory, the same
    step. `bf16`: products in bfloat16 (torch's autocast); weights, gradients and moments stay float32.
    """

    device: str = "cpu"
    micro_batch: int = 0
    bf16: bool = False


CPU = Hardware()


@dataclass(frozen=True, slots=True)
class InnerResult:
    """`delta` is anchor - weights (float32, on the CPU), `tokens` those trained on, `loss` the mean over the steps."""

    delta: dict[str, Tensor]
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Piece:
    """Some inner steps of a round. `made` is start - weights, or the sum of the gradients without inner optimiser, of
    these steps and of those before (float32, on the CPU); `losses` one for each of these steps.
    """

    made: dict[str, Tensor]
    tokens: int
    losses: list[float]


@final
class Trainer:
    """Holds the module and the inner optimisers, whose moments live on from round to round. Not thread-safe; blocks.

    `loss` maps (module, batch) to a scalar; `sample` maps (round, step) to the batch that this peer trains on then.
    """

    def __init__(self, model: nn.Module, loss: Loss, sample: Sample, method: Method, hardware: Hardware = CPU) -> None:
        self.hardware = hardware
        self.device = hardware.device
        self.model = model.to(self.device)
        self.loss = loss
        self.sample = sample
        self.method = method
        self.optimizers = build_inner(method.inner, self.model)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run_inner_steps(
        self, anchor: Tensors, round_index: int, should_stop: Callable[[], bool] = lambda: False
    ) -> InnerResult:
        """All inner steps of a round from `anchor`, as `run` does them."""
        piece = self.run(anchor, {}, range(self.method.round_steps), round_index, should_stop)
        delta = self.delta(piece.made, len(piece.losses))
        return InnerResult(delta, piece.tokens, sum(piece.losses) / len(piece.losses))

    def run(
        self, start: Tensors, made: Tensors, steps: range, round_index: int, should_stop: Callable[[], bool]
    ) -> Piece:
        """The inner `steps` of a round (at least one) after those that `made` something from `start`. Asks
        `should_stop` after each, and then returns what it has.

        Raises `Diverged`, after which the inner moments are fresh ones.
        """
        self.resume(start, made)
        self.model.train()
        losses: list[float] = []
        tokens = 0
        for step in steps:
            batch = self.sample(round_index, step).to(self.device)
            losses.append(self.backward(batch))
            tokens += batch.numel() - batch.shape[0]
            if self.optimizers:
                self.step(round_index + step / self.method.round_steps)
            if should_stop():
                break
        made = self.difference(start) if self.optimizers else self.gradients()
        if not all(bool(value.isfinite().all()) for value in made.values()):
            self.optimizers = build_inner(self.method.inner, self.model)
            raise Diverged(f"round {round_index}: the weights are no longer finite; the losses were {losses[-3:]}")
        return Piece(made, tokens, losses)

    def backward(self, batch: Tensor) -> float:
        """Adds the gradient of the batch's mean loss to the parameters' and returns that loss; a part at a time."""
        total = 0.0
        for part in torch.split(batch, self.hardware.micro_batch or len(batch)):
            with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.hardware.bf16):
                loss = self.loss(self.model, part) * (len(part) / len(batch))
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    def delta(self, made: Tensors, batches: int) -> dict[str, Tensor]:
        """What to contribute for what was made of so many batches."""
        return dict(made) if self.optimizers else self.mean_gradient(made, batches)

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

    def resume(self, start: Tensors, made: Tensors) -> None:
        if self.optimizers and made:
            start = {name: value - made[name] if name in made else value for name, value in start.items()}
        self.load(start)
        if not self.optimizers:
            for name, gradient in made.items():
                # Gradients add up in place.
                self.parameters[name].grad = gradient.to(self.device, copy=True)

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

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().to("cpu", torch.float32)
            for name, p in self.parameters.items()
        }

    def mean_gradient(self, gradients: Tensors, batches: int) -> dict[str, Tensor]:
        """lr times the mean of the gradients, whose sum is given; its norm clipped."""
        for name, parameter in self.parameters.items():
            parameter.grad = (gradients[name] / batches).to(self.device, parameter.dtype)
        self.clip()
        lr = self.method.inner.lr
        means = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return {name: gradient.detach().to("cpu", torch.float32) * lr for name, gradient in means.items()}
