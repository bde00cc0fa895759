"""The contract of every compressor, over all chains worth having; and their names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compression.chain import Chain, parse_chain
from compression.feedback import compress_with_residual, decode
from compression.seam import Packet, TensorSpec
from compression.select import All, Drawn

CHAINS = [
    *(f"identity all {values}" for values in ("fp32", "bf16", "fp16", "bits(8)", "bits(4)", "bits(2)", "bits(1)")),
    "identity all int(8)",
    "identity all int(4)",
    "identity all e3m0",
    "dct(64) all bits(2)",
    "dct(64) topk(8/4096) bits(1)",
    "dct(64) topk(32/4096) bits(1)",
    "dct(64) topk(32/4096) fp32",
    "dct(16) topk(4/64) bits(4)",
    "identity topk(64/4096) bits(2)",
    "identity topk(1/8) bits(8)",
    "identity topk(3/7) bf16",
    "dct(64) globaltopk(1/100) bits(4)",
    "identity globaltopk(1/20) bits(2)",
    "identity random(64/4096) bits(8)",
    "dct(8) mask(3/64) int(8)",
    "identity mask(16/64) fp16",
]
SHAPES = [(), (0,), (2, 0), (1,), (64,), (13, 1), (97,), (63, 65), (5, 3, 7), (4, 3, 3, 3), (70, 130)]

pytestmark = pytest.mark.parametrize("chain", [parse_chain(text) for text in CHAINS], ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def contribution(scale: float = 1e-3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"p{i:02}": (torch.randn(shape, generator=generator) * scale).to(dtype) for i, shape in enumerate(SHAPES)}


def same(left: Packet, right: Packet) -> bool:
    indices = left.indices is None and right.indices is None
    if left.indices is not None and right.indices is not None:
        indices = torch.equal(left.indices, right.indices)
    return (
        indices
        and left.seed == right.seed
        and torch.equal(left.levels, right.levels)
        and bool((left.scales == right.scales).all())
    )


def test_its_name_says_what_it_is(chain: Chain) -> None:
    assert parse_chain(str(chain)) == chain
    assert str(chain) in CHAINS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shape_and_type_survive(chain: Chain, dtype: torch.dtype) -> None:
    for tensor in contribution(dtype=dtype).values():
        spec = TensorSpec.of(tensor)
        restored = chain.decompress(chain.compress(tensor), spec)
        assert TensorSpec.of(restored) == spec


def test_packing_loses_nothing(chain: Chain) -> None:
    tensors = list(contribution().values())
    specs = [TensorSpec.of(tensor) for tensor in tensors]
    packets = [chain.compress(tensor) for tensor in tensors]
    data = chain.pack(packets, specs)
    assert len(data) <= chain.size_max(specs)
    unpacked = chain.unpack(data, specs)
    assert all(same(*pair) for pair in zip(packets, unpacked, strict=True))
    assert chain.pack(unpacked, specs) == data


def test_packet_and_residual_are_what_was_wanted(chain: Chain) -> None:
    wanted = contribution()
    data, residual = compress_with_residual(chain, wanted)
    decoded = decode(chain, data, {name: TensorSpec.of(tensor) for name, tensor in wanted.items()})
    for name, tensor in wanted.items():
        assert torch.equal(residual[name], tensor - decoded[name])
        torch.testing.assert_close(decoded[name] + residual[name], tensor, rtol=1e-5, atol=1e-9)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.2, 1.0, 4.0]), st.sampled_from(SHAPES), st.integers(-30, 30))
def test_the_declared_bound_holds(chain: Chain, seed: int, power: float, shape: tuple[int, ...], exponent: int) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).clamp(-6, 6)
    tensor = tensor.sign() * tensor.abs() ** power * 2.0**exponent
    spec = TensorSpec.of(tensor)
    restored = chain.decompress(chain.compress(tensor), spec)
    bound = chain.error_bound([spec])
    assert 0 <= bound <= 1.001
    assert float((restored - tensor).norm()) <= (bound + 1e-6) * float(tensor.norm())


def test_something_gets_through(chain: Chain) -> None:
    """Feedback shrinks what is left: sending the residual again and again reaches the tensor."""
    wanted = {"matrix": contribution()["p10"]}
    start = float(wanted["matrix"].norm())
    residual = wanted
    for _ in range(5):
        _, residual = compress_with_residual(chain, residual)
    assert float(residual["matrix"].norm()) < 0.99 * start


def test_the_same_tensor_gives_the_same_bytes(chain: Chain) -> None:
    assert compress_with_residual(chain, contribution())[0] == compress_with_residual(chain, contribution())[0]


def test_the_estimate_is_close(chain: Chain) -> None:
    tensor = torch.randn(300, 700, generator=torch.Generator().manual_seed(3)) * 1e-3
    specs = [TensorSpec.of(tensor)]
    actual = len(chain.pack([chain.compress(tensor)], specs))
    # The entropy of coded levels depends on how many of them are kept, and on the length of blocks.
    unusual = str(chain) in ("identity topk(3/7) bf16", "dct(8) mask(3/64) int(8)")
    assert chain.size_estimate(specs) == pytest.approx(actual, rel=0.1 if unusual else 0.03)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", [(), (5,), (70, 70)])
def test_what_is_not_finite_is_refused(chain: Chain, bad: float, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = bad
    with pytest.raises(ValueError, match=r"weight: .*NaN"):
        compress_with_residual(chain, {"weight": tensor})


def test_zeros_cost_little_and_decode_as_zeros(chain: Chain) -> None:
    tensor = torch.zeros(100, 100)
    data, residual = compress_with_residual(chain, {"weight": tensor})
    assert torch.equal(residual["weight"], tensor)
    several = {name: torch.zeros_like(tensor) for name, tensor in contribution().items()}
    assert all(not tensor.any() for tensor in compress_with_residual(chain, several)[1].values())
    if not isinstance(chain.selection, (All, Drawn)):
        assert len(data) < 1 + tensor.numel() // 8


@settings(max_examples=15, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    exponent=st.integers(-60, 60),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 2**32),
)
def test_any_tensor_goes_through(chain: Chain, shape: tuple[int, ...], exponent: int, zeros: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator).clamp(-4, 4) ** 3 * 2.0**exponent
    tensor = tensor * (torch.rand(shape, generator=generator) >= zeros)
    specs = [TensorSpec.of(tensor)]
    packet = chain.compress(tensor)
    data = chain.pack([packet], specs)
    assert len(data) <= chain.size_max(specs)
    (unpacked,) = chain.unpack(data, specs)
    assert same(packet, unpacked)
    assert torch.equal(chain.decompress(unpacked, specs[0]), chain.decompress(packet, specs[0]))
