"""The models: same initial bits everywhere, sizes as promised, causal, and they learn."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from models.gpt import ModelConfig
from models.registry import MODELS, build_model, loss_fn, uniform_weights

torch.set_num_threads(1)


def digest(model: nn.Module) -> str:
    hashed = hashlib.sha256()
    for name, parameter in model.named_parameters():
        hashed.update(name.encode() + parameter.detach().numpy().tobytes())
    return hashed.hexdigest()


def test_the_initial_bits_are_those_recorded() -> None:
    """A change of these breaks every run in progress: peers would start from different anchors."""
    assert digest(build_model("gpt-nano", 0))[:16] == "bd81dbb188780642"


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_seed_gives_the_same_bits_whatever_torch_was_doing(threads: int) -> None:
    first = digest(build_model("gpt-nano", 7))
    torch.manual_seed(threads)
    torch.set_num_threads(threads)
    try:
        assert digest(build_model("gpt-nano", 7)) == first
    finally:
        torch.set_num_threads(1)
    assert digest(build_model("gpt-nano", 8)) != first


@pytest.mark.parametrize(("name", "low", "high"), [("gpt-nano", 0.1e6, 0.2e6), ("gpt-mini", 0.8e6, 1.3e6)])
def test_sizes(name: str, low: float, high: float) -> None:
    assert low < sum(p.numel() for p in build_model(name, 0).parameters()) < high


def test_the_small_model_has_about_ten_million_parameters() -> None:
    config = MODELS["gpt-small"]
    blocks = config.layers * config.width**2 * (4 + 2 * config.mlp_ratio)
    assert 9e6 < blocks + 2 * config.vocabulary * config.width < 11e6


def test_every_parameter_is_used() -> None:
    model = build_model("gpt-nano", 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * uniform_weights("noise", parameter.shape))
    batch = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(loss_fn(model, batch), list(model.parameters()))
    assert all(bool(gradient.any()) for gradient in gradients)


def test_the_future_is_not_seen() -> None:
    model = build_model("gpt-nano", 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * uniform_weights("noise", parameter.shape))
    text = torch.arange(40)[None]
    changed = text.clone()
    changed[0, 25:] = 200
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25:], after[:, 25:])


def test_it_starts_uniform_and_learns_a_repeating_text() -> None:
    model = build_model("gpt-nano", 0)
    batch = torch.tensor([[*b"round and "] * 4], dtype=torch.int64).reshape(1, -1).repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    first = float(loss_fn(model, batch).detach())
    assert first == pytest.approx(5.545, abs=0.01)
    for _ in range(15):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        torch.autograd.backward(loss)
        optimizer.step()
    assert float(loss.detach()) < 0.5


def test_uniform_weights_are_exact_and_symmetric() -> None:
    values = uniform_weights("label", torch.Size((64, 257)))
    assert torch.equal(values * 2**24, (values * 2**24).round())
    assert -1 < float(values.min()) < -0.99
    assert 0.99 < float(values.max()) < 1
    assert abs(float(values.mean())) < 0.02


def test_wrong_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match=r"gpt-huge.*gpt-mini, gpt-nano, gpt-small"):
        build_model("gpt-huge", 0)
    with pytest.raises(ValueError, match="width = 30"):
        ModelConfig(layers=1, width=30, heads=4, context=8)
    with pytest.raises(ValueError, match="context is 64"):
        build_model("gpt-nano", 0)(torch.zeros((1, 65), dtype=torch.int64))
