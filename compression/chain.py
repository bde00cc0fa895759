"""A compressor as a chain of three values: transform, selection, quantiser; named by text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from math import ceil, isfinite, sqrt
from typing import TypeVar, final

import torch
from torch import Tensor

from compression import codec
from compression.quantise import Levels
from compression.seam import Compressor, Flat, Packet, TensorSpec
from compression.select import SEED_BITS, All, Drawn, GlobalTopK, Selection, TopK
from compression.slabs import slab_elements
from compression.together import SMALL, batches, compress_together
from compression.transform import Dct, Identity, Transform
from compression.values import Floats, Values


@final
@dataclass(frozen=True, slots=True)
class Chain(Compressor):
    """`str(chain)` is its name, `parse_chain` the inverse: `dct(64) topk(32/4096) bits(1)`, `identity all fp16`.

    `seed` is what a `mask` draws from; it travels in the packet and is no part of the name.
    """

    transform: Transform
    selection: Selection
    values: Values
    seed: int = 0

    def compress(self, tensor: Tensor) -> Packet:
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"a tensor of {tensor.dtype} cannot be compressed, only floating-point ones")
        size = self.transform.size(tuple(tensor.shape))
        chunks = self.selection.chunks(size)
        indices: list[Tensor] = []
        values: list[Tensor] = []
        seed = self._seed_of(tensor)
        drawn = self.selection.draw(size, seed) if self.selection.drawn else None
        whole = size if drawn is not None or chunks is None else chunks.length
        for start, piece in self.transform.pieces(tensor, max(1, whole)):
            _check_finite(piece)
            chosen = self.selection.select(piece, size, start) if drawn is None else drawn
            values.append(piece if chosen is None else piece[chosen - start])
            if chosen is not None:
                indices.append(chosen)
        joined = values[0] if len(values) == 1 else torch.cat(values)
        levels, scales = self.values.quantise(joined, self.values.blocks(len(joined), self.selection.alike))
        return Packet(torch.cat(indices) if indices else None, levels, scales, seed)

    def compress_all(self, tensors: Mapping[str, Tensor]) -> list[Packet]:
        packets: list[Packet] = []
        for names in batches(tensors) if isinstance(self.selection, TopK) else [[name] for name in sorted(tensors)]:
            together = None
            if isinstance(self.selection, TopK) and len(names) > 1:
                chosen = [tensors[name] for name in names]
                together = compress_together(chosen, self.transform, self.selection, self.values)
            packets += together or Compressor.compress_all(self, {name: tensors[name] for name in names})
        return packets

    def _seed_of(self, tensor: Tensor) -> int:
        if not isinstance(self.selection, Drawn):
            return 0
        return self.seed if self.selection.shared else self.selection.seed_of(tensor)

    def seeded(self, seed: int) -> Chain:
        return replace(self, seed=seed % 2**SEED_BITS)

    def values_of(self, packet: Packet) -> Tensor:
        return self.values.dequantise(packet.levels, packet.scales)

    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        return self.flatten([packet], [spec]).dense()

    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        return self.transform.inverse(coefficients, spec.shape).to(spec.dtype)

    def decompress(self, packet: Packet, spec: TensorSpec) -> Tensor:
        values = self.values_of(packet)
        if packet.indices is None:
            return self.restore(values, spec)
        return self.transform.inverse_sparse(packet.indices, values, spec.shape).to(spec.dtype)

    def flatten(self, packets: Sequence[Packet], specs: Sequence[TensorSpec]) -> Flat:
        sizes = self.coefficient_counts(specs)
        values = self._all_values(packets)
        if not packets or packets[0].indices is None:
            return Flat(None, values, sum(sizes))
        starts = [0, *accumulate(sizes)]
        positions = [p.indices + start for p, start in zip(packets, starts, strict=False) if p.indices is not None]
        return Flat(positions[0] if len(positions) == 1 else torch.cat(positions), values, sum(sizes))

    def _all_values(self, packets: Sequence[Packet]) -> Tensor:
        """Small tensors in one go, each value with the scales of its block."""
        if len(packets) == 1:
            return self.values_of(packets[0])
        if sum(len(packet.levels) for packet in packets) > slab_elements(torch.device("cpu")):
            return torch.cat([self.values_of(packet) for packet in packets])
        if not packets:
            return torch.zeros(0)
        levels = torch.cat([packet.levels for packet in packets])
        columns: list[Tensor] = []
        if self.values.scale_columns:
            runs: list[int] = []
            for packet in packets:
                rows, count = len(packet.scales), len(packet.levels)
                length = ceil(count / rows) if rows else 0
                runs += [length] * (rows - 1) + [count - length * (rows - 1)] * (rows > 0)
            scales = torch.cat([packet.scales for packet in packets])
            columns = list(
                scales.repeat_interleave(torch.tensor(runs, dtype=torch.int64, device=scales.device), dim=0).T
            )
        return self.values.values_at(levels, columns)

    def restore_all(self, coefficients: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
        restored = self.transform.inverse_all(coefficients, [spec.shape for spec in specs])
        return [tensor.to(spec.dtype) for tensor, spec in zip(restored, specs, strict=True)]

    def decompress_all(self, packets: Sequence[Packet], specs: Sequence[TensorSpec]) -> list[Tensor]:
        counts = self.coefficient_counts(specs)
        small = [place for place, count in enumerate(counts) if count <= SMALL]
        chosen = [specs[place] for place in small]
        together = self.restore_all(self.flatten([packets[place] for place in small], chosen).dense(), chosen)
        restored = dict(zip(small, together, strict=True))
        pairs = enumerate(zip(packets, specs, strict=True))
        return [restored[place] if place in restored else self.decompress(*pair) for place, pair in pairs]

    def coefficient_counts(self, specs: Sequence[TensorSpec]) -> list[int]:
        return [self.transform.size(spec.shape) for spec in specs]

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

    def error_bound(self, specs: Sequence[TensorSpec]) -> float:
        """No tensors of these shapes, their coefficients in 2^-60 .. 2^100 or 0, have |decoded - sent| / |sent| above
        this (Euclidean, over all of them). Usual tensors have far less: this is what error feedback may rely on.
        """
        worst = 0.0
        for spec in specs:
            size = self.transform.size(spec.shape)
            if not size:
                continue
            chunks = self.selection.chunks(size)
            count = size if chunks is None else int(chunks.capacities().sum())
            share = self.selection.kept_share(size)
            values = self.values.error_bound(count, self.selection.alike)
            bound = sqrt(1 - share * (1 - values**2)) + 2 * self.transform.error_bound
            rounding = 0.0 if spec.dtype == torch.float32 else torch.finfo(spec.dtype).eps
            worst = max(worst, bound + rounding * (1 + bound))
        return worst

    def frame(self, specs: Sequence[TensorSpec]) -> codec.Frame:
        return codec.Frame(
            name=str(self),
            sizes=tuple(self.transform.size(spec.shape) for spec in specs),
            selection=self.selection,
            values=self.values,
            layout=codec.layout_of(specs),
        )

    def __str__(self) -> str:
        return f"{self.transform} {self.selection} {self.values}"


def _check_finite(coefficients: Tensor) -> None:
    if coefficients.numel():
        low, high = torch.aminmax(coefficients)  # One pass; NaN passes through both.
        if not (isfinite(low.item()) and isfinite(high.item())):
            raise ValueError("a tensor with NaN, infinity or values near the float32 limit cannot be compressed")


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
_SELECTIONS: Mapping[str, Callable[..., Selection]] = {
    "topk(k/n)": TopK,
    "globaltopk(k/n)": GlobalTopK,
    "random(k/n)": partial(Drawn, "random"),
    "mask(k/n)": partial(Drawn, "mask"),
    "all": All,
}
_VALUES: Mapping[str, Callable[..., Values]] = {
    "fp32": partial(Floats, "fp32"),
    "bf16": partial(Floats, "bf16"),
    "fp16": partial(Floats, "fp16"),
    "bits(b)": lambda bits: Levels(f"bits({bits})"),
    "int(b)": lambda bits: Levels(f"int({bits})"),
    "e3m0": partial(Levels, "e3m0"),
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
