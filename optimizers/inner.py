"""Inner optimisers: what a peer does alone between two rounds. Their moments stay with the peer, never averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

INNERS = ("none", "sgd", "adamw", "muon")

EMBEDDING_NAMES = ("embedding", "embeddings", "embed", "wte", "wpe")
_NOT_HIDDEN = (*EMBEDDING_NAMES, "head", "lm_head")


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
    if settings.kind == "none":
        return []
    parameters = dict(model.named_parameters())
    if settings.kind == "sgd":
        decay = settings.weight_decay
        return [torch.optim.SGD(parameters.values(), settings.lr, settings.momentum, weight_decay=decay)]
    if settings.kind == "adamw":
        return [_adamw(settings, list(parameters.values()))]
    hidden = hidden_matrices(model)
    rest = [name for name in parameters if name not in hidden]
    optimizers = [_muon(settings, [parameters[name] for name in hidden])] if hidden else []
    return [*optimizers, _adamw(settings, [parameters[name] for name in rest])] if rest else optimizers


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
