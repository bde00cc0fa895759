"""A compressor as a chain of three values: transform, selection, quantiser; named by text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor

from compression import codec
from compression.quantise import Bits, Floats, Values
from compression.seam import Compressor, Packet, TensorSpec
from compression.select import All, Selection, TopK
from compression.transform import Dct, Identity, Transform


@final
@dataclass(frozen=True, slots=True)
class Chain(Compressor):
    """`str(chain)` is its name, `parse_chain` the inverse: `dct(64) topk(32/4096) bits(1)`, `identity all fp16`."""

    transform: Transform
    selection: Selection
    values: Values

    def compress(self, tensor: Tensor) -> Packet:
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"a tensor of {tensor.dtype} cannot be compressed, only floating-point ones")
        coefficients = self.transform.forward(tensor)
        if coefficients.numel():
            low, high = torch.aminmax(coefficients)  # One pass; NaN passes through both.
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                raise ValueError("a tensor with NaN, infinity or values near the float32 limit cannot be compressed")
        indices = self.selection.select(coefficients)
        values = coefficients if indices is None else coefficients[indices]
        levels, scales = self.values.quantise(values, self.values.blocks(len(values), self.selection.alike))
        return Packet(indices, levels, scales)

    def values_of(self, packet: Packet) -> Tensor:
        return self.values.dequantise(packet.levels, packet.scales)

    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        values = self.values_of(packet)
        if packet.indices is None:
            return values
        coefficients = torch.zeros(self.transform.size(spec.shape), dtype=torch.float32, device=values.device)
        return coefficients.index_copy_(0, packet.indices, values)

    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        return self.transform.inverse(coefficients, spec.shape).to(spec.dtype)

    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        return codec.pack(packets, self.frame(specs))

    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        return codec.unpack(data, self.frame(specs))

    def size_estimate(self, specs: list[TensorSpec]) -> int:
        """About how many bytes a contribution takes."""
        return codec.size_estimate(self.frame(specs))

    def size_max(self, specs: list[TensorSpec]) -> int:
        """At most how many bytes a contribution takes; `unpack` refuses more."""
        return codec.size_max(self.frame(specs))

    def frame(self, specs: list[TensorSpec]) -> codec.Frame:
        return codec.Frame(tuple(self.transform.size(spec.shape) for spec in specs), self.selection, self.values)

    def __str__(self) -> str:
        return f"{self.transform} {self.selection} {self.values}"


def parse_chain(text: str) -> Chain:
    """`<transform> <selection> <values>`; raises `ValueError` that names the word and lists what exists."""
    words = text.split()
    if len(words) != 3:
        raise ValueError(
            f"compressor {text!r}: needs three words, a transform ({_exists(_TRANSFORMS)}), a selection"
            f" ({_exists(_SELECTIONS)}) and values ({_exists(_VALUES)})"
        )
    return Chain(
        _parse_word(words[0], "transform", _TRANSFORMS),
        _parse_word(words[1], "selection", _SELECTIONS),
        _parse_word(words[2], "values", _VALUES),
    )


# The form of each word, with a letter where a number stands, and what makes it.
_TRANSFORMS: Mapping[str, Callable[..., Transform]] = {"dct(n)": Dct, "identity": Identity}
_SELECTIONS: Mapping[str, Callable[..., Selection]] = {"topk(k/n)": TopK, "all": All}
_VALUES: Mapping[str, Callable[..., Values]] = {
    "fp32": partial(Floats, "fp32"),
    "bf16": partial(Floats, "bf16"),
    "fp16": partial(Floats, "fp16"),
    "bits(b)": Bits,
}
_Word = TypeVar("_Word")


def _parse_word(word: str, kind: str, makers: Mapping[str, Callable[..., _Word]]) -> _Word:
    for form, make in makers.items():
        pattern = re.sub(r"\\\((.*)\\\)", _numbers, re.escape(form))
        if match := re.fullmatch(pattern, word, flags=re.ASCII):
            return make(*map(int, match.groups()))
    raise ValueError(f"compressor: {kind} {word!r} does not exist; there are {_exists(makers)}")


def _numbers(match: re.Match[str]) -> str:
    return r"\(" + re.sub(r"[a-z]", r"(\\d{1,9})", match[1]) + r"\)"


def _exists(makers: Mapping[str, Callable[..., object]]) -> str:
    return ", ".join(makers)
