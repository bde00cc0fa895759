"""Equal bits everywhere: whatever multiplies the matrices, on however many threads, one by one or all together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from averaging.merge import MERGES, build_merge
from compression.chain import parse_chain
from compression.cosines import integer_basis
from compression.exact import SparseTiles, inverse_tiles
from compression.seam import Flat, Packet, TensorSpec
from compression.transform import Dct

CHAINS = [
    "dct(64) topk(32/4096) bits(1)",
    "dct(64) topk(32/4096) bits(2)",
    "dct(64) all bits(8)",
    "dct(16) globaltopk(1/30) fp16",
    "identity topk(64/4096) bits(4)",
    "identity mask(8/64) e3m0",
    "identity all bf16",
]
SHAPES = [(), (0,), (64,), (97,), (63, 65), (64, 64), (128, 192), (5, 3, 7), (130, 70), (300, 500)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1e-3


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def reference_inverse(tile: Tensor) -> list[list[float]]:
    """Python's own integers of any size, in the order that one would write down."""
    height, width = tile.shape
    numbers = tile.double().tolist()
    exponent = math.frexp(max(abs(number) for row in numbers for number in row))[1]
    whole = [[round(number * 2.0 ** (24 - exponent)) for number in row] for row in numbers]
    basis_h, basis_w = integer_basis(height), integer_basis(width)
    rows = []
    for row in whole:
        sums = [sum(row[v] * basis_w[v][j] for v in range(width)) for j in range(width)]
        rows.append([round(total / 2**22) for total in sums])  # Exact quotients below 2^53; ties to even.
    columns = [[sum(basis_h[u][i] * rows[u][j] for u in range(height)) for j in range(width)] for i in range(height)]
    return [[float(np.float32(total) * np.float32(2.0 ** (exponent - 46))) for total in row] for row in columns]


def numpy_inverse(tile: Tensor) -> NDArray[np.float32]:
    """numpy's own matrix products in float64, the other way round: columns first would differ, sums may not."""
    numbers = tile.numpy().astype(np.float64)
    exponent = math.frexp(float(np.abs(numbers).max()))[1]
    height, width = numbers.shape
    basis_h = np.array(integer_basis(height), dtype=np.float64)
    basis_w = np.array(integer_basis(width), dtype=np.float64)
    rows = np.rint(np.rint(numbers * 2.0 ** (24 - exponent)) @ basis_w * 2.0**-22)
    result: NDArray[np.float32] = (rows.T @ basis_h).T.astype(np.float32) * np.float32(2.0 ** (exponent - 46))
    return result


@pytest.mark.parametrize(("height", "width"), [(8, 8), (12, 5), (16, 16)])
def test_torch_numpy_and_plain_integers_agree(height: int, width: int) -> None:
    tile = normal(height, width, seed=height)
    restored = inverse_tiles(tile[None])[0].float()
    assert restored.tolist() == reference_inverse(tile)
    assert np.array_equal(restored.numpy(), numpy_inverse(tile))


def test_torch_and_numpy_agree_on_full_tiles() -> None:
    tiles = normal(6, 64, 64)
    restored = inverse_tiles(tiles).float()
    for tile, got in zip(tiles, restored, strict=True):
        assert np.array_equal(got.numpy(), numpy_inverse(tile))


@pytest.mark.parametrize("chain", CHAINS)
def test_fingerprints_agree_between_thread_counts(chain: str) -> None:
    compressor = parse_chain(chain)
    tensors = {f"p{i:02}": normal(*shape, seed=i) for i, shape in enumerate(SHAPES)}
    specs = [TensorSpec.of(tensors[name]) for name in sorted(tensors)]
    data = compressor.pack(compressor.compress_all(tensors), specs)
    alone = digest(compressor.decompress_all(compressor.unpack(data, specs), specs))
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert digest(compressor.decompress_all(compressor.unpack(data, specs), specs)) == alone


def test_a_packet_decodes_to_the_bits_that_it_always_did() -> None:
    """If this fails on some machine, that machine would leave the swarm's anchor: do not change the figure."""
    chain = parse_chain("dct(64) topk(32/4096) bits(2)")
    spec = TensorSpec((192, 128), torch.float32)
    places = np.sort(np.arange(32) * 1127 % 4096)
    indices = torch.from_numpy(np.concatenate([places + 4096 * tile for tile in range(6)]))
    levels = torch.from_numpy((np.arange(192) * 7 % 4).astype(np.uint8))
    scales = torch.tensor([[2.0**-9 * (1 + i / 8), 2.0**-10] for i in range(6)])
    restored = chain.decompress(Packet(indices, levels, scales), spec)
    assert digest([restored])[:16] == "7d57aa7536ff48d0"


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 300),
    st.integers(0, 2**32),
    st.sampled_from(sorted(MERGES)),
)
def test_merging_what_was_sent_is_merging_everything(peers: int, size: int, seed: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    merge = build_merge(rule)
    parts, dense = [], []
    for _ in range(peers):
        kept = int(rng.integers(0, max(1, size // int(rng.integers(1, 30)))))
        places = torch.from_numpy(np.sort(rng.permutation(size)[:kept]))
        values = torch.from_numpy(rng.integers(-2, 3, kept).astype(np.float32) * np.float32(0.3))
        parts.append(Flat(places, values, size))
        dense.append(torch.zeros(size).index_copy_(0, places, values))
    weights = [int(weight) for weight in rng.integers(1, 9, peers)]

    flat = merge.merge_flat(parts, weights, {"": size})
    expected = merge.merge([{"": tensor} for tensor in dense], weights)[""]
    assert torch.equal(flat.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("chain", CHAINS)
def test_all_together_is_one_by_one(chain: str) -> None:
    compressor = parse_chain(chain)
    tensors = {f"p{i:02}": normal(*shape, seed=i) for i, shape in enumerate(SHAPES)}
    specs = [TensorSpec.of(tensors[name]) for name in sorted(tensors)]
    packets = [compressor.compress(tensors[name]) for name in sorted(tensors)]
    together = compressor.compress_all(tensors)
    assert compressor.pack(together, specs) == compressor.pack(packets, specs)
    flat = compressor.flatten(packets, specs)
    alone = [compressor.coefficients(packet, spec) for packet, spec in zip(packets, specs, strict=True)]
    assert torch.equal(flat.dense(), torch.cat(alone))
    assert torch.equal(torch.cat(list(flat.pieces(4001))), torch.cat(alone))
    restored = [compressor.restore(part, spec) for part, spec in zip(alone, specs, strict=True)]
    for got in (
        compressor.restore_all(torch.cat(alone), specs),
        compressor.decompress_all(packets, specs),
        [compressor.decompress(packet, spec) for packet, spec in zip(packets, specs, strict=True)],
    ):
        assert all(torch.equal(left, right) for left, right in zip(got, restored, strict=True))
    values = torch.cat([compressor.values_of(packet) for packet in packets])
    assert torch.equal(flat.values, values)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 20), st.integers(2, 20), st.integers(1, 9), st.integers(0, 60), st.integers(0, 2**32), st.booleans()
)
def test_few_coefficients_or_all_give_the_same_bits(
    height: int, width: int, tiles: int, kept: int, seed: int, wide: bool
) -> None:
    rng = np.random.default_rng(seed)
    size = tiles * height * width
    indices = torch.from_numpy(np.sort(rng.permutation(size)[:kept]))
    exponents = rng.integers(-100 if wide else -3, 60 if wide else 3, len(indices))
    values = torch.from_numpy((rng.standard_normal(len(indices)) * 2.0**exponents).astype(np.float32))
    dense = torch.zeros(size).index_copy_(0, indices, values).view(tiles, height, width)
    sparse = SparseTiles(indices, values, height, width)
    first = int(rng.integers(tiles))
    count = int(rng.integers(1, tiles - first + 1))
    assert torch.equal(sparse.inverse(first, count).float(), inverse_tiles(dense)[first : first + count].float())


def test_pieces_are_the_whole() -> None:
    tensor = normal(700, 700)
    transform = Dct(64)
    whole = transform.forward(tensor)
    for start, piece in transform.pieces(tensor, 1):
        assert torch.allclose(piece, whole[start : start + len(piece)], atol=1e-8)
