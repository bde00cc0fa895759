"""Inner optimisers: every parameter in exactly one, Muon for hidden matrices only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.registry import build_model
from optimizers.inner import INNERS, InnerSettings, build_inner, hidden_matrices, set_learning_rate

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", INNERS)
def test_every_parameter_is_in_exactly_one_optimiser(kind: str) -> None:
    model = build_model("gpt-nano", 0)
    inside = [id(p) for o in build_inner(InnerSettings(kind=kind), model) for g in o.param_groups for p in g["params"]]
    expected = [] if kind == "none" else [id(p) for p in model.parameters()]
    assert sorted(inside) == sorted(expected)


def test_muon_takes_the_hidden_matrices_alone() -> None:
    names = hidden_matrices(build_model("gpt-nano", 0))
    assert len(names) == 3 * 6
    assert all(name.startswith("blocks.") for name in names)


def test_a_tied_head_a_bias_and_a_convolution_are_not_hidden_matrices() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(8, 4)
            self.hidden = nn.Linear(4, 4)
            self.filter = nn.Conv1d(4, 4, 3)
            self.lm_head = nn.Linear(4, 8, bias=False)
            self.output = nn.Linear(4, 8, bias=False)
            self.output.weight = self.tokens.weight

    assert hidden_matrices(Model()) == ["hidden.weight"]


def test_the_learning_rate_reaches_every_group() -> None:
    optimizers = build_inner(InnerSettings(kind="muon"), build_model("gpt-nano", 0))
    set_learning_rate(optimizers, 0.125)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.125}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (InnerSettings(kind="lion"), "inner.kind = 'lion': must be one of none, sgd"),
        (InnerSettings(lr=-1.0), "inner.lr = -1.0"),
        (InnerSettings(lr=float("nan")), "inner.lr = nan"),
        (InnerSettings(beta1=1.0), "inner.beta1 = 1.0"),
        (InnerSettings(clip=-1.0), "inner.clip = -1.0"),
    ],
)
def test_wrong_settings_name_themselves(wrong: InnerSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_inner(wrong, nn.Linear(2, 2))
