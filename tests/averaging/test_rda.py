"""Radial-directional averaging: its slow reference, what one huge delta can do, and the same bits in any form."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from averaging.merge import DIRECTION_MIN, WEIGHT_RATIO_MAX, build_merge
from averaging.norms import norm, weighted_median
from compression.chain import parse_chain
from compression.seam import Flat, TensorSpec

torch.set_num_threads(1)
RDA = build_merge("rda")

seeds = st.integers(0, 2**32)
weight_lists = st.lists(st.integers(1, 10**6), min_size=1, max_size=7)


def deltas(seed: int, count: int, shape: tuple[int, ...] = (7, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (index - 2) for index in range(count)]


def merged(values: list[Tensor], weights: list[int], name: str = "w") -> Tensor:
    return RDA.merge([{name: value} for value in values], weights)[name]


def reference(values: list[Tensor], weights: list[int]) -> Tensor:
    """The docstring of `RadialDirectional`, in float64, one delta after the other."""
    median = sorted(weights)[(len(weights) - 1) // 2]
    weights = [min(weight, WEIGHT_RATIO_MAX * median) for weight in weights]
    doubles = [value.double() for value in values]
    lengths = [float(value.norm()) for value in doubles]
    radius, reached = 0.0, 0
    for length, weight in sorted(zip(lengths, weights, strict=True)):
        radius, reached = length, reached + weight
        if 2 * reached >= sum(weights):
            break
    direction = torch.zeros_like(doubles[0])
    for value, length, weight in zip(doubles, lengths, weights, strict=True):
        if length > 0:
            direction += weight * value / length
    direction /= sum(weights)
    if float(direction.norm()) >= DIRECTION_MIN:
        return direction * (radius / float(direction.norm()))
    mean = sum((weight * value for value, weight in zip(doubles, weights, strict=True)), torch.zeros_like(direction))
    mean /= sum(weights)
    return mean * min(1.0, radius / max(float(mean.norm()), 1e-300))


@given(seeds, weight_lists)
def test_it_is_its_reference(seed: int, weights: list[int]) -> None:
    values = deltas(seed, len(weights))
    expected = reference(values, weights)
    assert float((merged(values, weights).double() - expected).norm()) <= 1e-5 * float(expected.norm())


@given(seeds, weight_lists, st.integers(0, 6))
def test_one_huge_delta_moves_the_norm_no_further_than_the_median(seed: int, weights: list[int], which: int) -> None:
    values = deltas(seed, len(weights))
    which %= len(values)
    values[which] = values[which] * 1000
    lengths = [float(value.norm()) for value in values]
    highest = WEIGHT_RATIO_MAX * sorted(weights)[(len(weights) - 1) // 2]
    radius = weighted_median(lengths, [min(weight, highest) for weight in weights])
    assert float(merged(values, weights).norm()) <= radius * (1 + 1e-5)


def test_of_four_alike_the_one_that_is_a_thousand_times_larger_does_not_count() -> None:
    base = deltas(0, 1)[0]
    others = [base + 0.3 * base.norm() * other / other.norm() for other in deltas(1, 4)]
    before = float(merged(others, [1] * 4).norm())
    after = float(merged([others[0] * 1000, *others[1:]], [1] * 4).norm())
    assert after <= sorted(float(other.norm()) for other in others)[2] * (1 + 1e-5)
    assert before / 2 <= after <= before * 2


@given(seeds, weight_lists)
def test_equal_deltas_give_that_delta(seed: int, weights: list[int]) -> None:
    (value,) = deltas(seed, 1)
    assert torch.allclose(merged([value] * len(weights), weights), value, rtol=1e-5, atol=1e-9)


@given(seeds, weight_lists, st.randoms(use_true_random=False))
def test_whose_delta_is_whose_does_not_matter(seed: int, weights: list[int], random: object) -> None:
    values = deltas(seed, len(weights))
    order = list(range(len(weights)))
    random.shuffle(order)  # type: ignore[attr-defined]
    first, second = merged(values, weights), merged([values[at] for at in order], [weights[at] for at in order])
    assert float((first - second).norm()) <= 1e-5 * float(first.norm())


@given(seeds, st.integers(2, 16))
def test_the_norm_does_not_shrink_with_the_number_of_peers(seed: int, count: int) -> None:
    values = [value / value.norm() for value in deltas(seed, count, (40, 50))]
    assert float(merged(values, [1] * count).norm()) == pytest.approx(1.0, rel=1e-5)
    assert float(build_merge("mean").merge([{"w": v} for v in values], [1] * count)["w"].norm()) < 0.85


def test_where_directions_cancel_it_is_the_mean_but_no_longer_than_the_radius() -> None:
    x = torch.tensor([3.0, 4.0])
    assert merged([x, -x], [1, 1]).tolist() == [0.0, 0.0]
    assert merged([x, -x * 3], [1, 1]).tolist() == pytest.approx([-3.0, -4.0])
    assert merged([x, -1000 * x], [1, 1]).tolist() == pytest.approx([-3.0, -4.0])
    assert merged([torch.zeros(2)] * 3, [1, 1, 1]).tolist() == [0.0, 0.0]


def test_embeddings_are_averaged_by_weight() -> None:
    values = [torch.tensor([1.0, 0.0]), torch.tensor([5.0, 4.0])]
    assert merged(values, [300, 100], "embedding.weight").tolist() == [2.0, 1.0]
    assert merged(values, [300, 100], "blocks.0.query.weight").tolist() != [2.0, 1.0]


def test_a_weight_counts_for_eight_times_the_median_at_most() -> None:
    values = [torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([0.0])]
    capped = merged(values, [1_000_000, 1, 1], "embedding.weight")
    assert capped.tolist() == pytest.approx([0.8])


@given(seeds, weight_lists, st.integers(0, 90), st.booleans())
def test_what_was_sent_gives_the_bits_of_everything(seed: int, weights: list[int], kept: int, embedding: bool) -> None:
    sizes = {"embedding" if embedding else "a": 30, "b": 0, "c": 60}
    rng = np.random.default_rng(seed)
    parts, dense = [], []
    for _ in weights:
        places = torch.from_numpy(np.sort(rng.permutation(90)[:kept]))
        parts.append(Flat(places, torch.from_numpy(rng.standard_normal(kept).astype(np.float32)), 90))
        dense.append(dict(zip(sizes, torch.split(parts[-1].dense(), list(sizes.values())), strict=True)))
    flat = RDA.merge_flat(parts, weights, sizes)
    expected = torch.cat([RDA.merge(dense, weights)[name] for name in sizes])
    assert torch.equal(flat.view(torch.int32), expected.view(torch.int32))


@given(
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), max_size=200),
    st.integers(0, 50),
    st.randoms(use_true_random=False),
)
def test_a_norm_is_the_root_of_the_exact_sum_in_any_order(values: list[float], zeros: int, random: object) -> None:
    exact = math.sqrt(float(sum((Fraction(value) ** 2 for value in values), Fraction(0))))
    values = values + [0.0] * zeros
    random.shuffle(values)  # type: ignore[attr-defined]
    assert norm(torch.tensor(values, dtype=torch.float32)) == exact


def test_threads_do_not_change_a_bit_of_a_long_norm() -> None:
    value = torch.randn(1_000_003, generator=torch.Generator().manual_seed(5)).exp()
    expected = math.sqrt(math.fsum((value.double() ** 2).tolist()))
    assert norm(value) == expected
    torch.set_num_threads(2)
    try:
        assert norm(value.flip(0)) == expected
    finally:
        torch.set_num_threads(1)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9)), min_size=1, max_size=9))
def test_the_weighted_median_is_the_lower_one_of_all_repeated(pairs: list[tuple[float, int]]) -> None:
    repeated = sorted(value for value, weight in pairs for _ in range(weight))
    values, weights = zip(*pairs, strict=True)
    assert weighted_median(values, weights) == repeated[(len(repeated) - 1) // 2]


@pytest.mark.parametrize("shape", [(64, 64), (100, 70), (131,), (3, 5, 7)])
def test_the_norm_of_coefficients_is_that_of_the_tensor(shape: tuple[int, ...]) -> None:
    chain = parse_chain("dct(64) all fp32")
    value = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    packet = chain.compress(value)
    assert norm(chain.coefficients(packet, TensorSpec.of(value))) == pytest.approx(norm(value), rel=1e-5)
