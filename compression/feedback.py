"""Error feedback for the caller: the bytes of what one wants to send, and what the receivers will not have decoded."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from compression.seam import Compressor, TensorSpec


def compress_with_residual(compressor: Compressor, wanted: Mapping[str, Tensor]) -> tuple[bytes, dict[str, Tensor]]:
    """The packed contribution and `residual = wanted - decoded`, with `decoded` the very bits a receiver computes.

    Tensors travel in the order of their names. Raises `ValueError` naming a tensor that is not finite.
    """
    names = sorted(wanted)
    packets = compressor.compress_all(wanted)
    specs = {name: TensorSpec.of(wanted[name]) for name in names}
    data = compressor.pack(packets, [specs[name] for name in names])
    decoded = decode(compressor, data, specs)
    return data, {name: wanted[name].detach() - decoded[name].to(wanted[name].device) for name in names}


def decode(compressor: Compressor, data: bytes, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """What a receiver makes of the bytes, on the CPU; raises `InvalidPacket`."""
    names = sorted(specs)
    ordered = [specs[name] for name in names]
    tensors = compressor.decompress_all(compressor.unpack(data, ordered), ordered)
    return dict(zip(names, tensors, strict=True))
