"""Fragments: every parameter in exactly one, none empty, even, and the same however the model is listed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.seam import InvalidPacket
from peer.fragments import Fragments, partition

names = st.one_of(
    st.builds("blocks.{}.{}".format, st.integers(0, 11), st.sampled_from(["attention.weight", "mlp.0.bias", "norm"])),
    st.sampled_from(["embedding.weight", "head.weight", "norm.weight", "0.bias"]),
)
sizes = st.dictionaries(names, st.integers(0, 10_000), min_size=1, max_size=40)


@given(sizes, st.integers(1, 12), st.sampled_from(["size", "layers"]), st.randoms())
def test_every_parameter_is_in_exactly_one_part(
    sizes: dict[str, int], fragments: int, by: str, rng: random.Random
) -> None:
    try:
        parts = partition(sizes, fragments, by)
    except ValueError as error:
        assert f"fragments = {fragments}" in str(error)
        assert fragments > len(sizes) or by == "layers"
        return
    assert len(parts) == fragments and all(parts)
    assert sorted(name for part in parts for name in part) == sorted(sizes)
    listed = list(sizes.items())
    rng.shuffle(listed)
    assert partition(dict(listed), fragments, by) == parts


@given(sizes, st.integers(1, 12))
def test_parts_by_size_differ_by_no_more_than_their_largest_parameter(sizes: dict[str, int], fragments: int) -> None:
    if fragments <= len(sizes):
        loads = [sum(sizes[name] for name in part) for part in partition(sizes, fragments)]
        assert max(loads) - min(loads) <= max(sizes.values())


def test_layers_are_strided_and_the_rest_fills_up() -> None:
    sizes = {f"blocks.{layer}.{kind}": 10 for layer in range(12) for kind in ("a", "b")} | {"embed": 15, "head": 5}
    first, second, third = partition(sizes, 3, "layers")
    assert {name.split(".")[1] for name in first if "." in name} == {"0", "3", "6", "9"}
    assert "embed" in first and "head" in second
    assert all(name.startswith("blocks.") for name in third)


def test_payloads_say_their_fragment() -> None:
    whole, three = Fragments((("a", "b"),)), Fragments((("a",), ("b",), ("c",)))
    assert whole.labelled(0, b"x") == b"x" and whole.opened(b"x") == (0, b"x")
    assert [three.of_round(number) for number in (1, 2, 3, 4)] == [0, 1, 2, 0]
    assert three.opened(three.labelled(2, b"x")) == (2, b"x")
    for bad in (b"", b"\3x"):
        with pytest.raises(InvalidPacket):
            three.opened(bad)
