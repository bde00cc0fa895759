"""Values: errors near the Lloyd optimum, decoded by arithmetic that cannot round in two ways."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from compression.quantise import FORMS, Levels
from compression.scales import SCALE_MAX, decode_scales, encode_scales, scale_code_max
from compression.select import TopK
from compression.values import FLOATS, Floats, Values

VALUES: list[Values] = [*map(Floats, FLOATS), *map(Levels, FORMS)]
# The mean squared error of the Lloyd-Max quantiser of a unit Gaussian (Max 1960; 8 bits: computed).
LLOYD = {"bits(1)": 0.3634, "bits(2)": 0.1175, "bits(4)": 0.009497, "bits(8)": 4.08e-5}
# The least that a grid whose steps are even, or powers of two, reaches on a Gaussian with one scale: computed.
GRIDS = {"int(4)": 0.0143, "int(8)": 5.7e-5, "e3m0": 0.0371}


def gaussian(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def student(count: int, seed: int = 0) -> Tensor:
    """Student's t with three degrees of freedom: its fourth moment is infinite."""
    generator = torch.Generator().manual_seed(seed)
    squares = torch.randn(3, count, generator=generator).square().sum(0)
    return torch.randn(count, generator=generator) / (squares / 3).sqrt()


def laplace(count: int, seed: int = 0) -> Tensor:
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(seed)).clamp(1e-7, 1 - 1e-7) - 0.5
    return -uniform.sign() * torch.log1p(-2 * uniform.abs())


def relative_error(values: Values, tensor: Tensor, alike: int | None = None) -> float:
    decoded = values.dequantise(*values.quantise(tensor, values.blocks(len(tensor), alike)))
    return float((decoded - tensor).double().square().mean() / tensor.double().square().mean())


def lloyd_error(magnitudes: Tensor, levels: int) -> float:
    """What Lloyd's algorithm reaches on these very values with `levels` magnitudes, started by companding."""
    ordered: NDArray[np.float64] = np.sort(magnitudes.double().numpy())
    sums = np.concatenate([np.zeros(1), np.cumsum(ordered)])
    quantiles = np.quantile(ordered, np.linspace(0, 1, 1001))
    widths = np.maximum(np.diff(quantiles), 1e-9)
    mass = np.cumsum(widths ** (2 / 3))
    book = np.interp((np.arange(levels) + 0.5) / levels, mass / mass[-1], quantiles[1:])
    for _ in range(150):
        ends = np.concatenate([[0], np.searchsorted(ordered, (book[1:] + book[:-1]) / 2), [len(ordered)]])
        counts = np.diff(ends)
        book = np.where(counts > 0, np.diff(sums[ends]) / np.maximum(counts, 1), book)
    ends = np.concatenate([[0], np.searchsorted(ordered, (book[1:] + book[:-1]) / 2), [len(ordered)]])
    explained = float((np.diff(sums[ends]) ** 2 / np.maximum(np.diff(ends), 1)).sum())
    energy = float(np.square(ordered).sum())
    return (energy - explained) / energy


@pytest.mark.parametrize("name", LLOYD)
def test_gaussian_error_is_the_lloyd_optimum(name: str) -> None:
    assert relative_error(Levels(name), gaussian(1 << 17)) <= 1.05 * LLOYD[name]


@pytest.mark.parametrize("name", LLOYD)
@pytest.mark.parametrize("draw", [student, laplace])
def test_heavy_tails_cost_no_more_than_their_own_lloyd_optimum(name: str, draw: object) -> None:
    assert callable(draw)
    tensor = draw(1 << 17)
    best = lloyd_error(tensor.abs(), 2 ** (Levels(name).form.bits - 1))
    assert relative_error(Levels(name), tensor) <= 1.05 * best


@pytest.mark.parametrize("name", GRIDS)
def test_a_fixed_grid_gets_its_best_scale(name: str) -> None:
    assert relative_error(Levels(name), gaussian(1 << 17)) <= 1.05 * GRIDS[name]


@pytest.mark.parametrize("draw", [gaussian, student, laplace])
def test_e3m0_is_zero_or_a_power_of_two_of_its_scale_whichever_is_nearest(draw: object) -> None:
    """Sign, three bits of exponent, none of mantissa: one value and one magnitude at a time."""
    assert callable(draw)
    tensor = draw(256 * 3)
    levels, scales = Levels("e3m0").quantise(tensor, 3)
    decoded = Levels("e3m0").dequantise(levels, scales).tolist()
    for place, value in enumerate(tensor.tolist()):
        scale = float(scales[place // 256])
        magnitudes = [0.0, *(scale * 2.0**exponent for exponent in range(7))]
        nearest = min(abs(abs(value) - magnitude) for magnitude in magnitudes)
        assert abs(decoded[place]) in magnitudes
        assert decoded[place] * value >= 0
        assert abs(decoded[place] - value) <= nearest + scale * 64 / 4096, "but for a cell's width at a border"
    for block in range(3):
        part = tensor[256 * block : 256 * block + 256]
        tried = [float(part.abs().max()) / 64 * 1.02**step for step in range(-60, 61)]
        best = min(float((slow_e3m0(part, scale) - part).square().sum()) for scale in tried)
        error = float((torch.tensor(decoded[256 * block : 256 * block + 256]) - part).square().sum())
        assert error <= 1.2 * best, "Lloyd's iteration finds a minimum near by, which need not be the least"


def slow_e3m0(part: Tensor, scale: float) -> Tensor:
    magnitudes = torch.tensor([0.0, *(scale * 2.0**exponent for exponent in range(7))])
    return part.sign() * magnitudes[(part.abs()[:, None] - magnitudes).abs().argmin(1)]


@pytest.mark.parametrize(("bits", "error"), [(1, 0.012), (2, 0.004), (4, 5e-4), (8, 5e-6)])
def test_top_k_values_are_fitted_away_from_zero(bits: int, error: float) -> None:
    tensor = gaussian(1 << 18)
    indices = TopK(32, 4096).select(tensor, len(tensor))
    assert indices is not None
    assert relative_error(Levels(f"bits({bits})"), tensor[indices], 32) <= error


def test_two_bits_find_two_two_sided_levels() -> None:
    tensor = torch.tensor([0.5, -0.5, 1.5, -1.5] * 500)
    assert relative_error(Levels("bits(2)"), tensor) < 1e-12


@pytest.mark.parametrize("values", VALUES, ids=str)
@given(
    count=st.integers(1, 700),
    seed=st.integers(0, 2**32),
    exponent=st.integers(-40, 60),
    power=st.sampled_from([0.0, 0.3, 1.0, 3.0, 12.0]),
    alike=st.sampled_from([None, 1, 32]),
)
def test_the_declared_bound_holds(
    values: Values, count: int, seed: int, exponent: int, power: float, alike: int | None
) -> None:
    """Over flat, Gaussian and wildly heavy values, and single spikes."""
    tensor = gaussian(count, seed)
    tensor = (tensor.sign() * tensor.abs() ** power).clamp(-(2.0**20), 2.0**20) * 2.0**exponent
    tensor = torch.where(tensor.abs() < 2.0**-60, torch.zeros_like(tensor), tensor)
    assert relative_error(values, tensor, alike) ** 0.5 <= values.error_bound(count, alike) + 1e-6 or not tensor.any()


@pytest.mark.parametrize("values", VALUES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 129, 5000])
def test_counts_and_types(values: Values, count: int) -> None:
    blocks = values.blocks(count, None)
    levels, scales = values.quantise(gaussian(count), blocks)
    assert levels.shape == (count,)
    assert levels.dtype == values.level_dtype
    assert scales.shape == (blocks, values.scale_columns)
    decoded = values.dequantise(levels, scales)
    assert decoded.shape == (count,)
    assert decoded.dtype == torch.float32


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_decoding_rounds_once(name: str, seed: int) -> None:
    """Against exact fractions: the product is exact, so fused and unfused hardware give the same sum."""
    tensor = gaussian(300, seed) * 2.0 ** (17 * seed)
    form = Levels(name).form
    levels, scales = Levels(name).quantise(tensor, 3)
    decoded = Levels(name).dequantise(levels, scales).tolist()
    length = -(-300 // len(scales))
    for place in range(0, 300, 7):
        level = int(levels[place])
        row = [Fraction(scale) for scale in scales[place // length].tolist()]
        magnitude = form.book[level & ((1 << (form.bits - 1)) - 1)]
        exact = row[0] if form.bits == 1 else magnitude * row[-1] + (row[0] if form.scales == 2 else 0)
        if form.bits > 1:
            product = magnitude * row[-1]
            assert Fraction(float(torch.tensor(float(product)))) == product
        nearest = float(torch.tensor(float(exact), dtype=torch.float64).to(torch.float32))
        assert decoded[place] == (-nearest if level >> (form.bits - 1) else nearest)


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
    assert relative_error(Levels("bits(1)"), tensor, 32) < 0.01
    assert relative_error(Levels("bits(1)"), tensor) > 0.1


def test_float16_reaches_what_is_far_below_its_own_range() -> None:
    tensor = gaussian(1000) * 1e-9
    assert relative_error(Floats("fp16"), tensor) < 2.0**-22


def test_an_unknown_number_of_bits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bits\(3\).*bits\(1\), bits\(2\), bits\(4\), bits\(8\)"):
        Levels("bits(3)")
