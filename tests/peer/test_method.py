"""The tensor side of a round: DeMo, DiLoCo and plain training are what the papers say, nothing is lost, same bits."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from compression.chain import parse_chain
from compression.seam import Compressor, InvalidPacket, Packet, TensorSpec
from models.registry import build_model
from optimizers.presets import PRESETS, Method, method_from_settings
from peer.method import (
    Contribution,
    Rules,
    TrainingState,
    apply_round,
    check_payload,
    decode,
    fingerprint,
    initial_state,
    make_payload,
    moved_residual,
    rules_of,
    wanted,
)
from peer.trainer import Diverged, Trainer

torch.set_num_threads(1)


class TopK(Compressor):
    """The `k` largest values of a tensor (0: all), as float32: the plainest compressor, to compare with."""

    def __init__(self, k: int = 0) -> None:
        self.k = k

    def compress(self, tensor: Tensor) -> Packet:
        if not bool(tensor.isfinite().all()):
            raise ValueError("not finite")
        flat = tensor.reshape(-1).float()
        kept = min(self.k or flat.numel(), flat.numel())
        indices = flat.abs().topk(kept).indices.sort().values
        return Packet(indices, flat[indices], torch.zeros(0))

    def values_of(self, packet: Packet) -> Tensor:
        return packet.levels

    def coefficients(self, packet: Packet, spec: TensorSpec) -> Tensor:
        dense = torch.zeros(torch.Size(spec.shape).numel())
        assert packet.indices is not None
        dense[packet.indices] = packet.levels
        return dense

    def restore(self, coefficients: Tensor, spec: TensorSpec) -> Tensor:
        return coefficients.view(spec.shape)

    def pack(self, packets: list[Packet], specs: list[TensorSpec]) -> bytes:
        parts = []
        for packet in packets:
            assert packet.indices is not None
            pairs = zip(packet.indices.tolist(), packet.levels.tolist(), strict=True)
            parts.append(b"".join(struct.pack("<If", *pair) for pair in pairs))
        return b"".join(struct.pack("<I", len(part)) + part for part in parts)

    def unpack(self, data: bytes, specs: list[TensorSpec]) -> list[Packet]:
        packets = []
        for spec in specs:
            (size,) = struct.unpack_from("<I", data.ljust(4, b"\0"))
            pairs, data = list(struct.iter_unpack("<If", data[4 : 4 + size])), data[4 + size :]
            indices = torch.tensor([pair[0] for pair in pairs], dtype=torch.int64)
            if len(pairs) and int(indices.max()) >= torch.Size(spec.shape).numel():
                raise InvalidPacket("index out of range")
            packets.append(Packet(indices, torch.tensor([pair[1] for pair in pairs]), torch.zeros(0)))
        return packets


def parse_test_chain(text: str) -> Compressor:
    return TopK(int(text.removeprefix("topk"))) if text.startswith("topk") else TopK()


def rules(preset: str, chain: str = "all", **overrides: object) -> Rules:
    constant = {"schedule.kind": "constant", "schedule.warmup": 0}
    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    return rules_of(method_from_settings(preset, constant | {"chain": chain} | settings), parse_test_chain)


def toy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def toy_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch[:, :6]), batch[:, 6:])


def toy_batch(peer: int, round_index: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(peer * 1_000_003 + round_index * 1_009 + step)
    x = torch.randn(8, 6, generator=generator)
    return torch.cat((x, torch.stack((x[:, 0], x[:, 1] - x[:, 2], x.sum(1) / 3), dim=1)), dim=1)


def toy_trainer(method: Method, peer: int) -> Trainer:
    return Trainer(toy_model(), toy_loss, lambda round_index, step: toy_batch(peer, round_index, step), method)


def train(rules: Rules, peers: int, rounds: int) -> list[TrainingState]:
    """Every peer applies every round by itself."""
    trainers = [toy_trainer(rules.method, peer) for peer in range(peers)]
    states = [initial_state(trainer.model, rules) for trainer in trainers]
    for round_index in range(rounds):
        said, contributions = [], []
        for peer, trainer in enumerate(trainers):
            result = trainer.run_inner_steps(states[peer].anchor, round_index)
            said.append(wanted(states[peer], result.delta, rules.method))
            contributions.append(Contribution(f"p{peer}", result.tokens, make_payload(said[peer], rules.compressor)))
        states = [
            apply_round(
                states[peer],
                contributions[peer:] + contributions[:peer],
                rules,
                round_index=round_index,
                me=f"p{peer}",
                wanted=said[peer],
            )
            for peer in range(peers)
        ]
    return states


def gradients(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(toy_loss(model, batch), list(parameters.values())), strict=True))


def slow_demo(peers: int, rounds: int, *, k: int, lr: float, beta: float, decay: float) -> dict[str, Tensor]:
    """DeMo as its paper writes it (arXiv 2411.19870), with top-k on plain values: one loop over every value."""
    model = toy_model()
    weights = dict(model.named_parameters())
    momenta = [{name: [0.0] * p.numel() for name, p in weights.items()} for _ in range(peers)]
    for round_index in range(rounds):
        sums: dict[tuple[str, int], list[float]] = {}
        for peer in range(peers):
            for name, gradient in gradients(model, toy_batch(peer, round_index, 0)).items():
                momentum = momenta[peer][name]
                for i, value in enumerate(gradient.reshape(-1).tolist()):
                    momentum[i] = beta * momentum[i] + value
                for i in sorted(range(len(momentum)), key=lambda i: -abs(momentum[i]))[:k]:
                    sums.setdefault((name, i), []).append(momentum[i])
                    momentum[i] = 0.0
        with torch.no_grad():
            for parameter in weights.values():
                parameter.mul_(1 - lr * decay)
            for (name, i), values in sums.items():
                mean = sum(values) / len(values)
                weights[name].view(-1)[i] -= lr * ((mean > 0) - (mean < 0))
    return {name: parameter.detach() for name, parameter in weights.items()}


@pytest.mark.parametrize("merge", ["mean", "mean_of_senders"])
def test_distro_is_demo(merge: str) -> None:
    demo = rules(
        "distro",
        "topk5",
        merge=merge,
        outer__lr=0.003,
        outer__weight_decay=0.1,
        residual_decay=0.9,
        inner__clip=0.0,
    )
    states = train(demo, peers=3, rounds=60)
    expected = slow_demo(3, 60, k=5, lr=0.003, beta=0.9, decay=0.1)
    for name, value in expected.items():
        torch.testing.assert_close(states[0].anchor[name], value, rtol=1e-5, atol=1e-5)


def test_diloco_is_local_adamw_and_nesterov_on_the_mean() -> None:
    diloco = rules("diloco", merge="mean", inner__lr=0.01, inner_steps=4, outer__lr=0.7, outer__momentum=0.9)
    states = train(diloco, peers=3, rounds=10)

    models = [toy_model() for _ in range(3)]
    inners = [torch.optim.AdamW(model.parameters(), 0.01, (0.9, 0.95), weight_decay=0.0) for model in models]
    shared = toy_model()
    outer = torch.optim.SGD(shared.parameters(), 0.7, 0.9, nesterov=True)
    for round_index in range(10):
        for peer, (model, inner) in enumerate(zip(models, inners, strict=True)):
            model.load_state_dict(shared.state_dict())
            for step in range(4):
                inner.zero_grad()
                torch.autograd.backward(toy_loss(model, toy_batch(peer, round_index, step)))
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner.step()
        for name, parameter in shared.named_parameters():
            locals_ = torch.stack([dict(model.named_parameters())[name].detach() for model in models])
            parameter.grad = parameter.detach() - locals_.mean(0)
        outer.step()
    for name, parameter in shared.named_parameters():
        torch.testing.assert_close(states[0].anchor[name], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_one_peer_that_sends_everything_trains_as_plain_torch_does(kind: str) -> None:
    alone = rules("sparseloco", inner__kind=kind, inner__lr=0.02, inner__clip=0.0, inner__momentum=0.5, inner_steps=5)
    (state,) = train(alone, peers=1, rounds=8)

    model = toy_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.5)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), 0.02, (0.9, 0.95), weight_decay=0.0)
    for index in range(40):
        optimizer.zero_grad()
        torch.autograd.backward(toy_loss(model, toy_batch(0, index // 5, index % 5)))
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state.anchor[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_allreduce_of_several_peers_is_one_peer_with_all_their_data() -> None:
    states = train(rules("allreduce", inner__clip=0.0, outer__lr=0.01), peers=4, rounds=10)
    model = toy_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, (0.9, 0.95), weight_decay=0.0)
    for index in range(10):
        optimizer.zero_grad()
        torch.autograd.backward(toy_loss(model, torch.cat([toy_batch(peer, index, 0) for peer in range(4)])))
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(states[0].anchor[name], parameter.detach(), rtol=1e-3, atol=1e-5)


def test_several_inner_steps_without_an_inner_optimiser_are_one_step_on_their_mean_gradient() -> None:
    (state,) = train(rules("allreduce", inner__clip=0.0, inner__lr=0.5, inner_steps=3, outer__kind="sgd"), 1, 1)
    model = toy_model()
    expected = gradients(model, torch.cat([toy_batch(0, 0, step) for step in range(3)]))
    for name, parameter in model.named_parameters():
        lr = PRESETS["allreduce"].outer.lr
        torch.testing.assert_close(state.anchor[name], parameter.detach() - lr * 0.5 * expected[name])


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_learns_and_all_peers_hold_the_same_bits(preset: str) -> None:
    chosen = rules(preset, "topk8" if preset in ("distro", "sparseloco") else "all", inner_steps=1)
    chosen = rules_of(replace(chosen.method, inner_steps=PRESETS[preset].inner_steps), parse_test_chain)
    trainer = toy_trainer(chosen.method, 0)
    batches = [toy_batch(77, 0, step) for step in range(10)]
    first = trainer.validation_loss(initial_state(trainer.model, chosen).anchor, batches)
    states = train(chosen, peers=3, rounds=60 if chosen.method.inner.kind == "none" else 15)
    assert len({fingerprint(state.anchor, state.outer) for state in states}) == 1
    assert trainer.validation_loss(states[0].anchor, batches) < 0.5 * first


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_threads_do_not_change_a_bit_of_a_round(preset: str) -> None:
    chosen = rules(preset)
    generator = torch.Generator().manual_seed(3)
    anchor = {"w": torch.randn(260, 127, generator=generator)}
    state = TrainingState(anchor, chosen.outer.init(anchor), {})
    payloads = [make_payload({"w": torch.randn(260, 127, generator=generator)}, TopK(400)) for _ in range(3)]
    contributions = [Contribution(f"p{i}", 10 + i, payload) for i, payload in enumerate(payloads)]
    prints = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            new = apply_round(state, contributions, chosen, round_index=0)
        finally:
            torch.set_num_threads(1)
        prints.append(fingerprint(new.anchor, new.outer))
    assert prints[0] == prints[1]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_with_its_own_chain_a_preset_learns_and_all_peers_hold_the_same_bits(preset: str) -> None:
    chosen = rules(preset, PRESETS[preset].chain)
    chosen = replace(chosen, compressor=parse_chain(chosen.method.chain))
    trainer = toy_trainer(chosen.method, 0)
    batches = [toy_batch(77, 0, step) for step in range(10)]
    first = trainer.validation_loss(initial_state(trainer.model, chosen).anchor, batches)
    states = train(chosen, peers=3, rounds=40 if chosen.method.inner.kind == "none" else 12)
    assert len({fingerprint(state.anchor, state.outer) for state in states}) == 1
    assert trainer.validation_loss(states[0].anchor, batches) < 0.8 * first


def test_a_distro_packet_to_three_peers_is_250_times_below_an_all_reduce() -> None:
    compressor = rules_of(PRESETS["distro"], parse_chain).compressor
    generator = torch.Generator().manual_seed(0)
    delta = {n: torch.randn(p.shape, generator=generator) for n, p in build_model("gpt-mini", 0).named_parameters()}
    parameters = sum(value.numel() for value in delta.values())
    assert 250 * 3 * len(make_payload(delta, compressor)) < 2 * 3 / 4 * 4 * parameters


# Transactional error feedback.

RESIDUAL = {"w": torch.tensor([1.0, -2.0, 4.0])}
DELTA = {"w": torch.tensor([10.0, 20.0, -30.0])}


def start(chosen: Rules, *, missed: bool = False, residual: dict[str, Tensor] | None = None) -> TrainingState:
    anchor = {"w": torch.tensor([0.5, 0.25, 0.125])}
    return TrainingState(anchor, chosen.outer.init(anchor), RESIDUAL if residual is None else residual, missed)


def contribution(peer: str, tensors: dict[str, Tensor], chosen: Rules) -> Contribution:
    return Contribution(peer, 100, make_payload(tensors, chosen.compressor))


def test_with_error_feedback_the_residual_keeps_what_the_others_did_not_decode() -> None:
    chosen = rules("sparseloco", "topk1", residual_decay=0.5)
    said = wanted(start(chosen), DELTA, chosen.method)
    assert said["w"].tolist() == [10.5, 19.0, -28.0]
    sent = [contribution("b", DELTA, chosen), contribution("a", said, chosen)]
    after = apply_round(start(chosen), sent, chosen, round_index=0, me="a", wanted=said)
    assert after.residual["w"].tolist() == [10.5, 19.0, 0.0]
    assert not after.missed


def test_without_error_feedback_a_committed_contribution_leaves_nothing() -> None:
    chosen = rules("diloco", "topk1")
    said = wanted(start(chosen, residual={}), DELTA, chosen.method)
    after = apply_round(start(chosen), [contribution("a", said, chosen)], chosen, round_index=0, me="a", wanted=said)
    assert after.residual == {}
    assert wanted(after, DELTA, chosen.method)["w"].tolist() == DELTA["w"].tolist()


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_what_missed_its_round_is_said_again_whole(preset: str) -> None:
    chosen = rules(preset, "topk1")
    said = wanted(start(chosen, residual={}), DELTA, chosen.method)
    others = [contribution("b", DELTA, chosen)]
    after = apply_round(start(chosen, residual={}), others, chosen, round_index=0, me="a", wanted=said)
    assert after.missed
    assert after.residual["w"].tolist() == said["w"].tolist()
    again = wanted(after, DELTA, chosen.method)
    assert again["w"].tolist() == (said["w"] + DELTA["w"]).tolist()


def test_a_round_without_contributions_moves_nothing() -> None:
    chosen = rules("distro", "topk1")
    before = start(chosen)
    after = apply_round(before, [], chosen, round_index=0, me="a", wanted=DELTA)
    assert fingerprint(after.anchor, after.outer) == fingerprint(before.anchor, before.outer)
    assert after.residual["w"].tolist() == DELTA["w"].tolist()


def test_an_observer_keeps_its_residual() -> None:
    chosen = rules("sparseloco", "topk1")
    after = apply_round(start(chosen, missed=True), [contribution("b", DELTA, chosen)], chosen, round_index=0, me="a")
    assert after.residual["w"].tolist() == RESIDUAL["w"].tolist()
    assert after.missed


def test_a_committed_contribution_that_i_do_not_remember_contained_the_residual() -> None:
    chosen = rules("sparseloco", "topk1")
    after = apply_round(start(chosen, missed=True), [contribution("a", DELTA, chosen)], chosen, round_index=0, me="a")
    assert after.residual == {}
    assert not after.missed


def test_moving_to_another_chain_says_again_what_only_the_old_one_heard() -> None:
    chosen = rules("sparseloco", "topk1")
    old, new = make_payload({"w": torch.tensor([0.0, 7.0, 0.0])}, TopK(1)), make_payload(RESIDUAL, TopK(1))
    moved = moved_residual({"w": torch.tensor([1.0, 1.0, 1.0])}, [old, old], [new], start(chosen).anchor, TopK(1))
    assert moved["w"].tolist() == [1.0, 15.0, -3.0]


@given(
    st.lists(st.sampled_from(["mine", "others", "both", "none"]), max_size=12),
    st.integers(0, 2**32),
    st.integers(1, 6),
)
def test_nothing_is_lost_and_nothing_is_said_twice(rounds: list[str], seed: int, k: int) -> None:
    """Without decay: all deltas so far = all that others decoded of me + residual, whatever was missed."""
    chosen = rules("sparseloco", f"topk{k}", residual_decay=1.0)
    generator = torch.Generator().manual_seed(seed)
    state = start(chosen, residual={})
    produced, heard = torch.zeros(3), torch.zeros(3)
    for index, members in enumerate(rounds):
        delta = {"w": torch.randn(3, generator=generator)}
        produced += delta["w"]
        said = wanted(state, delta, chosen.method)
        mine = contribution("a", said, chosen)
        sent = [mine] if members in ("mine", "both") else []
        sent += [contribution("b", DELTA, chosen)] if members in ("others", "both") else []
        if mine in sent:
            heard += decode(mine.payload, state.anchor, chosen.compressor)["w"]
        state = apply_round(state, sent, chosen, round_index=index, me="a", wanted=said)
    left = state.residual.get("w", torch.zeros(3))
    torch.testing.assert_close(heard + left, produced, rtol=1e-4, atol=1e-4)


def test_nothing_given_is_changed() -> None:
    chosen = rules("muloco", "topk1")
    before = start(chosen)
    copy = fingerprint(before.anchor, before.outer), RESIDUAL["w"].clone(), DELTA["w"].clone()
    said = wanted(before, DELTA, chosen.method)
    apply_round(before, [contribution("a", said, chosen)], chosen, round_index=0, me="a", wanted=said)
    assert fingerprint(before.anchor, before.outer) == copy[0]
    assert torch.equal(before.residual["w"], copy[1])
    assert torch.equal(DELTA["w"], copy[2])


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
