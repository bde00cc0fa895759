"""Training by rounds reaches the weights that published programs reach: numbers that published_*.py have written down.

Where they differ on purpose, the settings here say so: what is compared is what both can do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from averaging.merge import MeanOfSenders, Merge
from compression.chain import Chain, parse_chain
from compression.merging import split_flat
from compression.seam import Compressor, Flat, Packet, TensorSpec
from optimizers.presets import method_from_settings
from peer.fragments import fragments_of
from peer.method import Rules, rules_of
from tests.peer import published, published_demo, published_gym, published_muloco, published_templar
from tests.peer.published import ROUNDS, STEPS
from tests.peer.published_parts import CONSTANT, assert_reached, numbers, rounds_from, streamed, trained


def rules_with(preset: str, parse: Callable[[str], Compressor] = parse_chain, **settings: object) -> Rules:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return rules_of(method_from_settings(preset, {**CONSTANT, **overrides}), parse)


@pytest.mark.parametrize(
    ("case", "shapes", "chain"),
    [
        ("matrices", published.MATRICES, "dct(8) topk({}/64) fp32"),
        ("vectors", published.VECTORS, "dct(8) topk({}/8) fp32"),
    ],
)
def test_distro_is_the_published_demo(case: str, shapes: published.Shapes, chain: str) -> None:
    """DeMo multiplies gradients by the learning rate before it adds them up, this one steps by it: the same signs as
    long as it is constant. It keeps k of every tile, also of a vector's, which has n coefficients and not n * n: for
    vectors the chain says so.
    """
    demo = published_demo.SETTINGS
    rules = rules_with(
        "distro",
        chain=chain.format(published_demo.KEPT[case]),
        merge="mean_of_senders",
        outer__lr=demo["lr"],
        outer__weight_decay=demo["weight_decay"],
        residual_decay=demo["compression_decay"],
    )
    anchor = trained(rules, shapes, [range(step, step + 1) for step in range(published_demo.STEPS)])
    assert_reached(anchor, numbers(published_demo.FILE)[case], shapes)


def test_diloco_is_the_gyms() -> None:
    """The gym's first round has one step more; it has no clipping of its own accord and weighs all peers alike."""
    rules = rules_with(
        "diloco",
        chain="identity all fp32",
        merge="mean",
        inner__lr=published_gym.INNER_LR,
        inner_steps=STEPS,
        outer__lr=published_gym.OUTER_LR,
        outer__momentum=published_gym.OUTER_MOMENTUM,
    )
    anchor = trained(rules, published.MATRICES, rounds_from(STEPS + 1))
    assert_reached(anchor, numbers(published_gym.FILE)["diloco"], published.MATRICES)


@pytest.mark.parametrize(
    ("case", "chain"),
    [
        ("plain", "identity all fp32"),
        ("topk", "identity globaltopk(1/8) fp32"),
        ("statistical", "identity all fp32"),
    ],
)
def test_mulocos_outer_side_is_the_published_one(case: str, chain: str) -> None:
    """Error feedback with decay, the mean, Nesterov; inside here AdamW for all. The program multiplies by the outer
    learning rate once in error feedback and once more in the outer step, so its eta is the square root of the one here.
    Top-k is over whole tensors. Its book of four levels is not ours: so the chain sends what `FourBins` makes of it.
    """
    rules = muloco_rules(case, FourBins if case == "statistical" else parse_chain, chain=chain, inner__kind="adamw")
    anchor = trained(rules, published_muloco.SHAPES, rounds_from(STEPS + 1))
    assert_reached(anchor, numbers(published_muloco.FILE)[case], published_muloco.SHAPES)


def test_muloco_is_the_published_one_but_for_bfloat16() -> None:
    """Muon for matrices inside, its Newton-Schulz steps torch's in both (the program has a polynomial for each of them,
    takes no Nesterov by default, and scales by another rule; this one is the other that it has). Its products are in
    bfloat16: each machine rounds them by its own lights, and the last bit of a weight may turn one of theirs. Wherever
    they fall, or in float32, the weights stay within 1e-3; where a setting is wrong, they are off by 6e-3 and more.
    """
    anchor = trained(muloco_rules("muon"), published_muloco.SHAPES, rounds_from(STEPS + 1))
    assert_reached(anchor, numbers(published_muloco.FILE)["muon"], published_muloco.SHAPES, apart=2e-3)


def test_fragments_are_torchfts() -> None:
    """Streaming DiLoCo as MuLoCo's torchft has it, without delay: with one it undoes what was trained meanwhile, or
    blends and counts a share of what was said again; here every step is said once.
    """
    steps = STEPS // len(published_muloco.FRAGMENTS)
    rules = muloco_rules("plain", inner__kind="adamw", fragments=len(published_muloco.FRAGMENTS))
    learners = streamed(rules, published_muloco.SHAPES, ROUNDS * STEPS // steps)
    assert fragments_of(learners[0].state.anchor, rules.method).names == published_muloco.FRAGMENTS
    assert_reached(learners[0].state.anchor, numbers(published_muloco.FILE)["fragments"], published_muloco.SHAPES)


def muloco_rules(case: str, parse: Callable[[str], Compressor] = parse_chain, **settings: object) -> Rules:
    muon, outer, compressed = published_muloco.MUON, published_muloco.OUTER, bool(published_muloco.CASES[case])
    common = {
        "error_feedback": compressed,
        "residual_decay": published_muloco.DECAY if compressed else 1.0,
        "inner__lr": muon["lr"],
        "inner__momentum": muon["mu"],
        "inner__weight_decay": muon["weight_decay"],
        "inner_steps": STEPS,
        "outer__lr": outer["lr"] ** 2 if compressed else outer["lr"],
        "outer__momentum": outer["momentum"],
        "chain": "identity all fp32",
    }
    return rules_with("muloco", parse, **{**common, **settings})


@pytest.mark.parametrize(
    ("case", "chain"), [("matrices", "identity topk({}/64) fp32"), ("vectors", "identity topk({}/8) fp32")]
)
def test_sparseloco_is_templars(case: str, chain: str) -> None:
    """Top-k of tiles, a book of four levels with error feedback and decay, the mean over senders, no momentum. Its
    learning rate too multiplies twice; it shortens what is longer than the median of the round; its book is
    `FourBins`. Tiles here are as wide as the matrices: else its chunks are squares and ours so many values in a row.
    """
    rules = rules_with(
        "sparseloco",
        FourBins,
        chain=chain.format(published_templar.KEPT[case]),
        merge="mean_of_senders",
        residual_decay=published_templar.DECAY,
        inner__lr=published_templar.INNER["lr"],
        inner__weight_decay=published_templar.INNER["weight_decay"],
        inner_steps=STEPS,
        outer__lr=published_templar.OUTER_LR**2,
    )
    shapes = published_templar.SHAPES[case]
    anchor = trained(replace(rules, merge=ShortenedToMedian()), shapes, rounds_from(STEPS))
    assert_reached(anchor, numbers(published_templar.FILE)[case], shapes)


@dataclass(frozen=True, slots=True)
class FourBins(Compressor):
    """A chain, here one of exact values, whose kept values are rounded as both programs do it: four equal bins, 1.5
    standard deviations wide, of which the third is centred at the mean, and for each bin the mean of what is in it.
    """

    name: str

    @property
    def chain(self) -> Chain:
        return parse_chain(self.name)

    def compress(self, tensor: Tensor) -> Packet:
        packet = self.chain.compress(tensor)
        values = packet.levels
        middle, spread = values.mean(), values.std()
        bins = torch.round((values - middle) / (spread * 1.5)).clamp(-2, 1)
        rounded = values.clone()
        for number in range(-2, 2):
            rounded[bins == number] = values[bins == number].mean()
        return replace(packet, levels=rounded)

    def values_of(self, packet: Packet) -> Tensor:
        return self.chain.values_of(packet)

    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        return self.chain.coefficients(packet, spec)

    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        return self.chain.restore(coefficients, spec)

    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        return self.chain.pack(packets, specs)

    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        return self.chain.unpack(data, specs)


class ShortenedToMedian(Merge):
    """The mean over senders of contributions none of which, tensor by tensor, is longer than the median."""

    def merge(self, contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
        raise AssertionError("rounds merge flat contributions")

    def merge_flat(self, parts: Sequence[Flat], weights: Sequence[int], sizes: Mapping[str, int]) -> Tensor:
        merged = []
        for tensors in zip(*(split_flat(part, list(sizes.values())) for part in parts), strict=True):
            dense = [tensor.dense() for tensor in tensors]
            lengths = [math.sqrt(float(value.double().square().sum())) for value in dense]
            median = sorted(lengths)[(len(lengths) - 1) // 2]
            shortened = [value * min(1.0, median / length) for value, length in zip(dense, lengths, strict=True)]
            merged.append(MeanOfSenders().merge_one(shortened, weights))
        return torch.cat(merged)
