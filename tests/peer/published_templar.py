"""Runs the SparseLoCo of tplr-ai/templar for test_published.py.

    python -m tests.peer.published_templar templar

`templar` is a checkout of github.com/tplr-ai/templar at the commit below; it needs einops. Of its package only those
modules are loaded that hold the step: `compress.py`, `neurons.py`, `distributed.py`, without chain, buckets and
Weights & Biases. A miner is what its functions read of one.
"""

from __future__ import annotations

import importlib
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.peer.published import (
    PEERS,
    ROUNDS,
    STEPS,
    VECTORS,
    Shapes,
    Weights,
    checkout_from,
    keep,
    on_all_peers,
    stand_in,
    weights,
)

FILE = Path(__file__).with_suffix(".json")
COMMIT = "c2397ac524c9d9de550a2a126ed37505d090d69f"
TILE = 8
SHAPES: dict[str, Shapes] = {"matrices": {"down": (48, TILE), "up": (16, TILE)}, "vectors": VECTORS}
"""Matrices as wide as a tile, so that a tile is so many values in a row, as a chunk is here."""
KEPT = {"matrices": 8, "vectors": 2}
"""Of a tile of 8 x 8, and of 8."""
INNER: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
OUTER_LR = 0.75
DECAY = 0.95
BINS, SIGMAS = 4, 6


def main() -> None:
    folder = checkout_from("templar", __doc__)
    keep(FILE, COMMIT, {name: on_all_peers(partial(run, folder, name))[0] for name in SHAPES})


def run(folder: Path, name: str, peer: int) -> object:
    """A window after another: inner steps, `prepare_gradient_dict`, everybody's dictionaries, `outer_step`."""
    neurons = _neurons(folder)
    model = Weights(weights(SHAPES[name]))
    for parameter in model.parameters():
        # Where it is there, the program does not ask for pinned memory, which needs a GPU.
        vars(parameter)["_cpu_offload_buf"] = torch.empty_like(parameter, requires_grad=False)
    miner = _miner(model, KEPT[name])
    inner = torch.optim.AdamW(model.parameters(), **INNER)
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR)
    for window in range(ROUNDS):
        saved, specs = neurons.dist_helper.get_offloaded_params(model)
        for step in range(window * STEPS, window * STEPS + STEPS):
            model.set_gradients(peer, step)
            inner.step()
        neurons.dist_helper.restore_offloaded_params(model, saved, specs)
        own, shapes, counts = neurons.prepare_gradient_dict(miner, window)
        neurons.outer_step(
            model,
            outer,
            gather_result=_gathered(own),
            transformer=miner.transformer,
            compressor=miner.compressor,
            xshapes=shapes,
            totalks=counts,
            device="cpu",
            is_master=True,
            world_size=1,
        )
    return model.as_lists()


def _neurons(folder: Path) -> Any:
    stand_in("tplr", folder / "src" / "tplr", logger=logging.getLogger("tplr"))
    stand_in("wandb")
    stand_in("wandb.sdk")
    stand_in("wandb.sdk.wandb_run", Run=object)
    return importlib.import_module("tplr.neurons")


def _miner(model: Weights, kept: int) -> SimpleNamespace:
    compress: Any = importlib.import_module("tplr.compress")
    names = [name for name, _ in model.named_parameters()]
    return SimpleNamespace(
        model=model,
        owned_params=set(names),
        error_feedback=dict.fromkeys(names),
        error_feedback_cpu_buffers={},
        hparams=SimpleNamespace(
            outer_learning_rate=OUTER_LR, momentum_decay=DECAY, topk_compression=kept, use_dct=False
        ),
        transformer=compress.ChunkingTransformer(model, target_chunk=TILE),
        compressor=compress.TopKCompressor(use_quantization=True, quantization_bins=BINS, quantization_range=SIGMAS),
    )


def _gathered(own: dict[str, object]) -> SimpleNamespace:
    """As `Comms.gather` hands over what it found in the miners' buckets: a list for each entry."""
    everybody: list[Any] = [None] * PEERS
    torch.distributed.all_gather_object(everybody, own)
    names = [name for name in own if name != "metadata"]
    return SimpleNamespace(state_dict=SimpleNamespace(**{name: [said[name] for said in everybody] for name in names}))


if __name__ == "__main__":
    main()
