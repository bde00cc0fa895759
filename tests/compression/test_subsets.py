"""Split codes: every set has one code, of hardly more bits than the logarithm of their number; and bits at all."""

from __future__ import annotations

from itertools import combinations
from math import comb, lgamma, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.bitstream import BitReader, Integers, as_fields, packed
from compression.seam import InvalidPacket
from compression.subsets import bits_max, decode, encode


def code(places: Integers, counts: Integers, lengths: Integers) -> tuple[bytes, int]:
    fields = as_fields([*encode(places, counts, lengths)])
    return packed(fields), int(fields.widths.sum())


def drawn(rng: np.random.Generator, counts: list[int], lengths: list[int]) -> Integers:
    sets = [np.sort(rng.choice(n, k, replace=False)) for n, k in zip(lengths, counts, strict=True)]
    places: Integers = np.concatenate([np.zeros(0, dtype=np.int64), *sets]).astype(np.int64)
    return places


def entropy_bits(length: int, count: int) -> float:
    return (lgamma(length + 1) - lgamma(count + 1) - lgamma(length - count + 1)) / log(2)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0, 1)), max_size=12), st.integers(0, 2**32))
def test_sets_come_back_in_their_entropy(chunks: list[tuple[int, float]], seed: int) -> None:
    lengths = [length for length, _ in chunks]
    counts = [min(256, round(share * length)) for length, share in chunks]
    places = drawn(np.random.default_rng(seed), counts, lengths)
    arrays = np.array(counts, dtype=np.int64), np.array(lengths, dtype=np.int64)
    data, bits = code(places, *arrays)
    reader = BitReader(data)
    assert decode(reader, *arrays).tolist() == places.tolist()
    assert reader.bits_used == bits <= bits_max(*arrays)
    assert bits <= sum(map(entropy_bits, lengths, counts)) + 1.01


@pytest.mark.parametrize("kept", [1, 4, 8, 16, 32, 64, 128, 256])
def test_many_chunks_cost_their_entropy(kept: int) -> None:
    lengths, counts = [4096] * 64 + [4001, 17], [kept] * 64 + [kept, min(kept, 3)]
    places = drawn(np.random.default_rng(kept), counts, lengths)
    _, bits = code(places, np.array(counts), np.array(lengths))
    assert bits <= 1.0002 * sum(map(entropy_bits, lengths, counts)) + 1


@pytest.mark.parametrize(("length", "count"), [(5, 2), (9, 4), (13, 3), (12, 6)])
def test_small_sets_are_numbered_without_gaps(length: int, count: int) -> None:
    """All codes are different and below C(n, k): with so few sets the numbers are exact."""
    sizes = np.array([count]), np.array([length])
    codes = set()
    width = (comb(length, count) - 1).bit_length()
    for places in combinations(range(length), count):
        data, bits = code(np.array(places, dtype=np.int64), *sizes)
        assert bits == width
        codes.add(int.from_bytes(data, "big") >> (8 * len(data) - bits))
    assert codes == set(range(comb(length, count)))


def test_numbers_that_no_set_has_are_refused() -> None:
    sizes = np.array([2], dtype=np.int64), np.array([5], dtype=np.int64)
    for number in range(10, 16):  # C(5, 2) is 10.
        with pytest.raises(InvalidPacket, match="indices: no set"):
            decode(BitReader(bytes([number << 4])), *sizes)


def test_damaged_sets_never_decode_to_something_else() -> None:
    """Whatever bits are read are either refused or the code of what they decode to."""
    rng = np.random.default_rng(3)
    lengths, counts = np.array([97, 4096, 12, 3000]), np.array([9, 5, 12, 40])
    decoded = 0
    for _ in range(300):
        data = rng.bytes(80)
        reader = BitReader(data)
        try:
            places = decode(reader, counts, lengths)
        except InvalidPacket:
            continue
        decoded += 1
        again, bits = code(places, counts, lengths)
        assert bits == reader.bits_used
        whole = bits // 8
        assert again[:whole] == data[:whole]
        for chunk, length in zip(np.split(places, np.cumsum(counts)[:-1]), lengths, strict=True):
            assert (np.diff(chunk) > 0).all()
            assert chunk[0] >= 0
            assert chunk[-1] < length
    assert decoded > 30
