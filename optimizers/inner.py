"""Inner optimisers: what a peer does alone between two rounds. Their moments stay with the peer, never averaged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

INNERS = ("none", "sgd", "adamw", "muon")

EMBEDDING_NAMES = ("embedding", "embeddings", "embed", "wte", "wpe")
_NOT_HIDDEN = (*EMBEDDING_NAMES, "head", "lm_head")
_TITLES = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_FAMILIES_MAX = 12
"""So many kinds of parameters are named."""


@dataclass(frozen=True, slots=True)
class InnerSettings:
    """`kind` and its numbers; those that a kind does not use are ignored.

    `none` takes no steps: the delta is lr times the mean gradient at the anchor over the round's batches.
    `clip` bounds the norm of each gradient (of the mean gradient for `none`); 0 leaves it.
    """

    kind: str = "adamw"
    lr: float = 3e-3
    weight_decay: float = 0.0
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0

    def validate(self, prefix: str = "inner") -> None:
        """Raises `ValueError` naming the setting and its value."""
        if self.kind not in INNERS:
            raise ValueError(f"{prefix}.kind = {self.kind!r}: must be one of {', '.join(INNERS)}")
        if not 0 < self.lr < 1e6:
            raise ValueError(f"{prefix}.lr = {self.lr}: must be above 0 and below 1e6")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{prefix}.{name} = {getattr(self, name)}: must be at least 0 and below 1")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ValueError(f"{prefix}.{name} = {getattr(self, name)}: must be at least 0 and below 1e6")


def build_inner(settings: InnerSettings, model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimisers to step one after the other; empty for `none`. Every parameter is in exactly one of them."""
    settings.validate()
    parameters = dict(model.named_parameters())
    kinds = {"sgd": _sgd, "adamw": _adamw, "muon": _muon}
    return [
        kinds[kind](settings, [parameters[name] for name in names]) for kind, names in assigned(settings, model).items()
    ]


def assigned(settings: InnerSettings, model: nn.Module) -> dict[str, list[str]]:
    """Which optimiser steps which parameters; none is empty."""
    names = [name for name, _ in model.named_parameters()]
    if settings.kind == "none" or not names:
        return {}
    if settings.kind != "muon":
        return {settings.kind: names}
    hidden = hidden_matrices(model)
    both = {"muon": hidden, "adamw": [name for name in names if name not in hidden]}
    return {kind: chosen for kind, chosen in both.items() if chosen}


def described(settings: InnerSettings, model: nn.Module) -> str:
    """For people: which optimiser steps what; layers that differ by their number alone are named once."""
    parameters = dict(model.named_parameters())
    parts = []
    for kind, names in assigned(settings, model).items():
        families = sorted({_NUMBER.sub("*", name) for name in names})
        shown = ", ".join(families[:_FAMILIES_MAX]) + (", ..." if len(families) > _FAMILIES_MAX else "")
        elements = sum(parameters[name].numel() for name in names)
        parts.append(f"{_TITLES[kind]} steps {len(names)} tensors with {elements:,} parameters: {shown}")
    return "; ".join(parts) if parts else "no inner optimiser: gradients are contributed"


def hidden_matrices(model: nn.Module) -> list[str]:
    """The names of the parameters that Muon takes: matrices that are neither embedding nor head. AdamW has the rest.

    An embedding is the weight of an `nn.Embedding`, tied or not; a head goes by its name.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in embeddings and not set(name.split(".")) & set(_NOT_HIDDEN)
    ]


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def _sgd(settings: InnerSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, settings.lr, settings.momentum, weight_decay=settings.weight_decay)


def _adamw(settings: InnerSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(parameters, settings.lr, betas, weight_decay=settings.weight_decay)


def _muon(settings: InnerSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"inner.kind = 'muon': torch {torch.__version__} has no Muon; it needs torch 2.9 or later")
    # Scaled to AdamW's root mean square, so that one learning rate serves both.
    return torch.optim.Muon(
        parameters,
        settings.lr,
        settings.weight_decay,
        settings.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
