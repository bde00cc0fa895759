"""The tensor side of a round: pure, and it refuses what is no number; what is wanted, and what is left of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compression.chain import parse_chain
from compression.seam import InvalidPacket, Packet
from models.registry import build_model
from optimizers.presets import PRESETS, method_from_settings
from peer.method import (
    Contribution,
    apply_round,
    check_payload,
    decode,
    fingerprint,
    initial_state,
    make_payload,
    moved_residual,
    residual_after,
    rules_of,
    wanted,
)
from peer.trainer import Diverged, Trainer
from tests.peer.method_parts import (
    DELTA,
    RESIDUAL,
    TopK,
    contribution,
    parse_test_chain,
    rules,
    start,
    toy_batch,
    toy_loss,
    toy_model,
    toy_trainer,
)

# What is wanted, and what is left of it.


def test_what_is_wanted_is_the_residual_decayed_and_the_new_delta() -> None:
    chosen = rules("sparseloco", "topk1", residual_decay=0.5)
    assert wanted(start(chosen), DELTA, chosen.method)["w"].tolist() == [10.5, 19.0, -28.0]
    owed = wanted(start(chosen, missed=True), DELTA, chosen.method)
    assert owed["w"].tolist() == [11.0, 18.0, -26.0], "what missed its round is a debt, and does not decay"
    plain = rules("diloco", "topk1", residual_decay=0.5)
    assert wanted(start(plain), DELTA, plain.method)["w"].tolist() == [11.0, 18.0, -26.0]
    assert wanted(start(chosen, residual={}), DELTA, chosen.method)["w"].tolist() == DELTA["w"].tolist()


def test_what_is_left_is_what_was_not_said_or_nothing_without_error_feedback() -> None:
    for preset, left in (("sparseloco", [10.0, 20.0, 0.0]), ("diloco", None)):
        chosen = rules(preset, "topk1")
        payload = make_payload(DELTA, chosen.compressor)
        residual = residual_after(payload, DELTA, start(chosen).anchor, chosen)
        assert {name: value.tolist() for name, value in residual.items()} == ({} if left is None else {"w": left})


def test_a_round_leaves_the_residual_alone() -> None:
    chosen = rules("sparseloco", "topk1")
    for missed in (False, True):
        before = start(chosen, missed=missed)
        after = apply_round(before, [contribution("a", DELTA, chosen)], chosen, round_index=0)
        assert after.residual is before.residual and bool(after.missed) == missed
        assert not torch.equal(after.anchor["w"], before.anchor["w"])


def test_a_round_without_contributions_moves_nothing() -> None:
    chosen = rules("distro", "topk1")
    before = start(chosen)
    after = apply_round(before, [], chosen, round_index=0)
    assert fingerprint(after.anchor, after.outer) == fingerprint(before.anchor, before.outer)
    assert after.residual is before.residual


def test_moving_to_another_chain_says_again_what_only_the_old_one_heard() -> None:
    chosen = rules("sparseloco", "topk1")
    old, new = make_payload({"w": torch.tensor([0.0, 7.0, 0.0])}, TopK(1)), make_payload(RESIDUAL, TopK(1))
    moved = moved_residual({"w": torch.tensor([1.0, 1.0, 1.0])}, [old, old], [new], start(chosen).anchor, TopK(1))
    assert moved["w"].tolist() == [1.0, 15.0, -3.0]
    nothing_waits = moved_residual({}, [old], [new], start(chosen).anchor, TopK(1))
    assert nothing_waits["w"].tolist() == [0.0, 7.0, -4.0]
    assert moved_residual({}, [], [], start(chosen).anchor, TopK(1)) == {}


@given(st.lists(st.integers(0, 2**32), max_size=4), st.lists(st.integers(0, 2**32), max_size=4), st.integers(1, 3))
def test_a_move_and_the_move_back_leave_what_was(left: list[int], joined: list[int], k: int) -> None:
    def payload(seed: int) -> bytes:
        return make_payload({"w": torch.randn(3, generator=torch.Generator().manual_seed(seed))}, TopK(k))

    there, here = [payload(seed) for seed in left], [payload(seed) for seed in joined]
    anchor = start(rules("sparseloco")).anchor
    moved = moved_residual(RESIDUAL, there, here, anchor, TopK(k))
    back = moved_residual(moved, here, there, anchor, TopK(k))
    torch.testing.assert_close(back["w"], RESIDUAL["w"], rtol=1e-4, atol=1e-4)
    difference = sum((decode(p, anchor, TopK(k))["w"] for p in there), torch.zeros(3))
    difference -= sum((decode(p, anchor, TopK(k))["w"] for p in here), torch.zeros(3))
    torch.testing.assert_close(moved["w"] - RESIDUAL["w"], difference, rtol=1e-4, atol=1e-4)


def test_nothing_given_is_changed() -> None:
    chosen = rules("muloco", "topk1")
    before = start(chosen)
    copy = fingerprint(before.anchor, before.outer), RESIDUAL["w"].clone(), DELTA["w"].clone()
    said = wanted(before, DELTA, chosen.method)
    mine = contribution("a", said, chosen)
    apply_round(before, [mine], chosen, round_index=0)
    residual_after(mine.payload, said, before.anchor, chosen)
    moved_residual(before.residual, [mine.payload], [mine.payload], before.anchor, chosen.compressor)
    assert fingerprint(before.anchor, before.outer) == copy[0]
    assert torch.equal(before.residual["w"], copy[1])
    assert torch.equal(DELTA["w"], copy[2])


def test_a_distro_packet_to_three_peers_is_250_times_below_an_all_reduce() -> None:
    compressor = rules_of(PRESETS["distro"], parse_chain).compressor
    generator = torch.Generator().manual_seed(0)
    delta = {n: torch.randn(p.shape, generator=generator) for n, p in build_model("gpt-mini", 0).named_parameters()}
    parameters = sum(value.numel() for value in delta.values())
    assert 250 * 3 * len(make_payload(delta, compressor)) < 2 * 3 / 4 * 4 * parameters


# Strangers, fingerprints, the trainer.


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_a_payload_that_is_no_number_or_absurd_is_refused(value: float) -> None:
    chosen = rules("diloco")
    payload = TopK().pack([Packet(torch.tensor([1]), torch.tensor([value]), torch.zeros(0))], [])
    anchor = start(chosen).anchor
    with pytest.raises(InvalidPacket, match="w: a coefficient"):
        check_payload(payload, anchor, chosen.compressor)
    with pytest.raises(InvalidPacket, match="w: a coefficient"):
        apply_round(start(chosen), [Contribution("b", 1, payload)], chosen, round_index=0)
    check_payload(make_payload(DELTA, chosen.compressor), anchor, chosen.compressor)


def test_two_contributions_of_one_peer_crash() -> None:
    chosen = rules("diloco")
    with pytest.raises(AssertionError, match="two contributions"):
        apply_round(start(chosen), [contribution("a", DELTA, chosen)] * 2, chosen, round_index=0)


def test_the_fingerprint_follows_every_bit_name_shape_and_type_but_not_the_order() -> None:
    base = {"a": torch.zeros(2, 3), "b": torch.zeros(())}
    changed = base["a"].clone()
    changed[1, 2] = -0.0
    variants = [
        (base, {}),
        ({}, base),
        ({"a": changed, "b": base["b"]}, {}),
        ({"a": base["a"].view(3, 2), "b": base["b"]}, {}),
        ({"a": base["a"].to(torch.int32), "b": base["b"]}, {}),
        ({"c": base["a"], "b": base["b"]}, {}),
        ({"a": base["a"]}, {"b": base["b"]}),
        (base | {"empty": torch.zeros(0)}, {}),
    ]
    prints = [fingerprint(anchor, outer) for anchor, outer in variants]
    assert len(set(prints)) == len(prints)
    assert all(len(value) == 16 for value in prints)
    assert fingerprint(dict(reversed(base.items())), {}) == prints[0]
    assert fingerprint({"a": base["a"].t().contiguous().t(), "b": base["b"]}, {}) == prints[0]


def test_moments_live_on_and_the_anchor_does_not_move() -> None:
    trainer = toy_trainer(rules("diloco", inner_steps=3).method, 0)
    anchor = initial_state(trainer.model, rules("diloco")).anchor
    before = fingerprint(anchor, {})
    first = trainer.run_inner_steps(anchor, 0)
    second = trainer.run_inner_steps(anchor, 0)
    assert fingerprint(anchor, {}) == before
    assert first.tokens == 3 * (8 * 9 - 8)
    assert first.loss == pytest.approx(second.loss, rel=0.2)
    assert fingerprint(first.delta, {}) != fingerprint(second.delta, {})


def test_a_peer_that_is_asked_to_stop_says_what_it_has() -> None:
    trainer = toy_trainer(rules("diloco", inner_steps=30).method, 0)
    anchor = initial_state(trainer.model, rules("diloco")).anchor
    answers = iter([False, True])
    assert trainer.run_inner_steps(anchor, 0, lambda: next(answers)).tokens == 2 * (8 * 9 - 8)


def test_divergence_is_named_and_leaves_fresh_moments() -> None:
    method = rules("diloco", inner_steps=1).method
    trainer = Trainer(toy_model(), toy_loss, lambda *_: torch.full((2, 9), float("inf")), method)
    anchor = initial_state(trainer.model, rules("diloco")).anchor
    with pytest.raises(Diverged, match="round 5"):
        trainer.run_inner_steps(anchor, 5)
    trainer.sample = lambda *_: toy_batch(0, 0, 0)
    assert all(bool(value.isfinite().all()) for value in trainer.run_inner_steps(anchor, 6).delta.values())


def test_the_schedule_is_the_outer_one_only_without_an_inner_optimiser() -> None:
    settings: dict[str, object] = {"schedule.kind": "wsd", "schedule.rounds": 10, "schedule.warmup": 0, "chain": "all"}
    for preset, moved in (("distro", False), ("diloco", True)):
        chosen = rules_of(method_from_settings(preset, settings), parse_test_chain)
        before = start(chosen, residual={})
        after = apply_round(before, [contribution("b", DELTA, chosen)], chosen, round_index=10)
        assert bool((after.anchor["w"] != before.anchor["w"]).all()) == moved


def test_wrong_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match="batch = 0"):
        rules_of(replace(PRESETS["distro"], batch=0), parse_test_chain)
