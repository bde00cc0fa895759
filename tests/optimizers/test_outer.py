"""Outer steps: equal to their references, pure, the same bits whatever the threads; schedules."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from optimizers import outer as outer_module
from optimizers.outer import CONSTANT, OUTERS, OuterSettings, build_outer
from optimizers.schedule import Schedule, cosine_of_half_turns, float32, integer_power
from optimizers.seam import OuterOptimizer, Tensors

torch.set_num_threads(1)

Reference = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def settings_of(kind: str) -> OuterSettings:
    return OuterSettings(kind=kind, lr=0.1, momentum=0.8, weight_decay=0.05)


def tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (5, 7), "b": (3,), "scalar": (), "empty": (0, 4)}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def steps(outer: OuterOptimizer, rounds: int, anchor: Tensors) -> tuple[Tensors, Tensors]:
    state: Tensors = outer.init(anchor)
    for index in range(rounds):
        anchor, state = outer.update(anchor, tensors(100 + index), state, round_index=index)
    return anchor, state


def torch_steps(optimizer_of: Reference, rounds: int, anchor: Tensors) -> Tensors:
    parameters = {name: torch.nn.Parameter(value.double()) for name, value in anchor.items()}
    optimizer = optimizer_of(list(parameters.values()))
    for index in range(rounds):
        for name, value in tensors(100 + index).items():
            parameters[name].grad = value.double()
        optimizer.step()
    return {name: parameter.detach().float() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        (OuterSettings("sgd", 0.3), lambda p: torch.optim.SGD(p, 0.3)),
        (OuterSettings("heavyball", 0.7, 0.9), lambda p: torch.optim.SGD(p, 0.7, 0.9)),
        (OuterSettings("nesterov", 0.7, 0.9), lambda p: torch.optim.SGD(p, 0.7, 0.9, nesterov=True)),
        (
            OuterSettings("adamw", 0.02, weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.02, (0.9, 0.95), weight_decay=0.1),
        ),
    ],
    ids=["sgd", "heavyball", "nesterov", "adamw"],
)
def test_it_equals_torch(settings: OuterSettings, reference: Reference) -> None:
    anchor, _ = steps(build_outer(settings), 40, tensors(0))
    expected = torch_steps(reference, 40, tensors(0))
    for name in anchor:
        torch.testing.assert_close(anchor[name], expected[name], rtol=1e-4, atol=1e-4)


def test_sign_moves_every_weight_by_the_learning_rate_and_none_where_the_delta_is_zero() -> None:
    outer = build_outer(OuterSettings("sign", 0.25, weight_decay=0.4))
    anchor, _ = outer.update(
        {"w": torch.tensor([1.0, 2.0, -4.0])}, {"w": torch.tensor([1e-30, 0.0, -7.0])}, {}, round_index=0
    )
    torch.testing.assert_close(anchor["w"], torch.tensor([0.9 - 0.25, 1.8, -3.6 + 0.25]))


# The contract of every outer optimiser.


@pytest.mark.parametrize("kind", OUTERS)
def test_nothing_given_is_changed(kind: str) -> None:
    outer = build_outer(settings_of(kind))
    anchor, delta = tensors(0), tensors(1)
    state = outer.init(anchor)
    copies = [{name: value.clone() for name, value in part.items()} for part in (anchor, delta, state)]
    outer.update(anchor, delta, state, round_index=3)
    for part, copy in zip((anchor, delta, state), copies, strict=True):
        assert part.keys() == copy.keys()
        assert all(torch.equal(part[name], copy[name]) for name in part)


@pytest.mark.parametrize("kind", OUTERS)
def test_it_goes_downhill(kind: str) -> None:
    outer = build_outer(settings_of(kind))
    anchor = {"w": torch.tensor([3.0, -2.0])}
    state = outer.init(anchor)
    for index in range(200):
        anchor, state = outer.update(anchor, {"w": 0.3 * anchor["w"]}, state, round_index=index)
    assert float(anchor["w"].abs().max()) < 0.2


@pytest.mark.parametrize("kind", OUTERS)
def test_a_fragment_leaves_the_rest_and_its_state(kind: str) -> None:
    outer = build_outer(settings_of(kind))
    anchor, state = steps(outer, 2, tensors(0))
    new_anchor, new_state = outer.update(anchor, {"a": torch.ones(5, 7)}, state, round_index=2)
    assert not torch.equal(new_anchor["a"], anchor["a"])
    assert new_state.keys() == state.keys()
    for old, new in ((anchor, new_anchor), (state, new_state)):
        assert all(torch.equal(old[name], new[name]) for name in old if not name.endswith("a"))


@pytest.mark.parametrize("kind", OUTERS)
def test_threads_and_memory_layout_do_not_change_a_bit(kind: str) -> None:
    outer = build_outer(settings_of(kind))
    generator = torch.Generator().manual_seed(5)
    anchor = {"w": torch.randn(401, 307, generator=generator)}
    delta = {"w": torch.randn(401, 307, generator=generator)}

    def run(anchor: Tensors, delta: Tensors, threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        try:
            new, state = dict(anchor), outer.init(anchor)
            for index in range(3):
                new, state = outer.update(new, delta, state, round_index=index)
        finally:
            torch.set_num_threads(1)
        return new["w"]

    plain = run(anchor, delta, 1)
    # Strided tensors take another loop of the kernel, often a scalar one: a fused operation in either would show.
    strided = run({"w": anchor["w"].t().contiguous().t()}, {"w": delta["w"].t().contiguous().t()}, 2)
    assert torch.equal(plain, strided)


@pytest.mark.parametrize("kind", OUTERS)
def test_it_equals_its_equation_with_every_operation_rounded_by_itself(kind: str) -> None:
    """The reference is plain float64 arithmetic, rounded to float32 after each operation: what IEEE 754 prescribes."""
    settings = settings_of(kind)
    outer = build_outer(settings)
    generator = torch.Generator().manual_seed(6)
    start = torch.randn(50, generator=generator)
    anchor, state = {"w": start}, outer.init({"w": start})
    reference, buffers = start.tolist(), [[0.0] * 50, [0.0] * 50]
    for index in range(4):
        delta = torch.randn(50, generator=generator)
        anchor, state = outer.update(anchor, {"w": delta}, state, round_index=index)
        for i, value in enumerate(delta.tolist()):
            step, buffers[0][i], buffers[1][i] = slow_step(settings, value, buffers[0][i], buffers[1][i], index)
            kept = float32(reference[i] * float32(1 - settings.lr * settings.weight_decay))
            reference[i] = float32(kept - float32(step * float32(settings.lr)))
    assert anchor["w"].tolist() == reference


def slow_step(
    settings: OuterSettings, delta: float, first: float, second: float, index: int
) -> tuple[float, float, float]:
    """The direction and both buffers."""
    if settings.kind == "sgd":
        return delta, first, second
    if settings.kind == "sign":
        return math.copysign(1.0, delta), first, second
    if settings.kind in ("heavyball", "nesterov"):
        mu = float32(settings.momentum)
        first = float32(float32(first * mu) + delta)
        if settings.kind == "heavyball":
            return first, first, second
        return float32(delta + float32(first * mu)), first, second
    b1, b2 = settings.beta1, settings.beta2
    first = float32(float32(first * float32(b1)) + float32(delta * float32(1 - b1)))
    second = float32(float32(second * float32(b2)) + float32(float32(delta * delta) * float32(1 - b2)))
    mean = float32(first * float32(1 / (1 - integer_power(b1, index + 1))))
    square = float32(second * float32(1 / (1 - integer_power(b2, index + 1))))
    return float32(mean / float32(float32(math.sqrt(square)) + float32(settings.eps))), first, second


def test_the_schedule_moves_the_outer_learning_rate() -> None:
    outer = build_outer(OuterSettings("sign", 1.0), Schedule("wsd", warmup=3, rounds=10, decay=0.5))
    anchor = {"w": torch.zeros(1)}
    moved = [-float(outer.update(anchor, {"w": torch.ones(1)}, {}, round_index=i)[0]["w"]) for i in range(11)]
    assert moved == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0])


@given(st.floats(0, 1))
def test_the_cosine_is_the_cosine(x: float) -> None:
    assert cosine_of_half_turns(x) == pytest.approx(math.cos(math.pi * x), abs=1e-9)


@given(st.floats(0, 1), st.integers(0, 5000))
def test_the_power_is_the_power(base: float, exponent: int) -> None:
    assert integer_power(base, exponent) == pytest.approx(base**exponent, rel=1e-9, abs=1e-300)


@example("wsd", 0, 1, 0.01, 0.0, 1.0)
@given(
    st.sampled_from(["constant", "cosine", "wsd"]),
    st.integers(0, 50),
    st.integers(0, 300),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1000),
)
def test_a_schedule_stays_between_final_and_one_after_the_warm_up(
    kind: str, warmup: int, rounds: int, decay: float, final: float, position: float
) -> None:
    schedule = Schedule(kind, warmup, rounds, decay, final)
    schedule.validate()
    factor = schedule.factor(position)
    assert 0 <= factor <= 1
    if position >= warmup:
        assert factor >= final - 1e-8
    if rounds == 0 and position >= warmup:
        assert factor == 1
    if rounds and kind != "constant" and position >= max(rounds, warmup):
        assert factor == pytest.approx(final, abs=1e-8)


def test_the_constant_schedule_is_one() -> None:
    assert [CONSTANT.factor(position) for position in (0, 0.5, 1e9)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (OuterSettings(kind="adam"), "outer.kind = 'adam': must be one of sgd, sign"),
        (OuterSettings(lr=0.0), "outer.lr = 0.0"),
        (OuterSettings(momentum=1.0), "outer.momentum = 1.0"),
        (OuterSettings(weight_decay=-1.0), "outer.weight_decay = -1.0"),
        (OuterSettings(eps=0.0), "outer.eps = 0.0"),
    ],
)
def test_wrong_settings_name_themselves(wrong: OuterSettings, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_outer(wrong)


def test_the_documents_example_of_an_outer_step_works() -> None:
    """What a reader would write: it learns, and `build_outer` knows all that there is."""
    page = (Path(__file__).parents[2] / "docs" / "METHODS.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    written = dict(vars(outer_module))
    exec(code, written)
    signum = written["Signum"](OuterSettings(lr=0.02, momentum=0.5))
    anchor = {"w": torch.tensor([3.0, -2.0])}
    state = signum.init(anchor)
    for index in range(200):
        anchor, state = signum.update(anchor, {"w": 0.3 * anchor["w"]}, state, round_index=index)
    assert float(anchor["w"].abs().max()) < 0.2
    assert all(type(build_outer(OuterSettings(kind=kind))).__name__.lower() == kind for kind in OUTERS)
