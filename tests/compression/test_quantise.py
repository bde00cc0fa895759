"""Values: levels near the Lloyd optimum, decoded by arithmetic that cannot round in two ways."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compression.quantise import _BOOKS, FLOATS, Bits, Floats, Values
from compression.scales import SCALE_MAX, decode_scales, encode_scales, scale_code_max
from compression.select import TopK

VALUES: list[Values] = [*map(Floats, FLOATS), *map(Bits, _BOOKS)]
# The mean squared error of the Lloyd-Max quantiser of a unit Gaussian.
LLOYD = {1: 0.3634, 2: 0.1175, 4: 0.009497}


def gaussian(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def relative_error(values: Values, tensor: Tensor, alike: int | None = None) -> float:
    decoded = values.dequantise(*values.quantise(tensor, values.blocks(len(tensor), alike)))
    return float((decoded - tensor).square().mean() / tensor.square().mean())


@pytest.mark.parametrize("bits", LLOYD)
def test_gaussian_error_is_the_lloyd_optimum(bits: int) -> None:
    assert relative_error(Bits(bits), gaussian(1 << 17)) <= 1.01 * LLOYD[bits]


def test_eight_bits_leave_a_gaussian_almost_whole() -> None:
    assert relative_error(Bits(8), gaussian(1 << 17)) <= 1e-4


@pytest.mark.parametrize(("bits", "error"), [(1, 0.012), (2, 0.004), (4, 5e-4), (8, 5e-6)])
def test_top_k_values_are_fitted_away_from_zero(bits: int, error: float) -> None:
    tensor = gaussian(1 << 18)
    indices = TopK(32, 4096).select(tensor)
    assert indices is not None
    assert relative_error(Bits(bits), tensor[indices], 32) <= error


def test_two_bits_find_two_two_sided_levels() -> None:
    tensor = torch.tensor([0.5, -0.5, 1.5, -1.5] * 500)
    assert relative_error(Bits(2), tensor) < 1e-12


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 5000])
def test_counts_and_types(values: Values, count: int) -> None:
    blocks = values.blocks(count, None)
    levels, scales = values.quantise(gaussian(count), blocks)
    assert levels.shape == (count,)
    assert levels.dtype == values.level_dtype
    if values.scale_columns:
        assert scales.shape == (blocks, values.scale_columns)
    decoded = values.dequantise(levels, scales)
    assert decoded.shape == (count,)
    assert decoded.dtype == torch.float32


@pytest.mark.parametrize("bits", _BOOKS)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_rounds_once(bits: int, seed: int) -> None:
    """Against exact fractions: the product is exact, so fused and unfused hardware give the same sum."""
    tensor = gaussian(300, seed) * 2.0 ** (17 * seed)
    levels, scales = Bits(bits).quantise(tensor, 3)
    decoded = Bits(bits).dequantise(levels, scales).tolist()
    length = -(-300 // len(scales))
    for place in range(0, 300, 7):
        level = int(levels[place])
        row = [Fraction(scale) for scale in scales[place // length].tolist()]
        exact = row[0] + (_BOOKS[bits][level & ((1 << (bits - 1)) - 1)] * row[1] if bits > 1 else 0)
        nearest = float(torch.tensor(float(exact), dtype=torch.float64).to(torch.float32))
        assert decoded[place] == (-nearest if level >> (bits - 1) else nearest)


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e25, 3.4e38])
def test_extreme_values_stay_finite(values: Values, size: float) -> None:
    tensor = torch.tensor([size, -size, size / 2, 0.0])
    decoded = values.dequantise(*values.quantise(tensor, values.blocks(4, None)))
    assert bool(torch.isfinite(decoded).all())
    if size == 0:
        assert bool((decoded == 0).all())


@given(st.integers(0, 8), st.data())
def test_scale_codes_are_exact(mantissa: int, data: st.DataObject) -> None:
    codes = torch.tensor(data.draw(st.lists(st.integers(0, scale_code_max(mantissa)), max_size=20)), dtype=torch.int64)
    assert torch.equal(encode_scales(decode_scales(codes, mantissa), mantissa), codes)


@given(st.floats(2.0**-79, SCALE_MAX / 2, width=32), st.integers(0, 8))
def test_scale_codes_are_near(scale: float, mantissa: int) -> None:
    tensor = torch.tensor([scale])
    near, up, down = (
        float(decode_scales(encode_scales(tensor, mantissa, way), mantissa)) for way in ("near", "up", "down")
    )
    assert down <= scale <= up
    assert abs(near - scale) <= 2.0 ** -(mantissa + 1) * scale


def test_chunks_of_different_sizes_keep_their_own_scales() -> None:
    tensor = torch.tensor([1.0, 1000.0, 1e-3]).repeat_interleave(32)
    assert relative_error(Bits(1), tensor, 32) < 0.01
    assert relative_error(Bits(1), tensor) > 0.1


def test_an_unknown_number_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bits\(3\).*1, 2, 4, 8"):
        Bits(3)
