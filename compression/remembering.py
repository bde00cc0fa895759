"""A compressor that unpacks each contribution once: it is checked when it comes, and merged when it is committed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import final

from torch import Tensor

from compression.seam import Compressor, Flat, Packet, TensorSpec


@final
class Remembering(Compressor):
    """Wraps another compressor; the newest `payloads_max` results of `unpack` are kept. Packets never change."""

    def __init__(self, compressor: Compressor, payloads_max: int = 64, bytes_max: int = 64 * 2**20) -> None:
        self._compressor = compressor
        self._payloads_max = payloads_max
        self._bytes_max = bytes_max
        self._unpacked: OrderedDict[tuple[bytes, tuple[TensorSpec, ...]], list[Packet]] = OrderedDict()

    def compress(self, tensor: Tensor) -> Packet:
        return self._compressor.compress(tensor)

    def values_of(self, packet: Packet) -> Tensor:
        return self._compressor.values_of(packet)

    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        return self._compressor.coefficients(packet, spec)

    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        return self._compressor.restore(coefficients, spec)

    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        return self._compressor.pack(packets, specs)

    def seeded(self, seed: int) -> Compressor:
        """For compressing alone: what it unpacks is not remembered."""
        return self._compressor.seeded(seed)

    def compress_all(self, tensors: Mapping[str, Tensor]) -> list[Packet]:
        return self._compressor.compress_all(tensors)

    def flatten(self, packets: Sequence[Packet], specs: Sequence[TensorSpec]) -> Flat:
        return self._compressor.flatten(packets, specs)

    def restore_all(self, coefficients: Tensor, specs: Sequence[TensorSpec]) -> list[Tensor]:
        return self._compressor.restore_all(coefficients, specs)

    def decompress_all(self, packets: Sequence[Packet], specs: Sequence[TensorSpec]) -> list[Tensor]:
        return self._compressor.decompress_all(packets, specs)

    def coefficient_counts(self, specs: Sequence[TensorSpec]) -> list[int]:
        return self._compressor.coefficient_counts(specs)

    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        key = data, tuple(specs)
        known = self._unpacked.get(key)
        if known is not None:
            return known
        packets = self._compressor.unpack(data, specs)
        self._unpacked[key] = packets
        size = sum(len(payload) for payload, _ in self._unpacked)
        # Called from two threads: another may have removed the last one meanwhile.
        while self._unpacked and (len(self._unpacked) > self._payloads_max or size > self._bytes_max):
            try:
                (oldest, _), _ = self._unpacked.popitem(last=False)
            except KeyError:
                break
            size -= len(oldest)
        return packets
