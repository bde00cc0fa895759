"""Selections: the largest of every chunk, the lowest index where two are equal, and never a zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compression.select import All, TopK, keep_largest, largest
from compression.slabs import positions


def reference(values: list[float], kept: int, chunk: int) -> list[int]:
    """The rule, spelt out."""
    size = len(values)
    count = -(-size // chunk)
    length = -(-size // count) if count else 0
    chosen: list[int] = []
    for start in range(0, size, max(1, length)):
        part = list(enumerate(values[start : start + length], start))
        share = max(1, (2 * kept * len(part) + chunk) // (2 * chunk))
        best = sorted(part, key=lambda pair: (-abs(pair[1]), pair[0]))[:share]
        chosen += sorted(index for index, value in best if value != 0)
    return chosen


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -3.5]), max_size=80), st.data())
def test_ties_go_to_the_lowest_index(values: list[float], data: st.DataObject) -> None:
    chunk = data.draw(st.integers(1, 40))
    kept = data.draw(st.integers(1, chunk))
    selected = TopK(kept, chunk).select(torch.tensor(values), len(values))
    assert selected is not None
    assert selected.tolist() == reference(values, kept, chunk)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([997, 4096]), st.booleans())
def test_the_fast_way_equals_the_obvious_one(seed: int, kept: int, length: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randn(5, length, generator=generator).abs()
    if coarse:
        magnitudes = (magnitudes * 2).round()  # Ties and zeros everywhere.
    magnitudes[1] = 0
    magnitudes[2, 10:] = 0
    assert torch.equal(largest(magnitudes, kept), positions(keep_largest(magnitudes, kept)))


@pytest.mark.parametrize("size", [0, 1, 5, 64, 4096, 4097, 10007])
def test_indices_ascend_within_the_capacity_of_each_chunk(size: int) -> None:
    selection = TopK(32, 4096)
    chunks = selection.chunks(size)
    indices = selection.select(torch.randn(size, generator=torch.Generator().manual_seed(size)), size)
    assert chunks is not None
    assert indices is not None
    assert bool((indices.diff() > 0).all())
    assert len(indices) == int(chunks.capacities().sum())
    assert int(chunks.lengths().sum()) == size


def test_all_selects_everything() -> None:
    assert All().select(torch.zeros(3), 3) is None
    assert All().chunks(3) is None


@pytest.mark.parametrize(("kept", "chunk"), [(0, 8), (9, 8), (1, 0), (1, 10**6)])
def test_an_impossible_share_is_refused(kept: int, chunk: int) -> None:
    with pytest.raises(ValueError, match=rf"topk\({kept}/{chunk}\)"):
        TopK(kept, chunk)


def test_positions_ascend() -> None:
    mask: Tensor = torch.tensor([[True, False], [True, True]])
    assert positions(mask).tolist() == [0, 2, 3]
