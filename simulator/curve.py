"""What a virtual swarm's loss was when: from its reports, and on more held-out text in the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import final

import anyio
import torch

from models.registry import build_model, loss_fn, model_config
from optimizers.seam import Tensors
from peer.data import Corpus
from peer.reports import Report, RoundDone, Validated
from simulator.options import LossPoint

HELD_OUT_BATCHES = 16
HELD_OUT_BATCH = 32


@final
class Curve:
    """Call `see` with every report, on virtual time."""

    def __init__(self, rounds_goal: int) -> None:
        self.seconds_to_goal = 0.0
        """Until the last peer had the last round behind it."""
        self._goal = rounds_goal
        self._losses: dict[int, list[float]] = {}
        self._seconds: dict[int, float] = {}

    def see(self, report: Report) -> None:
        now = anyio.current_time()
        if isinstance(report, Validated):
            self._losses.setdefault(report.round, []).append(report.loss)
            self._seconds.setdefault(report.round, now)
        elif isinstance(report, RoundDone) and report.round == self._goal:
            self.seconds_to_goal = now

    def points(self) -> tuple[LossPoint, ...]:
        """In order of rounds; where several peers looked at their replicas, the mean."""
        return tuple(
            LossPoint(number, self._seconds[number], fmean(self._losses[number])) for number in sorted(self._losses)
        )


def loss_held_out(model: str, anchors: Sequence[Tensors], corpus: Corpus) -> float:
    """The mean loss of these weights on 512 windows of the held-out text, in nats a byte."""
    module = build_model(model, 0)
    batches = corpus.validation_batches(
        batch=HELD_OUT_BATCH, length=model_config(model).context, batches=HELD_OUT_BATCHES
    )
    losses = []
    with torch.no_grad():
        for anchor in anchors:
            for name, parameter in module.named_parameters():
                parameter.copy_(anchor[name])
            losses += [float(loss_fn(module, batch)) for batch in batches]
    return fmean(losses)
