"""Training by rounds is what the papers say, and plain training for one; presets learn; all hold the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from compression.chain import parse_chain
from compression.seam import TensorSpec
from optimizers.presets import PRESETS
from peer.method import (
    Contribution,
    Rules,
    TrainingState,
    apply_round,
    fingerprint,
    initial_state,
    make_payload,
    residual_after,
    wanted,
)
from tests.peer.method_parts import TopK, rules, toy_batch, toy_loss, toy_model, toy_trainer

WHOLE: dict[str, object] = {"fragments": 1, "overlap": 0}
"""A round after another, of the whole model: the rest is in test_streaming.py."""


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
            replace(
                apply_round(states[peer], contributions[peer:] + contributions[:peer], rules, round_index=round_index),
                residual=residual_after(contributions[peer].payload, said[peer], states[peer].anchor, rules),
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


class SlowPeer:
    """One peer of a method with error feedback, in plain torch: inner steps, memory, what it says."""

    def __init__(self, peer: int, inner: Callable[[nn.Module], list[torch.optim.Optimizer]]) -> None:
        self.peer = peer
        self.model = toy_model()
        self.weights = dict(self.model.named_parameters())
        self.inner = inner(self.model)
        self.memory = {name: torch.zeros_like(p) for name, p in self.weights.items()}

    def round(self, shared: dict[str, Tensor], round_index: int, steps: int, beta: float) -> None:
        """e <- beta e + theta - theta_m after the inner steps."""
        self.model.load_state_dict(shared)
        for step in range(steps):
            self.model.zero_grad()
            torch.autograd.backward(toy_loss(self.model, toy_batch(self.peer, round_index, step)))
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.inner:
                optimizer.step()
        for name, parameter in self.weights.items():
            self.memory[name] = beta * self.memory[name] + shared[name] - parameter.detach()

    def say(self, compressed: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """c = deQ(Q(e)) ; e <- e - c."""
        said = {name: compressed(value) for name, value in self.memory.items()}
        self.memory = {name: value - said[name] for name, value in self.memory.items()}
        return said


def largest(k: int, value: Tensor) -> Tensor:
    flat = value.reshape(-1).tolist()
    kept = sorted(range(len(flat)), key=lambda i: -abs(flat[i]))[:k]
    return torch.tensor([x if i in kept else 0.0 for i, x in enumerate(flat)]).view(value.shape)


def test_sparseloco_is_its_paper() -> None:
    """theta <- theta - eta (1/M) sum c (arXiv 2508.15706): 1/M, not the mean over those who sent; eta once."""
    sparse = rules("sparseloco", "topk5", inner__lr=0.01, inner_steps=4, residual_decay=0.95, outer__lr=0.6)
    states = train(sparse, peers=3, rounds=15)
    peers = [
        SlowPeer(i, lambda m: [torch.optim.AdamW(m.parameters(), 0.01, (0.9, 0.95), weight_decay=0.0)])
        for i in range(3)
    ]
    shared = {name: p.detach().clone() for name, p in toy_model().named_parameters()}
    for index in range(15):
        for peer in peers:
            peer.round(shared, index, 4, 0.95)
        said = [peer.say(partial(largest, 5)) for peer in peers]
        shared = {n: value - 0.6 * (said[0][n] + said[1][n] + said[2][n]) / 3 for n, value in shared.items()}
    for name, value in shared.items():
        torch.testing.assert_close(states[0].anchor[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chain", ["identity all bits(2)", "identity all int(4)", "dct(4) topk(4/16) bits(2)"])
def test_muloco_is_its_paper(chain: str) -> None:
    """Muon for the matrices of the toy, AdamW for its biases; e <- beta e + Delta, c = Q(e), e <- e - c, Nesterov on
    the mean of c (arXiv 2505.23725). Codecs have tests of their own.
    """
    muloco = rules(
        "muloco", chain, inner__lr=0.02, inner_steps=4, residual_decay=0.9, outer__lr=0.9, outer__momentum=0.8
    )
    codec = parse_chain(chain)
    states = train(replace(muloco, compressor=codec), peers=3, rounds=15)

    def inner(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        muon = torch.optim.Muon(matrices, 0.02, 0.0, 0.95, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(vectors, 0.02, (0.9, 0.95), weight_decay=0.0)]

    peers = [SlowPeer(i, inner) for i in range(3)]
    shared = {name: p.detach().clone() for name, p in toy_model().named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in shared.items()}
    for index in range(15):
        for peer in peers:
            peer.round(shared, index, 4, 0.9)
        said = [peer.say(lambda e: codec.decompress(codec.compress(e), TensorSpec.of(e))) for peer in peers]
        for name in shared:
            mean = (said[0][name] + said[1][name] + said[2][name]) / 3
            momentum[name] = 0.8 * momentum[name] + mean
            shared[name] = shared[name] - 0.9 * (mean + 0.8 * momentum[name])
    for name, value in shared.items():
        torch.testing.assert_close(states[0].anchor[name], value, rtol=1e-5, atol=1e-5)


def test_one_peer_with_identity_settings_is_plain_torch_bit_for_bit() -> None:
    """A learning rate that is a power of two: then it does not matter whether a device fuses it into the addition."""
    alone = rules("allreduce", outer__kind="sgd", outer__lr=2.0**-4, inner__clip=0.0)
    alone = replace(alone, compressor=parse_chain("identity all fp32"))
    (state,) = train(alone, peers=1, rounds=60)
    model = toy_model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 2.0**-4)
    for index in range(60):
        optimizer.zero_grad()
        torch.autograd.backward(toy_loss(model, toy_batch(0, index, 0)))
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(state.anchor[name], parameter.detach())
        assert float((parameter.detach() - start[name]).abs().mean()) > 0.02


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
    chosen = rules(preset, "topk8" if preset in ("distro", "sparseloco") else "all", **WHOLE)
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
    chosen = rules(preset, PRESETS[preset].chain, **WHOLE)
    chosen = replace(chosen, compressor=parse_chain(chosen.method.chain))
    trainer = toy_trainer(chosen.method, 0)
    batches = [toy_batch(77, 0, step) for step in range(10)]
    first = trainer.validation_loss(initial_state(trainer.model, chosen).anchor, batches)
    states = train(chosen, peers=3, rounds=40 if chosen.method.inner.kind == "none" else 12)
    assert len({fingerprint(state.anchor, state.outer) for state in states}) == 1
    assert trainer.validation_loss(states[0].anchor, batches) < 0.8 * first
