"""What a peer's own hardware may change: nothing but rounding, whatever the inner optimiser."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.registry import build_model, loss_fn
from optimizers.presets import method_from_settings
from peer.build import chosen_hardware
from peer.trainer import CPU, Hardware, InnerResult, Trainer


def text(round_index: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * round_index + step)
    return torch.randint(0, 256, (7, 17), generator=generator)


def trained(preset: str, hardware: Hardware, seen: list[int] | None = None) -> InnerResult:
    method = method_from_settings(preset, {"inner_steps": 4, "batch": 7})

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        if seen is not None:
            seen.append(len(batch))
        return loss_fn(model, batch)

    trainer = Trainer(build_model("gpt-nano", 0), loss, text, method, hardware)
    return trainer.run_inner_steps({n: p.detach().clone() for n, p in trainer.model.named_parameters()}, 0)


@pytest.mark.parametrize("preset", ["allreduce", "diloco", "muloco"])
@pytest.mark.parametrize("parts", [[3, 3, 1], [1] * 7])
def test_a_batch_in_parts_is_the_same_step(preset: str, parts: list[int]) -> None:
    seen: list[int] = []
    whole, pieces = trained(preset, CPU), trained(preset, Hardware(micro_batch=parts[0]), seen)
    assert seen == parts * 4
    assert pieces.tokens == whole.tokens
    assert pieces.loss == pytest.approx(whole.loss, rel=1e-4)
    length = sum(float(value.square().sum()) for value in whole.delta.values()) ** 0.5
    apart = sum(float((pieces.delta[n] - value).square().sum()) for n, value in whole.delta.items()) ** 0.5
    # Adam's first steps are signs, and Muon's products bfloat16: both make much of the last bit.
    assert apart < (0.001 if preset == "allreduce" else 0.1) * length


def test_a_part_as_large_as_the_batch_changes_no_bit() -> None:
    whole, parts = trained("diloco", CPU), trained("diloco", Hardware(micro_batch=7))
    assert all(torch.equal(parts.delta[name], value) for name, value in whole.delta.items())


def test_bfloat16_is_for_products_alone() -> None:
    plain, narrow = trained("allreduce", CPU), trained("allreduce", Hardware(bf16=True))
    assert narrow.loss == pytest.approx(plain.loss, rel=0.01)
    assert all(value.dtype == torch.float32 for value in narrow.delta.values())
    assert any(not torch.equal(narrow.delta[name], value) for name, value in plain.delta.items())
    for name, value in plain.delta.items():
        # Zero, or far above what bfloat16 loses.
        assert float((narrow.delta[name] - value).norm()) <= 0.05 * float(value.norm())


def test_a_processor_takes_float32_unless_told() -> None:
    assert chosen_hardware("cpu") == Hardware("cpu", 0, bf16=False)
    assert chosen_hardware("cpu", "bf16", 4) == Hardware("cpu", 4, bf16=True)
    with pytest.raises(ValueError, match="precision 'fp8' is unknown; choose one of auto, fp32, bf16"):
        chosen_hardware("cpu", "fp8")
