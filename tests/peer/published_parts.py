"""The runs of published_*.py by this project's parts: training with given gradients, and what must be reached."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from averaging.contribution import sign_contribution
from averaging.record import Hash
from optimizers.presets import Method
from peer.learner import Own, TorchLearner
from peer.method import (
    Contribution,
    Rules,
    TrainingState,
    apply_round,
    initial_state,
    make_payload,
    residual_after,
    wanted,
)
from peer.trainer import Trainer
from simulator.toy import ToySigner
from tests.peer import published
from tests.peer.published import ROUNDS, STEPS

CONSTANT = {"schedule.kind": "constant", "schedule.warmup": 0, "inner.clip": 0.0}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Has the gradients of `published.gradient`."""
    peer, step = batch[0, :2].tolist()
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        total = total + (parameter * published.gradient(name, parameter.detach(), peer, step)).sum()
    return total


def trainer_of(method: Method, shapes: published.Shapes, peer: int, round_steps: int = 0) -> Trainer:
    """Steps are counted over all rounds: those that it is asked for are so, or it has so many in each round."""
    model = published.Weights(published.weights(shapes))
    return Trainer(model, loss, lambda r, step: torch.tensor([[peer, r * round_steps + step, 0]]), method)


def rounds_from(first: int) -> list[range]:
    """The inner steps of all rounds, of which the first has so many."""
    starts = [first + STEPS * number for number in range(ROUNDS)]
    return [range(first), *(range(start, start + STEPS) for start in starts[:-1])]


def trained(rules: Rules, shapes: published.Shapes, steps: list[range]) -> dict[str, Tensor]:
    """The anchor after a round for each of `steps`."""
    trainers = [trainer_of(rules.method, shapes, peer) for peer in range(published.PEERS)]
    state = initial_state(trainers[0].model, rules)
    residuals: list[dict[str, Tensor]] = [{} for _ in trainers]
    for index, span in enumerate(steps):
        said, contributions = [], []
        for peer, trainer in enumerate(trainers):
            piece = trainer.run(state.anchor, {}, span, index, lambda: False)
            own = trainer.delta(piece.made, len(span))
            said.append(wanted(TrainingState(state.anchor, state.outer, residuals[peer]), own, rules.method))
            contributions.append(Contribution(f"p{peer}", 1, make_payload(said[peer], rules.compressor)))
        residuals = [residual_after(c.payload, said[peer], state.anchor, rules) for peer, c in enumerate(contributions)]
        state = apply_round(state, contributions, rules, round_index=index)
    return state.anchor


def streamed(rules: Rules, shapes: published.Shapes, rounds: int) -> list[TorchLearner]:
    """All peers after so many rounds, each of one fragment."""
    signers = [ToySigner(peer) for peer in range(published.PEERS)]
    learners = []
    for peer, signer in enumerate(signers):
        trainer = trainer_of(rules.method, shapes, peer, rules.method.round_steps)
        learners.append(TorchLearner(signer.peer_id, initial_state(trainer.model, rules), rules, trainer, []))
    for index in range(rounds):
        said = []
        for signer, learner in zip(signers, learners, strict=True):
            learner.train(index, lambda: False)
            said.append(sign_contribution(signer, Hash(bytes(32)), 1, bytes(16), True, learner.pack(index)))
        for learner in learners:
            learner.apply(index + 1, said, Own.SAID)
    return learners


@lru_cache
def numbers(file: Path) -> dict[str, Any]:
    """What a published program reached, by case."""
    loaded: dict[str, Any] = json.loads(file.read_text())
    return loaded


def assert_reached(
    reached: dict[str, Tensor], expected: dict[str, Any], shapes: published.Shapes, *, apart: float = 1e-5
) -> None:
    start = published.weights(shapes)
    assert reached.keys() == expected.keys() == start.keys()
    for name, value in expected.items():
        there = torch.tensor(value)
        assert float((there - start[name]).abs().mean()) > 0.02, "it went somewhere"
        torch.testing.assert_close(reached[name], there, rtol=1e-5, atol=apart)
