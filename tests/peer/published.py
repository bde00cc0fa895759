"""Runs published implementations and keeps the weights that they reach, as numbers, for test_published.py.

    python -m tests.peer.published --demo DeMo/demo.py --gym gym

writes `published.json` beside this file. Neither program is part of this project; `--demo` is `demo.py` of
github.com/bloc97/DeMo (it needs einops), `--gym` a checkout of github.com/exo-explore/gym, both at the commits below.
They run unchanged: three processes, each one peer, over gloo on the loopback interface.

Gradients are a formula of whole numbers and one division, so that any machine gives them the same bits.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

FILE = Path(__file__).with_name("published.json")
DEMO_COMMIT = "0e48145d702b25f83055e11d9585a9c11bcfe154"
GYM_COMMIT = "9fa323c26364f4437ffd23517da5d65946003963"
PEERS = 3
MATRICES = {"down": (16, 24), "up": (8, 16)}
VECTORS = {"bias": (24,), "gain": (40,)}
DEMO_STEPS = 60
DEMO = {"lr": 0.003, "compression_decay": 0.95, "compression_chunk": 8, "weight_decay": 0.1}
DEMO_KEPT = {"demo-matrices": 6, "demo-vectors": 3}
"""Coefficients of each tile: of 8 x 8, and of 8."""
DILOCO_STEPS = 4
DILOCO_ROUNDS = 12
INNER_LR, OUTER_LR, OUTER_MOMENTUM = 0.01, 0.7, 0.9
PULL = 0.25
"""How strongly gradients pull every weight to zero: so they depend on the weights."""

Shapes = Mapping[str, tuple[int, ...]]


def weights(shapes: Shapes) -> dict[str, Tensor]:
    """Where every peer begins."""
    return {name: noise(shape, 7, index) for index, (name, shape) in enumerate(sorted(shapes.items()))}


def gradient(name: str, weight: Tensor, peer: int, step: int) -> Tensor:
    """Of peer `peer` at its step `step`."""
    return PULL * weight + noise(tuple(weight.shape), 1 + peer, 100 * step + len(name))


def noise(shape: tuple[int, ...], first: int, second: int) -> Tensor:
    """Between -1/2 and 1/2; exact integers until the one division."""
    count = torch.Size(shape).numel()
    places = torch.arange(1, count + 1, dtype=torch.int64)
    mixed = (places * (7919 + 104729 * first) + second * 1299709) % 1_000_003
    return ((mixed * mixed) % 1009).to(torch.float32).view(shape) / 1008 - 0.5


class Weights(nn.Module):
    """The named weights as a module that computes nothing."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def set_gradients(self, peer: int, step: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.grad = gradient(name, parameter.detach(), peer, step)

    def as_lists(self) -> dict[str, object]:
        return {name: parameter.detach().tolist() for name, parameter in self.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, required=True, metavar="FILE")
    parser.add_argument("--gym", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    cases: dict[str, Callable[[int], dict[str, object]]] = {
        "demo-matrices": partial(run_demo, options.demo, "demo-matrices", MATRICES),
        "demo-vectors": partial(run_demo, options.demo, "demo-vectors", VECTORS),
        "diloco": partial(run_diloco, options.gym),
    }
    found: dict[str, object] = {"DeMo": DEMO_COMMIT, "gym": GYM_COMMIT, "torch": str(torch.__version__)}
    for name, case in cases.items():
        found[name] = on_all_peers(case)
    FILE.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def on_all_peers(case: Callable[[int], dict[str, object]]) -> dict[str, object]:
    """What the first peer ends with."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        processes: Any = importlib.import_module("torch.multiprocessing")
        processes.spawn(_run_peer, (case, files), nprocs=PEERS)
        read: dict[str, object] = json.loads((files / "0.json").read_text())
        return read


def _run_peer(peer: int, case: Callable[[int], dict[str, object]], folder: Path) -> None:
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=peer, world_size=PEERS)
    (folder / f"{peer}.json").write_text(json.dumps(case(peer)))
    torch.distributed.destroy_process_group()


def run_demo(file: Path, name: str, shapes: Shapes, peer: int) -> dict[str, object]:
    """`DeMo` as its repository has it."""
    found = importlib.util.spec_from_file_location("demo", file)
    assert found is not None and found.loader is not None
    demo: Any = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    model = Weights(weights(shapes))
    optimizer = demo.DeMo(list(model.parameters()), compression_topk=DEMO_KEPT[name], **DEMO)
    for step in range(DEMO_STEPS):
        model.set_gradients(peer, step)
        optimizer.step()
    return model.as_lists()


def run_diloco(folder: Path, peer: int) -> dict[str, object]:
    """The gym's `DiLoCoStrategy` with AdamW inside. It counts steps from 0 and meets where they are a multiple of H
    other than 0, after the step: so its first round has H + 1 of them. Where the model is on the CPU, as here, its
    first peer then shares memory with the master copy, and trains that too; that is undone after each step.
    """
    for package in ("exogym", "exogym.aux", "exogym.strategy"):
        # Their own `__init__` would import what the strategies do not need.
        module = ModuleType(package)
        module.__path__ = [str(folder.joinpath(*package.split(".")))]
        sys.modules[package] = module
    diloco: Any = importlib.import_module("exogym.strategy.diloco")
    inner = diloco.OptimSpec(torch.optim.AdamW, lr=INNER_LR, betas=(0.9, 0.95), weight_decay=0.0)
    outer = diloco.OptimSpec(torch.optim.SGD, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    strategy = diloco.DiLoCoStrategy(inner, outer, DILOCO_STEPS)
    strategy.lr_scheduler = None
    model = Weights(weights(MATRICES))
    strategy._init_node(model, peer, PEERS)
    for step in range(DILOCO_STEPS * DILOCO_ROUNDS + 1):
        model.set_gradients(peer, step)
        strategy.step()
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model.as_lists()


if __name__ == "__main__":
    main()
