"""The entropy coder: symbols come back, in their entropy, and damaged bytes are refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compression.entropy import PRECISION, _logarithms, cost_bits, decode, encode, frequencies
from compression.seam import InvalidPacket


def drawn(count: int, symbols: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(symbols, 0.5))
    return rng.choice(symbols, count, p=shares).astype(np.uint8)


@pytest.mark.parametrize("symbols", [1, 2, 8, 128, 256])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 20_000, 300_001])
def test_symbols_come_back(count: int, symbols: int) -> None:
    sent = drawn(count, symbols)
    scaled = frequencies(np.bincount(sent, minlength=symbols).astype(np.int64))
    assert np.array_equal(decode(encode(sent, scaled), count, scaled), sent)


@pytest.mark.parametrize("symbols", [2, 8, 128])
def test_a_million_symbols_cost_their_entropy(symbols: int) -> None:
    sent = drawn(1 << 20, symbols, seed=1)
    counts = np.bincount(sent, minlength=symbols).astype(np.int64)
    shares = counts[counts > 0] / len(sent)
    bits = -float((shares * np.log2(shares)).sum())
    assert 8 * len(encode(sent, frequencies(counts))) / len(sent) <= bits + 0.015
    assert cost_bits(counts) == pytest.approx(8 * len(encode(sent, frequencies(counts))), rel=0.002)


@given(st.lists(st.integers(0, 10**7), min_size=1, max_size=256))
def test_frequencies_add_up_and_spare_the_rare(counts: list[int]) -> None:
    scaled = frequencies(np.array(counts, dtype=np.int64))
    assert int(scaled.sum()) == (1 << PRECISION if sum(counts) else 0)
    assert all((f > 0) == (c > 0) for f, c in zip(scaled.tolist(), counts, strict=True))


def test_the_logarithms_are_logarithms() -> None:
    assert np.abs(_logarithms()[1:] / 65536 - np.log2(np.arange(1, (1 << PRECISION) + 1))).max() < 1e-4
    # Both sides decide by these integers whether levels are coded: a change of one would split a swarm.
    assert int((_logarithms() * np.arange(1, (1 << PRECISION) + 2)).sum() % 1000003) == 283573


def test_damaged_bytes_are_refused_or_are_another_message() -> None:
    sent = drawn(2000, 8)
    scaled = frequencies(np.bincount(sent, minlength=8).astype(np.int64))
    data = encode(sent, scaled)
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        try:
            got = decode(bytes(damaged), len(sent), scaled)
            assert encode(got, scaled) == bytes(damaged)
        except InvalidPacket as error:
            assert str(error).startswith("levels: ")
            refused += 1
    assert refused > 290
    for length in range(0, len(data), 7):
        with pytest.raises(InvalidPacket, match=r"^levels: "):
            decode(data[:length], len(sent), scaled)
    with pytest.raises(InvalidPacket, match="too many"):
        decode(data + b"\0\0", len(sent), scaled)
