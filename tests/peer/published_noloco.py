"""Runs two optimisers of gensyn-ai/noloco for test_published_gossip.py: NoLoCo's, and its sparse DiLoCo.

    python -m tests.peer.published_noloco noloco

`noloco` is a checkout of github.com/gensyn-ai/noloco at the commit below; it needs numpy. Its package imports nothing
of itself, so that the two modules are loaded as they are.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.peer.published import ROUNDS, STEPS, Weights, checkout_from, keep, on_all_peers, weights

FILE = Path(__file__).with_suffix(".json")
COMMIT = "a1b4a425bdc4050a356cf9f4bae7c383419703ab"
SHAPES = {"down": (16, 12), "up": (8, 16), "bias": (24,)}
ALIKE = {"down": (16, 12), "up": (12, 16)}
"""Of one size: the program keeps so many values of a tensor, this project a share of them."""
REPLICAS, GROUP = 4, 2
INNER_LR = 0.01
GOSSIP = {"outer_lr": 0.7, "outer_momentum": 0.5}
SPARSE = {"outer_lr": 0.7, "outer_momentum": 0.9}
SPARSE_KEPT = 24


def main() -> None:
    folder = checkout_from("noloco", __doc__)
    gossip = on_all_peers(partial(run_gossip, folder), REPLICAS)
    groups = [sorted({tuple(peer["groups"][number]) for peer in gossip}) for number in range(ROUNDS)]
    sparse = on_all_peers(partial(run_sparse, folder))[0]
    keep(FILE, COMMIT, {"gossip": [peer["weights"] for peer in gossip], "groups": groups, "sparse": sparse})


def module_of(folder: Path, name: str) -> Any:
    sys.path.insert(0, str(folder / "src"))
    return importlib.import_module(f"noloco.{name}")


def run_gossip(folder: Path, peer: int) -> object:
    """`SparseOptimizerC`, which the configurations `c4_noloco_mean_*` name; and who met, which it draws from numpy."""
    noloco = module_of(folder, "sparse_optimizer_c")
    groups = []
    step_together = noloco.outer_step

    def outer_step(group: list[int], *parts: object) -> None:
        groups.append(sorted(group))
        step_together(group, *parts)

    noloco.outer_step = outer_step
    model = Weights(weights(SHAPES))
    world = importlib.import_module("torch.distributed").group.WORLD
    optimizer = noloco.SparseOptimizerC(model, world, GROUP, STEPS, lr=INNER_LR, **GOSSIP)
    for step in range(STEPS * ROUNDS):
        model.set_gradients(peer, step)
        optimizer.step()
    return {"weights": model.as_lists(), "groups": groups}


def run_sparse(folder: Path, peer: int) -> object:
    """The `PipelineDiLoCoOptimizer` with an error buffer, of the module that spells it so."""
    sparse = module_of(folder, "sparce_loco_optimizer")
    model = Weights(weights(ALIKE))
    world = importlib.import_module("torch.distributed").group.WORLD
    optimizer = sparse.PipelineDiLoCoOptimizer(
        model, STEPS, INNER_LR, "cpu", dp_group=world, top_k=SPARSE_KEPT, **SPARSE
    )
    for step in range(STEPS * ROUNDS):
        model.set_gradients(peer, step)
        optimizer.step()
    return model.as_lists()


if __name__ == "__main__":
    main()
