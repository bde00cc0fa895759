"""Runs the DiLoCo of exo-explore/gym for test_published.py.

    python -m tests.peer.published_gym gym

`gym` is a checkout of github.com/exo-explore/gym at the commit below.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.peer.published import (
    MATRICES,
    PEERS,
    ROUNDS,
    STEPS,
    Weights,
    checkout_from,
    keep,
    on_all_peers,
    stand_in,
    weights,
)

FILE = Path(__file__).with_suffix(".json")
COMMIT = "9fa323c26364f4437ffd23517da5d65946003963"
INNER_LR, OUTER_LR, OUTER_MOMENTUM = 0.01, 0.7, 0.9


def main() -> None:
    keep(FILE, COMMIT, {"diloco": on_all_peers(partial(run, checkout_from("gym", __doc__)))[0]})


def run(folder: Path, peer: int) -> object:
    """The gym's `DiLoCoStrategy` with AdamW inside. It counts steps from 0 and meets where they are a multiple of H
    other than 0, after the step: so its first round has H + 1 of them. Where the model is on the CPU, as here, its
    first peer then shares memory with the master copy, and trains that too; that is undone after each step.
    """
    for package in ("exogym", "exogym.aux", "exogym.strategy"):
        stand_in(package, folder.joinpath(*package.split(".")))
    diloco: Any = importlib.import_module("exogym.strategy.diloco")
    inner = diloco.OptimSpec(torch.optim.AdamW, lr=INNER_LR, betas=(0.9, 0.95), weight_decay=0.0)
    outer = diloco.OptimSpec(torch.optim.SGD, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    strategy = diloco.DiLoCoStrategy(inner, outer, STEPS)
    strategy.lr_scheduler = None
    model = Weights(weights(MATRICES))
    strategy._init_node(model, peer, PEERS)
    for step in range(STEPS * ROUNDS + 1):
        model.set_gradients(peer, step)
        strategy.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.as_lists()


if __name__ == "__main__":
    main()
