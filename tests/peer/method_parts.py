"""The plainest compressor, small models with made-up data, and states to begin with: for tests of a round's tensors."""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compression.seam import Compressor, InvalidPacket, Packet, TensorSpec
from optimizers.presets import Method, method_from_settings
from peer.method import Contribution, Rules, TrainingState, make_payload, rules_of
from peer.trainer import Trainer


class TopK(Compressor):
    """The `k` largest values of a tensor (0: all), as float32: the plainest compressor, to compare with."""

    def __init__(self, k: int = 0) -> None:
        self.k = k

    def compress(self, tensor: Tensor) -> Packet:
        if not bool(tensor.isfinite().all()):
            raise ValueError("not finite")
        flat = tensor.reshape(-1).float()
        kept = min(self.k or flat.numel(), flat.numel())
        indices = flat.abs().topk(kept).indices.sort().values
        return Packet(indices, flat[indices], torch.zeros(0))

    def values_of(self, packet: Packet) -> Tensor:
        return packet.levels

    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        dense = torch.zeros(torch.Size(spec.shape).numel())
        assert packet.indices is not None
        dense[packet.indices] = packet.levels
        return dense

    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        return coefficients.view(spec.shape)

    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        parts = []
        for packet in packets:
            assert packet.indices is not None
            pairs = zip(packet.indices.tolist(), packet.levels.tolist(), strict=True)
            parts.append(b"".join(struct.pack("<If", *pair) for pair in pairs))
        return b"".join(struct.pack("<I", len(part)) + part for part in parts)

    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        packets = []
        for spec in specs:
            (size,) = struct.unpack_from("<I", data.ljust(4, b"\0"))
            pairs, data = list(struct.iter_unpack("<If", data[4 : 4 + size])), data[4 + size :]
            indices = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64)
            if len(pairs) and int(indices.max()) >= torch.Size(spec.shape).numel():
                raise InvalidPacket("index out of range")
            packets.append(Packet(indices, torch.tensor([pair[1] for pair in pairs]), torch.zeros(0)))
        return packets


def parse_test_chain(text: str) -> Compressor:
    return TopK(int(text.removeprefix("topk"))) if text.startswith("topk") else TopK()


def rules(preset: str, chain: str = "all", **overrides: object) -> Rules:
    constant = {"schedule.kind": "constant", "schedule.warmup": 0}
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    return rules_of(method_from_settings(preset, constant | {"chain": chain} | settings), parse_test_chain)


def toy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def toy_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch[:, :6]), batch[:, 6:])


def toy_batch(peer: int, round_index: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(peer * 1_000_003 + round_index * 1_009 + step)
    x = torch.randn(8, 6, generator=generator)
    return torch.cat((x, torch.stack((x[:, 0], x[:, 1] - x[:, 2], x.sum(1) / 3), dim=1)), dim=1)


def toy_trainer(method: Method, peer: int) -> Trainer:
    return Trainer(toy_model(), toy_loss, lambda round_index, step: toy_batch(peer, round_index, step), method)


RESIDUAL = {"w": torch.tensor([1.0, -2.0, 4.0])}
DELTA = {"w": torch.tensor([10.0, 20.0, -30.0])}


def start(chosen: Rules, *, missed: bool = False, residual: dict[str, Tensor] | None = None) -> TrainingState:
    anchor = {"w": torch.tensor([0.5, 0.25, 0.125])}
    owed = frozenset(anchor) if missed else frozenset()
    return TrainingState(anchor, chosen.outer.init(anchor), RESIDUAL if residual is None else residual, owed)


def contribution(peer: str, tensors: dict[str, Tensor], chosen: Rules) -> Contribution:
    return Contribution(peer, 100, make_payload(tensors, chosen.compressor))
