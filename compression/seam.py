"""The `Compressor` seam: a tensor to a packet, a packet to coefficients, coefficients to a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

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
    `levels` is one entry a kept coefficient; `scales` one or more per block, as the quantiser defines.
    """

    indices: Tensor | None
    levels: Tensor
    scales: Tensor


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

    @abstractmethod
    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        """The packets of one contribution as bytes, coded together."""

    @abstractmethod
    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        """Parses a stranger's bytes under limits that follow from `specs`; raises `InvalidPacket`."""
