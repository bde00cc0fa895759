"""What the codec benchmark compares with, if it is there: hivemind's compressions and the published DeMo optimiser."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Rival:
    """`encode` gives something and how many bits it is; `decode` takes that something."""

    name: str
    k: int | None
    bits: int
    values: int
    encode: Callable[[], tuple[Any, int]]
    decode: Callable[[Any], list[Tensor]]


def hivemind_rivals(tensors: Tensors) -> list[Rival]:
    try:
        compression = importlib.import_module("hivemind.compression")
    except ImportError:
        print("hivemind is not installed: its compressions are left out")
        return []
    kinds = {"Float16": 16, "ScaledFloat16": 16, "Uniform8Bit": 8, "Quantile8Bit": 8}
    if importlib.util.find_spec("bitsandbytes") is not None:
        kinds["Blockwise8Bit"] = 8
    names = {
        "Float16": "Float16Compression",
        "ScaledFloat16": "ScaledFloat16Compression",
        "Uniform8Bit": "Uniform8BitQuantization",
        "Quantile8Bit": "Quantile8BitQuantization",
        "Blockwise8Bit": "BlockwiseQuantization",
    }
    return [
        _hivemind(f"hivemind {kind}", getattr(compression, names[kind])(), compression, bits, tensors)
        for kind, bits in kinds.items()
    ]


def _hivemind(name: str, codec: Any, compression: ModuleType, bits: int, tensors: Tensors) -> Rival:
    infos = [compression.CompressionInfo.from_tensor(tensor) for tensor in tensors.values()]

    def encode() -> tuple[Any, int]:
        sent = [codec.compress(tensor, info) for tensor, info in zip(tensors.values(), infos, strict=True)]
        return sent, 8 * sum(len(message.buffer) for message in sent)

    def decode(sent: Any) -> list[Tensor]:
        try:
            return [codec.extract(message) for message in sent]
        except TypeError:  # hivemind 1.1.12 reads the length of a codebook in a way that numpy 2.4 refuses.
            return [_decoded_codebook(message) for message in sent]

    return Rival(name, None, bits, sum(tensor.numel() for tensor in tensors.values()), encode, decode)


def _decoded_codebook(message: Any) -> Tensor:
    """A length, so many float32, then their indices (uint8)."""
    length = int(np.frombuffer(message.buffer, count=1, dtype=np.int64)[0])
    codebook = np.frombuffer(message.buffer, offset=8, count=length, dtype=np.float32)
    indices = np.frombuffer(message.buffer, offset=8 + 4 * length, dtype=np.uint8)
    return torch.from_numpy(codebook[indices]).view(*message.size)


@dataclass(frozen=True)
class DeMo:
    """The published `demo.py`, its transform and its top-k, on the same tensors."""

    rival: Rival
    merge: Callable[[int], list[Tensor]]  # What so many peers sent, merged and decoded.


def load_demo(path: Path) -> ModuleType:
    """Raises `SystemExit` that says what is missing."""
    spec = importlib.util.spec_from_file_location("published_demo", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"--demo {path}: not a Python file (demo.py of github.com/bloc97/DeMo is meant)")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise SystemExit(f"--demo {path}: needs a package that is not installed ({error})") from error
    return module


def demo_rival(demo: ModuleType, tensors: Tensors, kept: int = 32) -> DeMo:
    """Indices are int64 and values float32, as the published code sends them."""
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors.values()]
    transform, compress = demo.TransformDCT([{"params": parameters}], 64), demo.CompressDCT()

    def encode() -> tuple[Any, int]:
        sent = [compress.compress(transform.encode(tensor), kept) for tensor in tensors.values()]
        return sent, 8 * sum(index.nbytes + value.nbytes for index, value, _, _ in sent)

    def decode(sent: Any) -> list[Tensor]:
        pairs = zip(parameters, sent, strict=True)
        return [transform.decode(compress.decompress(parameter, *part)) for parameter, part in pairs]

    sent, _ = encode()

    def merge(peers: int) -> list[Tensor]:
        return [
            transform.decode(compress.batch_decompress(parameter, [index] * peers, [value] * peers, shape, total))
            for parameter, (index, value, shape, total) in zip(parameters, sent, strict=True)
        ]

    values = sum(value.numel() for _, value, _, _ in sent)
    return DeMo(Rival("DeMo as published", kept, 32, values, encode, decode), merge)
