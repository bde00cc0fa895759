"""Inner optimisers: every parameter in exactly one, Muon for hidden matrices only, and it is Muon."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.registry import build_model
from optimizers.inner import (
    INNERS,
    InnerSettings,
    assigned,
    build_inner,
    described,
    hidden_matrices,
    set_learning_rate,
)

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


Matrix = list[list[float]]


def product(a: Matrix, b: Matrix) -> Matrix:
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def added(a: Matrix, b: Matrix, first: float, second: float) -> Matrix:
    return [[first * x + second * y for x, y in zip(r, s, strict=True)] for r, s in zip(a, b, strict=True)]


def transposed(a: Matrix) -> Matrix:
    return [list(row) for row in zip(*a, strict=True)]


def rounded(a: Matrix) -> Matrix:
    """To bfloat16, in which Muon iterates."""
    return [[float(torch.tensor(x).bfloat16()) for x in row] for row in a]


def slow_muon(weight: Matrix, gradients: list[Matrix], lr: float, decay: float, momentum: float) -> Matrix:
    """Muon as its author writes it: a running mean of gradients, Nesterov, five Newton-Schulz steps of the quintic
    3.4445 x - 4.7750 x^3 + 2.0315 x^5 on the shorter side, then lr * .2 * sqrt(longer side) of it.
    """
    mean = [[0.0 for _ in row] for row in weight]
    for gradient in gradients:
        mean = added(mean, gradient, momentum, 1 - momentum)
        x = rounded(added(gradient, mean, 1 - momentum, momentum))
        tall = len(x) > len(x[0])
        x = transposed(x) if tall else x
        norm = rounded([[sum(v * v for row in x for v in row) ** 0.5]])[0][0]
        x = rounded([[v / norm for v in row] for row in x])
        for _ in range(5):
            gram = rounded(product(x, transposed(x)))
            polynomial = rounded(added(gram, product(gram, gram), -4.7750, 2.0315))
            x = rounded(added(x, product(polynomial, x), 3.4445, 1.0))
        x = transposed(x) if tall else x
        scale = lr * 0.2 * max(len(weight), len(weight[0])) ** 0.5
        weight = added(added(weight, weight, 1 - lr * decay, 0.0), x, 1.0, -scale)
    return weight


@pytest.mark.parametrize("shape", [(4, 4), (3, 6), (6, 3)])
def test_muon_is_its_slow_reference_over_many_steps(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(40)]
    model = nn.Linear(shape[1], shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(start)
    settings = InnerSettings(kind="muon", lr=0.01, weight_decay=0.1, momentum=0.9)
    (optimizer,) = build_inner(settings, model)
    for gradient in gradients:
        model.weight.grad = gradient.clone()
        optimizer.step()
    expected = torch.tensor(slow_muon(start.tolist(), [g.tolist() for g in gradients], 0.01, 0.1, 0.9))
    assert float((expected - start).abs().mean()) > 0.02
    # 5e-6 where products add up in float32; another order of adding may round one bfloat16 the other way: 2e-5.
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-5, atol=5e-5)


def test_people_are_told_which_optimiser_steps_what() -> None:
    model = build_model("gpt-nano", 0)
    text = described(InnerSettings(kind="muon"), model)
    assert text.startswith("Muon steps 18 tensors with 147,456 parameters: blocks.*.attention_out.weight, ")
    assert text.endswith("; AdamW steps 2 tensors with 32,768 parameters: embedding.weight, head.weight")
    assert described(InnerSettings(kind="adamw"), model).startswith("AdamW steps 20 tensors with 180,224 parameters: ")
    assert "gradients" in described(InnerSettings(kind="none"), model)


def test_what_is_told_is_what_is_done() -> None:
    model = build_model("gpt-nano", 0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = InnerSettings(kind="muon")
    for optimizer, (kind, told) in zip(build_inner(settings, model), assigned(settings, model).items(), strict=True):
        assert type(optimizer).__name__.lower() == kind
        assert sorted(names[id(p)] for g in optimizer.param_groups for p in g["params"]) == sorted(told)
