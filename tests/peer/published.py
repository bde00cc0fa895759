"""What runs of published programs share: weights and gradients that every machine makes alike, processes, and files.

The programs are no part of this project, and none of their text is in it: published_*.py beside this file run each from
a checkout, unchanged, and keep the weights that it reaches, as numbers, in published_*.json for test_published*.py.
Each peer is a process of its own; they meet over gloo on the loopback interface.

Gradients are a formula of whole numbers and one division, so that any machine gives them the same bits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PEERS = 3
MATRICES = {"down": (16, 24), "up": (8, 16)}
VECTORS = {"bias": (24,), "gain": (40,)}
STEPS, ROUNDS = 4, 12
"""Inner steps of a round, and rounds."""
PULL = 0.25
"""How strongly gradients pull every weight to zero: so they depend on the weights."""

Shapes = Mapping[str, tuple[int, ...]]
Case = Callable[[int], object]
"""What a peer does, by its number, and what it has to say of it."""


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


def checkout_from(arguments: str, document: str | None) -> Path:
    """The path that the command line names."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, metavar=arguments)
    chosen: Path = parser.parse_args().checkout.resolve()
    return chosen


def keep(file: Path, commit: str, found: Mapping[str, object]) -> None:
    document = {"commit": commit, "torch": str(torch.__version__), **found}
    file.write_text(json.dumps(document, separators=(",", ":")) + "\n")


def stand_in(name: str, folder: Path | None = None, **members: object) -> None:
    """An empty module in the place of one that the program imports, or of the `__init__` of a package in `folder`,
    which would import what the run does not need.
    """
    module = ModuleType(name)
    if folder is not None:
        module.__path__ = [str(folder)]
    vars(module).update(members)
    sys.modules[name] = module


def on_all_peers(case: Case, peers: int = PEERS) -> list[Any]:
    """What each peer ends with."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        processes: Any = importlib.import_module("torch.multiprocessing")
        processes.spawn(_run_peer, (case, files, peers), nprocs=peers)
        return [json.loads((files / f"{peer}.json").read_text()) for peer in range(peers)]


def _run_peer(peer: int, case: Case, folder: Path, peers: int) -> None:
    torch.set_num_threads(1)
    store = (folder / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=peer, world_size=peers)
    (folder / f"{peer}.json").write_text(json.dumps(case(peer)))
    torch.distributed.destroy_process_group()
