"""What the codec benchmark compresses: Gaussian and heavy-tailed matrices, and a language model's real momentum."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from models.registry import build_model, loss_fn, model_config
from peer.data import load_corpus

Tensors = Mapping[str, Tensor]


def matrices(parameters: int) -> dict[str, Tensors]:
    """One matrix each, of about so many elements."""
    rows = max(1, parameters // 2048)
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(rows, 2048, generator=generator)
    # Student's t with 3 degrees of freedom: a Gaussian over the root of a chi-square.
    squares = torch.zeros(rows, 2048)
    for _ in range(3):
        squares += torch.randn(rows, 2048, generator=generator).square()
    heavy = torch.randn(rows, 2048, generator=generator) / (squares / 3).sqrt()
    return {"gaussian": {"matrix": gaussian * 1e-3}, "student-3": {"matrix": heavy * 1e-3}}


def momentum(model_name: str, steps: int, batch: int, parameters_max: int) -> Tensors:
    """The momentum (decay 0.95) of a model's gradients over `steps` steps of AdamW on the project's own text.

    Only the first tensors, by name, up to about `parameters_max` elements.
    """
    model = build_model(model_name, seed=0)
    corpus = load_corpus()
    length = model_config(model_name).context
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for step in range(steps):
        optimiser.zero_grad(set_to_none=True)
        loss = loss_fn(model, corpus.sample(0, "codecs", 0, step, batch=batch, length=length))
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name].mul_(0.95).add_(parameter.grad)
        optimiser.step()
    chosen: dict[str, Tensor] = {}
    total = 0
    for name in sorted(sums):
        if chosen and total + sums[name].numel() > parameters_max:
            continue
        chosen[name] = sums[name].detach()
        total += sums[name].numel()
    return chosen
