"""Merging: the contract of all rules, each rule its equation, in the order given, the same bits on any threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from averaging.merge import MERGES, build_merge
from optimizers.presets import MERGE_NAMES
from optimizers.schedule import float32

torch.set_num_threads(1)


def members(
    seed: int, count: int, shape: tuple[int, ...] = (6, 5), *, sparse: bool = False
) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) for _ in range(count)]
    if sparse:
        values = [value * (torch.rand(shape, generator=generator) < 0.3) for value in values]
    return [{"a": value, "b": value.reshape(-1)[:3]} for value in values]


def test_the_names_are_those_that_a_method_may_name() -> None:
    assert sorted(MERGES) == sorted(MERGE_NAMES)
    with pytest.raises(ValueError, match=r"merge = 'max': must be one of mean, mean_of_senders, rda, weighted_mean"):
        build_merge("max")


@pytest.mark.parametrize("name", sorted(MERGES))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), weights=st.lists(st.integers(1, 10**9), min_size=6))
def test_the_contract(name: str, seed: int, count: int, weights: list[int]) -> None:
    given_members = members(seed, count, sparse=True)
    copies = [{key: value.clone() for key, value in member.items()} for member in given_members]
    merged = build_merge(name).merge(given_members, weights[:count])
    assert merged.keys() == given_members[0].keys()
    stacked = torch.stack([member["a"] for member in given_members])
    if name != "rda":  # It bounds the norm of the whole tensor instead.
        assert bool((merged["a"] <= stacked.amax(0).clamp(min=0) + 1e-5).all())
        assert bool((merged["a"] >= stacked.amin(0).clamp(max=0) - 1e-5).all())
    assert float(merged["a"].norm()) <= float(stacked.flatten(1).norm(dim=1).sum()) + 1e-5
    assert not bool(merged["a"][(stacked == 0).all(0)].any())
    for member, copy in zip(given_members, copies, strict=True):
        assert all(torch.equal(member[key], copy[key]) for key in copy)


@pytest.mark.parametrize("name", sorted(MERGES))
def test_one_member_is_returned_as_it_is(name: str) -> None:
    (member,) = members(0, 1)
    merged = build_merge(name).merge([member], [17])
    assert all(torch.equal(merged[key], member[key]) for key in member)


@pytest.mark.parametrize("name", sorted(MERGES))
def test_threads_do_not_change_a_bit(name: str) -> None:
    given_members = members(3, 5, (523, 301))
    expected = build_merge(name).merge(given_members, [3, 1, 4, 1, 5])
    torch.set_num_threads(2)
    try:
        again = build_merge(name).merge(given_members, [3, 1, 4, 1, 5])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(expected["a"], again["a"])


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8))
def test_the_mean_adds_in_order_and_rounds_after_each_operation(values: list[float]) -> None:
    total = values[0]
    for value in values[1:]:
        total = float32(total + value)
    merged = build_merge("mean").merge([{"w": torch.tensor([value])} for value in values], [1] * len(values))
    assert float(merged["w"]) == float32(total * float32(1 / len(values)))


def test_the_weighted_mean_weighs_by_tokens() -> None:
    values = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([5.0, 4.0])}]
    assert build_merge("weighted_mean").merge(values, [300, 100])["w"].tolist() == [2.0, 1.0]


def test_the_mean_of_senders_counts_only_who_sent_a_coefficient() -> None:
    values = [{"w": torch.tensor([1.0, 0.0, 0.0])}, {"w": torch.tensor([5.0, 4.0, 0.0])}]
    assert build_merge("mean_of_senders").merge(values, [1, 1])["w"].tolist() == [3.0, 4.0, 0.0]
    assert build_merge("mean").merge(values, [1, 1])["w"].tolist() == [3.0, 2.0, 0.0]


@pytest.mark.parametrize("name", sorted(MERGES))
def test_our_own_mistakes_crash(name: str) -> None:
    member = {"w": torch.ones(1)}
    wrong: list[tuple[list[dict[str, torch.Tensor]], list[int]]] = [
        ([], []),
        ([member], [1, 2]),
        ([member], [0]),
        ([member, {"v": torch.ones(1)}], [1, 1]),
    ]
    for contributions, weights in wrong:
        with pytest.raises(AssertionError):
            build_merge(name).merge(contributions, weights)
