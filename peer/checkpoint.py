"""A training state as files: safetensors for tensors, msgpack for the rest; nothing that can run code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from peer.method import TrainingState

ANCHOR, OUTER, RESIDUAL, META = "anchor.safetensors", "outer.safetensors", "residual.safetensors", "meta.msgpack"


def dump(state: TrainingState) -> dict[str, bytes]:
    """The state's files by name; the residual's only if there is one."""
    meta = msgpack.packb({"missed": sorted(state.missed)})
    files = {ANCHOR: _pack(state.anchor), OUTER: _pack(state.outer), META: meta}
    return files | ({RESIDUAL: _pack(state.residual)} if state.residual else {})


def load(files: Mapping[str, bytes], like: TrainingState) -> TrainingState:
    """The state in `files`; raises `ValueError` unless every tensor has the name, shape and type that `like` has."""
    anchor = _unpack(files, ANCHOR, like.anchor)
    outer = _unpack(files, OUTER, like.outer)
    residual = _unpack(files, RESIDUAL, like.anchor, partly=True) if RESIDUAL in files else {}
    try:
        meta: Any = msgpack.unpackb(files.get(META, b"\x80"))
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"{META}: {error}") from error
    missed = meta.get("missed") if isinstance(meta, dict) else None
    names = {name for name in missed if isinstance(name, str)} if isinstance(missed, list) else set()
    return TrainingState(anchor, outer, residual, frozenset(names & residual.keys()))


def _pack(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def _unpack(
    files: Mapping[str, bytes], name: str, like: Mapping[str, Tensor], *, partly: bool = False
) -> dict[str, Tensor]:
    if name not in files:
        raise ValueError(f"{name} is missing")
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(files[name])
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(f"{name}: {error}") from error
    if not tensors.keys() <= like.keys() or (tensors.keys() != like.keys() and not partly):
        raise ValueError(f"{name} holds other parameters: {sorted(tensors.keys() ^ like.keys())[:3]}")
    for key, tensor in tensors.items():
        if tensor.shape != like[key].shape or tensor.dtype != like[key].dtype or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}: {key} is {tuple(tensor.shape)} {tensor.dtype}, or not finite")
    return {key: tensors[key] for key in like if key in tensors}
