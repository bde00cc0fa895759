"""A compressor that unpacks each contribution once: it is checked when it comes, and merged when it is committed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import final

from torch import Tensor

from compression.seam import Compressor, Flat, Packet, TensorSpec

_Key = tuple[bytes, tuple[TensorSpec, ...]]


@final
class Remembering(Compressor):
    """Wraps another compressor; the newest `payloads_max` results of `unpack` are kept. Packets never change."""

    def __init__(self, compressor: Compressor, payloads_max: int = 64, bytes_max: int = 64 * 2**20) -> None:
        self._compressor = compressor
        self._payloads_max = payloads_max
        self._bytes_max = bytes_max
        self._unpacked: OrderedDict[_Key, list[Packet]] = OrderedDict()
        self._size_bytes = 0
        self._lock = Lock()
        """Of the two above: what comes is checked in one thread and merged in another."""

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
        """May be called from several threads at once."""
        key = data, tuple(specs)
        with self._lock:
            known = self._unpacked.get(key)
        if known is not None:
            return known
        packets = self._compressor.unpack(data, specs)
        with self._lock:
            self._keep(key, packets)
        return packets

    def _keep(self, key: _Key, packets: list[Packet]) -> None:
        if key not in self._unpacked:  # Another thread may have unpacked the same meanwhile.
            self._unpacked[key] = packets
            self._size_bytes += len(key[0])
        while len(self._unpacked) > self._payloads_max or self._size_bytes > self._bytes_max:
            (oldest, _), _ = self._unpacked.popitem(last=False)
            self._size_bytes -= len(oldest)
