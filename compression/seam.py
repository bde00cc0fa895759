"""The `Compressor` seam: a tensor to a packet, a packet to coefficients, coefficients to a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


class InvalidPacket(ValueError):
    """A stranger's bytes that are not what they claim; the text names the field and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What both sides know beforehand about a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        return TensorSpec(tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Packet:
    """A compressed tensor as a value: which coefficients were kept, at which level, with which scales.

    `indices` are positions in the flattened coefficients, ascending; None when every coefficient is kept in order.
    `levels` is one entry a kept coefficient; `scales` one or more per block, as the quantiser defines. `seed`: where
    the indices were drawn by lot, what from.
    """

    indices: Tensor | None
    levels: Tensor
    scales: Tensor
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Flat:
    """One contribution's coefficients, all tensors one after the other: `values` (float32) at ascending `positions`
    of `size`, zero elsewhere; everywhere when `positions` is None.
    """

    positions: Tensor | None
    values: Tensor
    size: int

    def dense(self) -> Tensor:
        """All coefficients, perhaps a view."""
        return next(self.pieces(max(1, self.size)), self.values)

    def pieces(self, length: int) -> Iterator[Tensor]:
        """All coefficients in order, `length` at a time, perhaps views."""
        if self.positions is None:
            yield from self.values.split_with_sizes(
                [min(length, self.size - start) for start in range(0, self.size, length)]
            )
            return
        starts = torch.arange(0, self.size + length, length, device=self.positions.device)
        bounds = torch.searchsorted(self.positions, starts).tolist()
        for number, start in enumerate(range(0, self.size, length)):
            low, high = bounds[number], bounds[number + 1]
            part = torch.zeros(min(length, self.size - start), dtype=torch.float32, device=self.values.device)
            yield part.index_copy_(0, self.positions[low:high] - start, self.values[low:high])


class Compressor(ABC):
    """Stateless; the residual (error feedback) belongs to the caller: `residual = wanted - decompress(packet)`.

    `coefficients` and `restore` give the same bits on every device and thread count; `compress` need not.
    """

    @abstractmethod
    def compress(self, tensor: Tensor) -> Packet:
        """Any shape (scalar, empty, odd axes), float32 or bfloat16; raises `ValueError` on NaN or infinity."""

    @abstractmethod
    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        """The packet's values in the transform's domain, dense, float32; zero where nothing was sent."""

    @abstractmethod
    def values_of(self, packet: Packet) -> Tensor:
        """The kept coefficients alone, in the order of the packet, float32."""

    @abstractmethod
    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        """Back from the transform's domain to a tensor of `spec`; linear up to its own fixed rounding."""

    def decompress(self, packet: Packet, spec: TensorSpec) -> Tensor:
        return self.restore(self.coefficients(packet, spec), spec)

    def seeded(self, seed: int) -> Compressor:
        """Itself with another seed for what all peers of a round draw alike, where there is such a thing."""
        return self

    # All tensors of a contribution at once: the same bits as one by one, in fewer calls.

    def compress_all(self, tensors: Mapping[str, Tensor]) -> list[Packet]:
        """In the order of the names; raises `ValueError` naming a tensor that is not finite."""
        packets = []
        for name in sorted(tensors):
            try:
                packets.append(self.compress(tensors[name]))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return packets

    def flatten(self, packets: Sequence[Packet], specs: Sequence[TensorSpec]) -> Flat:
        """What every packet says, in the transform's domain."""
        parts = [self.coefficients(packet, spec) for packet, spec in zip(packets, specs, strict=True)]
        values = torch.cat(parts) if parts else torch.zeros(0)
        return Flat(None, values, len(values))

    def restore_all(self, coefficients: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """`coefficients`: flat, as those of `flatten`."""
        sizes = self.coefficient_counts(specs)
        parts = coefficients.split_with_sizes(sizes) if sizes else ()
        return [self.restore(part, spec) for part, spec in zip(parts, specs, strict=True)]

    def decompress_all(self, packets: Sequence[Packet], specs: Sequence[TensorSpec]) -> list[Tensor]:
        return [self.decompress(packet, spec) for packet, spec in zip(packets, specs, strict=True)]

    def coefficient_counts(self, specs: Sequence[TensorSpec]) -> list[int]:
        """How many coefficients stand for each tensor."""
        return [prod(spec.shape) for spec in specs]

    @abstractmethod
    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        """The packets of one contribution as bytes, coded together."""

    @abstractmethod
    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        """Parses a stranger's bytes under limits that follow from `specs`; raises `InvalidPacket`."""
