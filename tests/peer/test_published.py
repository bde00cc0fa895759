"""Training by rounds reaches the weights that published programs reach: numbers that published.py has written down.

Where they differ on purpose, the settings here say so: what is compared is what both can do.
"""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from compression.chain import parse_chain
from optimizers.presets import method_from_settings
from peer.method import (
    Contribution,
    Rules,
    apply_round,
    initial_state,
    make_payload,
    residual_after,
    rules_of,
    wanted,
)
from peer.trainer import Trainer
from tests.peer import published

CONSTANT = {"schedule.kind": "constant", "schedule.warmup": 0, "inner.clip": 0.0}


@lru_cache
def numbers() -> dict[str, dict[str, list[float]]]:
    loaded: dict[str, dict[str, list[float]]] = json.loads(published.FILE.read_text())
    return loaded


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Has the gradients of `published.gradient`."""
    peer, step = batch[0, :2].tolist()
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        total = total + (parameter * published.gradient(name, parameter.detach(), peer, step)).sum()
    return total


def trained(rules: Rules, shapes: published.Shapes, steps: list[range]) -> dict[str, Tensor]:
    """The anchor after a round for each of `steps`."""

    def trainer_of(peer: int) -> Trainer:
        model = published.Weights(published.weights(shapes))
        return Trainer(model, loss, lambda _, step: torch.tensor([[peer, step, 0]]), rules.method)

    trainers = [trainer_of(peer) for peer in range(published.PEERS)]
    state = initial_state(trainers[0].model, rules)
    residuals: list[dict[str, Tensor]] = [{} for _ in trainers]
    for index, span in enumerate(steps):
        said, contributions = [], []
        for peer, trainer in enumerate(trainers):
            piece = trainer.run(state.anchor, {}, span, index, lambda: False)
            own = trainer.delta(piece.made, len(span))
            said.append(wanted(type(state)(state.anchor, state.outer, residuals[peer]), own, rules.method))
            contributions.append(Contribution(f"p{peer}", 1, make_payload(said[peer], rules.compressor)))
        residuals = [residual_after(c.payload, said[peer], state.anchor, rules) for peer, c in enumerate(contributions)]
        state = apply_round(state, contributions, rules, round_index=index)
    return state.anchor


def assert_reached(anchor: dict[str, Tensor], case: str, shapes: published.Shapes) -> None:
    start = published.weights(shapes)
    for name, value in numbers()[case].items():
        expected = torch.tensor(value)
        assert float((expected - start[name]).abs().mean()) > 0.02, "it went somewhere"
        torch.testing.assert_close(anchor[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "shapes", "chain"),
    [
        ("demo-matrices", published.MATRICES, "dct(8) topk({}/64) fp32"),
        ("demo-vectors", published.VECTORS, "dct(8) topk({}/8) fp32"),
    ],
)
def test_distro_is_the_published_demo(case: str, shapes: published.Shapes, chain: str) -> None:
    """DeMo multiplies gradients by the learning rate before it adds them up, this one steps by it: the same signs as
    long as it is constant. It keeps k of every tile, also of a vector's, which has n coefficients and not n * n: for
    vectors the chain says so.
    """
    demo = published.DEMO
    settings = {
        **CONSTANT,
        "chain": chain.format(published.DEMO_KEPT[case]),
        "merge": "mean_of_senders",
        "outer.lr": demo["lr"],
        "outer.weight_decay": demo["weight_decay"],
        "residual_decay": demo["compression_decay"],
    }
    rules = rules_of(method_from_settings("distro", settings), parse_chain)
    anchor = trained(rules, shapes, [range(step, step + 1) for step in range(published.DEMO_STEPS)])
    assert_reached(anchor, case, shapes)


def test_diloco_is_the_gyms() -> None:
    """The gym's first round has one step more; it has no clipping of its own accord and weighs all peers alike."""
    settings = {
        **CONSTANT,
        "chain": "identity all fp32",
        "merge": "mean",
        "inner.lr": published.INNER_LR,
        "inner_steps": published.DILOCO_STEPS,
        "outer.lr": published.OUTER_LR,
        "outer.momentum": published.OUTER_MOMENTUM,
    }
    rules = rules_of(method_from_settings("diloco", settings), parse_chain)
    h = published.DILOCO_STEPS
    rounds = [range(h + 1), *(range(r * h + 1, r * h + h + 1) for r in range(1, published.DILOCO_ROUNDS))]
    assert_reached(trained(rules, published.MATRICES, rounds), "diloco", published.MATRICES)
