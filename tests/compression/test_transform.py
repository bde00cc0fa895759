"""Transforms: orthonormal forward, and an inverse whose bits depend on nothing but its input."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compression.cosines import BASIS_BITS, integer_basis
from compression.exact import COEFFICIENT_BITS, inverse_dense, inverse_tiles
from compression.transform import DCT_LENGTH_MAX, Dct, Identity, Tiling

SHAPES = [
    (),
    (0,),
    (3, 0),
    (1,),
    (7,),
    (64,),
    (97, 1),
    (1, 97),
    (4099,),
    (64, 64),
    (65, 63),
    (130, 257),
    (5, 3, 7),
    (4, 3, 3, 3),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sparse(tiles: int, height: int, width: int, kept: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(tiles, height * width)
    for row in flat:
        row[torch.randperm(height * width, generator=generator)[:kept]] = torch.randn(kept, generator=generator)
    return flat.view(tiles, height, width)


def exponents(tiles: Tensor) -> Tensor:
    return torch.frexp(tiles.abs().amax(dim=(1, 2))).exponent


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [2, 8, 64])
def test_there_and_back_is_the_tensor(shape: tuple[int, ...], length: int) -> None:
    tensor = normal(*shape)
    transform = Dct(length)
    coefficients = transform.forward(tensor)
    assert coefficients.shape == (transform.size(shape),)
    restored = transform.inverse(coefficients, shape)
    assert restored.shape == tensor.shape
    assert restored.dtype == torch.float32
    assert float((restored - tensor).norm()) <= 2e-6 * float(tensor.norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_energy_is_kept(shape: tuple[int, ...]) -> None:
    tensor = normal(*shape)
    torch.testing.assert_close(Dct(64).forward(tensor).norm(), tensor.norm(), rtol=1e-5, atol=0)


def test_forward_is_the_textbook_dct() -> None:
    tensor = normal(6, 5)
    coefficients = Dct(8).forward(tensor).view(6, 5)
    for u, v in [(0, 0), (0, 3), (5, 4), (2, 1)]:
        expected = sum(
            float(tensor[i, j])
            * math.cos(math.pi * (2 * i + 1) * u / 12)
            * math.cos(math.pi * (2 * j + 1) * v / 10)
            * math.sqrt((2 if u else 1) / 6 * (2 if v else 1) / 5)
            for i in range(6)
            for j in range(5)
        )
        assert float(coefficients[u, v]) == pytest.approx(expected, abs=1e-6)


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(2, DCT_LENGTH_MAX))
def test_no_axis_is_cut_into_slivers(rows: int, columns: int, length: int) -> None:
    tiling = Tiling.of((rows, columns), length)
    axes = [(tiling.rows, tiling.down, tiling.height), (tiling.columns, tiling.across, tiling.width)]
    for axis, number, extent in axes:
        assert number == math.ceil(axis / length)
        assert extent <= length
        assert 0 <= number * extent - axis < number


def test_the_vocabulary_that_divides_badly() -> None:
    assert Tiling.of((50257, 768), 64).tiles == (786, 12, 64, 64)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (33, 50), (1, 64), (7, 1), (128, 128)])
@pytest.mark.parametrize("kept", [1, 5, 10**9])
def test_the_inverse_is_integer_arithmetic(height: int, width: int, kept: int) -> None:
    """Bit for bit what 64-bit integers give, in an order of their own, whichever path the sparsity picks."""
    tiles = sparse(3, height, width, min(kept, height * width)) * torch.tensor([1.0, 2.0**-40, 3e10]).view(3, 1, 1)
    restored = inverse_tiles(tiles).float()
    for tile, result in zip(tiles, restored, strict=True):
        exponent = math.frexp(float(tile.abs().max()))[1]
        rows = np.rint(tile.double().numpy() * 2.0 ** (COEFFICIENT_BITS - exponent)).astype(np.int64)
        if width > 1:
            sums = rows @ np.array(integer_basis(width), dtype=np.int64)
            rows = np.rint(sums.astype(np.float64) / 2**BASIS_BITS).astype(np.int64)
        scale = 2.0 ** (exponent - COEFFICIENT_BITS)
        if height > 1:
            rows = np.array(integer_basis(height), dtype=np.int64).T @ rows
            scale /= 2**BASIS_BITS
        assert torch.equal(result, torch.from_numpy(rows.astype(np.float32) * np.float32(scale)))


def test_skipping_rows_of_zeros_changes_no_bit() -> None:
    tiles = sparse(9, 64, 64, 20)
    assert torch.equal(inverse_tiles(tiles), inverse_dense(tiles, exponents(tiles)))


def test_the_order_of_summation_changes_no_bit() -> None:
    tiles = normal(4, 64, 64)
    rows = (tiles * 2.0 ** (COEFFICIENT_BITS - exponents(tiles)).view(-1, 1, 1)).round().double().view(-1, 64)
    basis = torch.tensor(integer_basis(64), dtype=torch.float64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rows @ basis, rows[:, order] @ basis[order])
    assert not torch.equal(rows.float() @ basis.float(), rows.float()[:, order] @ basis.float()[order])


@pytest.mark.parametrize("kept", [32, 4096])
def test_the_number_of_threads_changes_no_bit(kept: int) -> None:
    coefficients = sparse(64, 64, 64, kept).view(-1)
    alone = Dct(64).inverse(coefficients, (512, 512))
    torch.set_num_threads(2)
    assert torch.equal(alone, Dct(64).inverse(coefficients, (512, 512)))


def test_the_inverse_knows_no_neighbour() -> None:
    """A tile's bits do not depend on what else is in the batch: fragments may be restored together or apart."""
    tiles = torch.cat([sparse(5, 64, 64, 9), normal(3, 64, 64), torch.zeros(2, 64, 64)])
    apart = torch.cat([inverse_tiles(tile[None]) for tile in tiles])
    assert torch.equal(inverse_tiles(tiles), apart)


def test_results_are_never_subnormal() -> None:
    tiles = torch.cat([normal(1, 8, 8) * 2.0**-e for e in range(70, 150, 7)])
    restored = inverse_tiles(tiles).float()
    smallest = torch.finfo(torch.float32).tiny
    assert bool(((restored == 0) | (restored.abs() >= smallest)).all())
    assert bool((restored[0] != 0).all())
    assert bool((restored[-1] == 0).all())


@pytest.mark.parametrize("length", range(1, DCT_LENGTH_MAX + 1))
def test_every_length_keeps_its_sums_exact(length: int) -> None:
    """The assertion in the transform holds for every tile it may meet; here by an actual worst case."""
    if length <= 24:
        basis = torch.tensor(integer_basis(length), dtype=torch.float64) if length > 1 else torch.ones(1, 1).double()
        worst = torch.sign(basis[:, 0]).outer(torch.sign(basis[:, 0])).float()[None]
        inverse_tiles(torch.where(worst == 0, torch.ones_like(worst), worst))
    inverse_tiles(torch.ones(1, length, 128))


def test_the_integer_basis_is_what_the_wire_expects() -> None:
    """A change of one integer here would split a swarm."""
    basis = np.array(integer_basis(64), dtype=np.int64)
    weights = np.arange(1, 4097, dtype=np.int64).reshape(64, 64)
    assert int((basis * weights % 1000003).sum()) == 2060825258
    exact = np.array([[math.cos(math.pi * (2 * i + 1) * u / 128) for i in range(64)] for u in range(64)]) / math.sqrt(
        32
    )
    exact[0] = 1 / 8
    assert np.abs(basis - exact * 2**BASIS_BITS).max() <= 0.5 + 1e-6


def test_identity_keeps_every_bit() -> None:
    tensor = normal(3, 5)
    assert torch.equal(Identity().inverse(Identity().forward(tensor), (3, 5)), tensor)


@pytest.mark.parametrize("length", [-1, 0, 1, DCT_LENGTH_MAX + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=rf"dct\({length}\)"):
        Dct(length)
