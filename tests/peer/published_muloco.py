"""Runs facebookresearch/MuLoCo for test_published.py: Muon inside, torchft's DiLoCo around it, compressed outer steps.

    python -m tests.peer.published_muloco MuLoCo

`MuLoCo` is a checkout of github.com/facebookresearch/MuLoCo at the commit below; it needs einops. Of its two packages,
torchtitan and torchft, only the modules are loaded that have a step: `muon.py` and what it imports,
`quantized_outer_sgd.py` and `local_sgd.py`. torchft's manager is a program in Rust; `Manager` below does for members
that never fail what `local_sgd.py` asks of it. The Triton kernels that `muon.py` imports need a GPU and are not used.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tests.peer.published import (
    PEERS,
    ROUNDS,
    STEPS,
    VECTORS,
    Weights,
    checkout_from,
    keep,
    on_all_peers,
    stand_in,
    weights,
)

FILE = Path(__file__).with_suffix(".json")
COMMIT = "475bbf4cc05ea404919f6d271285678728d5fc4f"
SHAPES = {"down": (16, 25), "up": (25, 8), **VECTORS}
MUON: dict[str, Any] = {
    "lr": 2**-7,
    "mu": 1 - 2**-4,
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "nesterov": True,
    "adjust_lr": "rms_norm",
}
"""Powers of two, so that bfloat16 rounds both alike: torch's Muon multiplies by 1 - mu what this one does not, and not
in bfloat16 by the learning rate, which for matrices with a longer side of 25 is scaled by 0.2 * sqrt(25).
"""
OUTER: dict[str, Any] = {"lr": 0.8, "momentum": 0.8, "nesterov": True}
DECAY = 0.9
FRAGMENTS = (("down",), ("bias", "gain", "up"))
CASES: dict[str, dict[str, object]] = {
    "muon": {},
    "plain": {},
    "topk": {"compressor_type": "topk", "topk_sparsity_ratio": 0.125},
    "statistical": {"compressor_type": "statistical", "quantization_bins": 4, "quantization_range": 6},
}


def main() -> None:
    folder = checkout_from("MuLoCo", __doc__)
    found = {case: on_all_peers(partial(run, folder, case))[0] for case in CASES}
    keep(FILE, COMMIT, found | {"fragments": on_all_peers(partial(run_fragments, folder))[0]})


class Manager:
    """Of `torchft.manager.Manager` what DiLoCo calls, for a group that is always whole."""

    _use_async_quorum = False

    def register_state_dict_fn(self, *_: object) -> None: ...

    def start_quorum(self) -> None: ...

    def errored(self) -> None: ...

    def should_commit(self) -> bool:
        return True

    def allreduce(self, tensor: Tensor, should_quantize: bool) -> torch.futures.Future[Tensor]:
        assert not should_quantize
        torch.distributed.all_reduce(tensor)
        return _done(tensor.div_(PEERS))

    def allgather(self, tensor: Tensor) -> torch.futures.Future[list[Tensor]]:
        gathered = [torch.zeros_like(tensor) for _ in range(PEERS)]
        torch.distributed.all_gather(gathered, tensor)
        return _done(gathered)


def run(folder: Path, case: str, peer: int) -> object:
    """One peer of a run. Its first round has H + 1 steps: after the first one DiLoCo only asks for its quorum."""
    model = Weights(weights(SHAPES))
    inner, outer = _inner(folder, case, model), _outer(folder, case, model)
    with _local_sgd(folder).DiLoCo(Manager(), [model], inner, outer, STEPS, use_quantized_outer_sgd=bool(CASES[case])):
        for step in range(STEPS * ROUNDS + 1):
            model.set_gradients(peer, step)
            inner.step()
    return model.as_lists()


def run_fragments(folder: Path, peer: int) -> object:
    """torchft's Streaming DiLoCo without delay: two fragments that take turns, torch's AdamW inside. Here the quorum
    comes after a step without gradients, which does nothing. The anchor is what each fragment remembers.
    """
    values = weights(SHAPES)
    parts = [Weights({name: values[name] for name in names}) for names in FRAGMENTS]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    inner = torch.optim.AdamW(parameters, MUON["lr"], MUON["betas"], weight_decay=MUON["weight_decay"])
    outer = [torch.optim.SGD(part.parameters(), maximize=True, **OUTER) for part in parts]
    with _local_sgd(folder).DiLoCo(Manager(), parts, inner, outer, STEPS) as diloco:
        inner.step()
        for step in range(STEPS * ROUNDS):
            for part in parts:
                part.set_gradients(peer, step)
            inner.step()
    anchors = [fragment.original_parameters for fragment in diloco._fragments]
    return {name: value.tolist() for anchor in anchors for name, value in anchor.items()}


def _local_sgd(folder: Path) -> Any:
    stand_in("torchft", folder / "torchft" / "torchft")
    stand_in("torchft.manager", Manager=Manager)
    return importlib.import_module("torchft.local_sgd")


def _inner(folder: Path, case: str, model: Weights) -> Any:
    """Muon for the matrices and AdamW for the vectors, as the program sorts them, or its AdamW for all. What it has
    compiled runs uncompiled. Its Newton-Schulz steps are an argument: those passed are torch's, with its polynomial.
    """
    torch.compiler.set_stance("force_eager")
    _open_torchtitan(folder)
    stand_in(f"{_DION}.newton_schulz_triton", newton_schulz_triton=None)
    stand_in(f"{_DION}.polar_express_triton", polar_express=None)
    muon = importlib.import_module(f"{_DION}.muon")
    config = muon.MuonOptimizerConfig(algorithm="muon" if case == "muon" else "adamw", **MUON)
    return muon.Muon(muon.create_parameter_groups([model], config), newton_schulz_func=newton_schulz, **MUON)


def newton_schulz(matrix: Tensor, epsilon: Tensor) -> Tensor:
    torchs: Any = importlib.import_module("torch.optim._muon")
    coefficients = (torchs.DEFAULT_A, torchs.DEFAULT_B, torchs.DEFAULT_C)
    orthogonal: Tensor = torchs._zeropower_via_newtonschulz(matrix, coefficients, torchs.DEFAULT_NS_STEPS, torchs.EPS)
    return orthogonal


def _outer(folder: Path, case: str, model: Weights) -> Any:
    """As its configurations have it: torch's SGD, upwards since its pseudo-gradients point downhill, or the compressing
    one, which multiplies by its learning rate twice.
    """
    if not CASES[case]:
        return torch.optim.SGD(model.parameters(), maximize=True, **OUTER)
    _open_torchtitan(folder)
    outer = importlib.import_module("torchtitan.components.quantized_outer_sgd")
    return outer.QuantizedOuterSGD(
        model.parameters(), error_decay=DECAY, simulate_quantization_after_reduce=False, **OUTER, **CASES[case]
    )


_Result = TypeVar("_Result")
_DION = "torchtitan.experiments.dion_optimizer"


def _open_torchtitan(folder: Path) -> None:
    stand_in("torchtitan", folder / "torchtitan" / "torchtitan")
    stand_in(_DION, folder.joinpath("torchtitan", *_DION.split(".")))


def _done(result: _Result) -> torch.futures.Future[_Result]:
    future: torch.futures.Future[_Result] = torch.futures.Future()
    future.set_result(result)
    return future


if __name__ == "__main__":
    main()
