"""Training while a round is in the air, and in fragments: as the papers say it, and with every inner step said once."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from averaging.contribution import Contribution, sign_contribution
from averaging.record import Hash
from compression.chain import parse_chain
from optimizers.presets import method_from_settings
from peer.learner import Own, TorchLearner
from peer.method import initial_state, rules_of
from peer.trainer import Trainer
from simulator.toy import ToySigner
from tests.peer.method_parts import toy_batch, toy_loss, toy_model

SIGNERS = [ToySigner(number) for number in range(3)]
CONSTANT = {"schedule.kind": "constant", "schedule.warmup": 0, "inner.lr": 0.01}
PLAIN = {**CONSTANT, "chain": "identity all fp32", "merge": "mean"}
STREAMING = {**PLAIN, "inner_steps": 20, "fragments": 4, "overlap": 2, "outer.lr": 0.7, "outer.momentum": 0.9}


def learner_of(peer: int, settings: Mapping[str, object], preset: str = "diloco") -> TorchLearner:
    rules = rules_of(method_from_settings(preset, {**PLAIN, **settings}), parse_chain)
    trainer = Trainer(toy_model(), toy_loss, lambda r, step: toy_batch(peer, r, step), rules.method)
    state = initial_state(trainer.model, rules)
    return TorchLearner(SIGNERS[peer].peer_id, state, rules, trainer, [toy_batch(77, 0, 0)])


def never() -> bool:
    return False


def said(peer: int, payload: bytes, tokens: int = 10) -> Contribution:
    return sign_contribution(SIGNERS[peer], Hash(bytes(32)), tokens, bytes(16), True, payload)


def run_rounds(learners: list[TorchLearner], members: list[list[int]]) -> None:
    """As the loop does it: the rest of a round's steps, `pack`, the first of the next round's, `apply`."""
    for index, present in enumerate(members):
        for learner in learners:
            if learner.steps_left:
                learner.train(index, never, learner.steps_left)
        payloads = [learner.pack(index) for learner in learners]
        for learner in learners:
            if learner.overlap:
                learner.train(index + 1, never, learner.overlap)
        committed = [said(peer, payloads[peer]) for peer in present]
        for peer, learner in enumerate(learners):
            learner.apply(index + 1, committed, Own.SAID if peer in present else Own.MISSED)


class SlowPeer:
    """Streaming DiLoCo (arXiv 2501.18512) for one peer: a step at a time, every name by itself."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.model = toy_model()
        self.weights = dict(self.model.named_parameters())
        self.inner = torch.optim.AdamW(self.model.parameters(), 0.01, (0.9, 0.95), weight_decay=0.0)
        self.before = {name: p.detach().clone() for name, p in self.weights.items()}
        """Where the steps that nobody was told of began."""
        self.debt = {name: torch.zeros_like(p) for name, p in self.before.items()}

    def step(self, round_index: int, step: int) -> None:
        self.inner.zero_grad()
        torch.autograd.backward(toy_loss(self.model, toy_batch(self.peer, round_index, step)))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner.step()

    def say(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        delta = {}
        for name in names:
            now = self.weights[name].detach().clone()
            delta[name] = self.debt[name] + self.before[name] - now
            self.before[name] = now
        return delta

    def hear(self, shared: dict[str, Tensor], names: tuple[str, ...], owed: dict[str, Tensor], blend: float) -> None:
        with torch.no_grad():
            for name in names:
                since = self.before[name] - self.weights[name]
                self.debt[name] = owed.get(name, torch.zeros_like(since))
                if blend:
                    self.weights[name].copy_(blend * self.weights[name] + (1 - blend) * shared[name])
                else:
                    self.weights[name].copy_(shared[name] - self.debt[name] - since)
                self.before[name] = (self.weights[name] + since).detach().clone()


def slow_streaming(
    names: tuple[tuple[str, ...], ...], members: list[list[int]], steps: int, overlap: int, blend: float
) -> dict[str, Tensor]:
    peers = [SlowPeer(peer) for peer in range(3)]
    shared = {name: p.detach().clone() for name, p in toy_model().named_parameters()}
    momentum = {name: torch.zeros_like(p) for name, p in shared.items()}
    for index, present in enumerate(members):
        part = names[index % len(names)]
        for peer in peers:
            for step in range(overlap if index else 0, steps):
                peer.step(index, step)
        deltas = [peer.say(part) for peer in peers]
        for peer in peers:
            for step in range(overlap):
                peer.step(index + 1, step)
        for name in part:
            mean = torch.stack([deltas[peer][name] for peer in present]).mean(0)
            momentum[name] = 0.9 * momentum[name] + mean
            shared[name] = shared[name] - 0.7 * (mean + 0.9 * momentum[name])
        for number, peer in enumerate(peers):
            peer.hear(shared, part, {} if number in present else deltas[number], blend)
    return shared


@pytest.mark.parametrize("blend", [0.0, 0.5])
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("misses", [False, True])
def test_fragments_and_overlap_are_streaming_diloco(blend: float, overlap: int, misses: bool) -> None:
    rng = random.Random(5)
    members = [sorted(rng.sample(range(3), rng.randint(1, 3))) if misses else [0, 1, 2] for _ in range(40)]
    learners = [learner_of(peer, {**STREAMING, "overlap": overlap, "blend": blend}) for peer in range(3)]
    run_rounds(learners, members)
    expected = slow_streaming(learners[0]._parts.names, members, 5, overlap, blend)
    assert len({learner.fingerprint() for learner in learners}) == 1
    for name, value in expected.items():
        torch.testing.assert_close(learners[0].state.anchor[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("overlap", [3, 20])
def test_the_whole_model_can_overlap_too(overlap: int) -> None:
    learners = [learner_of(peer, {**STREAMING, "fragments": 1, "overlap": overlap}) for peer in range(3)]
    members = [[0, 1, 2], [0, 2], [0, 1, 2], [1], [0, 1, 2], [0, 1, 2]]
    run_rounds(learners, members)
    expected = slow_streaming(learners[0]._parts.names, members, 20, overlap, 0.0)
    for name, value in expected.items():
        torch.testing.assert_close(learners[0].state.anchor[name], value, rtol=1e-5, atol=1e-5)


def test_a_peer_alone_trains_as_plain_torch_does_bit_for_bit() -> None:
    learner = learner_of(0, {"inner_steps": 5, "outer.kind": "sgd", "outer.lr": 1.0})
    run_rounds([learner], [[0]] * 8)
    model = toy_model()
    inner = torch.optim.AdamW(model.parameters(), 0.01, (0.9, 0.95), weight_decay=0.0)
    for index in range(8):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(5):
            inner.zero_grad()
            torch.autograd.backward(toy_loss(model, toy_batch(0, index, step)))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # The weights themselves, but for the last bit: a - (a - w) is w where the two are near each other.
                parameter.copy_(before[name] - (before[name] - parameter))
    for name, parameter in model.named_parameters():
        assert torch.equal(learner.state.anchor[name], parameter.detach())


def gradient_at(weights: dict[str, Tensor], batch: Tensor) -> dict[str, Tensor]:
    model = toy_model()
    model.load_state_dict(weights)
    torch.autograd.backward(toy_loss(model, batch))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_without_inner_optimiser_hidden_gradients_look_ahead() -> None:
    """Each is taken where the anchor would be if everybody said what that peer has just said."""
    settings = {"overlap": 1, "outer.kind": "sgd", "outer.lr": 0.1, "inner.lr": 1.0, "inner.clip": 0.0}
    learners = [learner_of(peer, settings, "allreduce") for peer in range(2)]
    run_rounds(learners, [[0, 1]] * 6)
    shared = {name: p.detach().clone() for name, p in toy_model().named_parameters()}
    gradients = [gradient_at(shared, toy_batch(peer, 0, 0)) for peer in range(2)]
    for index in range(1, 7):
        ahead = [{name: value - 0.1 * own[name] for name, value in shared.items()} for own in gradients]
        shared = {name: value - 0.1 * (gradients[0][name] + gradients[1][name]) / 2 for name, value in shared.items()}
        gradients = [gradient_at(ahead[peer], toy_batch(peer, index, 0)) for peer in range(2)]
    for name, value in shared.items():
        torch.testing.assert_close(learners[0].state.anchor[name], value, rtol=1e-5, atol=1e-6)


def test_steps_in_pieces_are_the_same_steps() -> None:
    for settings, preset in (({"inner_steps": 6}, "diloco"), ({"inner_steps": 6}, "allreduce")):
        whole, pieces = learner_of(0, settings, preset), learner_of(0, settings, preset)
        whole.train(0, never)
        tokens = [pieces.train(0, never, steps).tokens for steps in (1, 3, 5)]
        assert tokens == [64, 3 * 64, 2 * 64] and pieces.steps_left == 0
        one, other = (learner.heard(learner.pack(0)) for learner in (whole, pieces))
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)
        assert pieces.steps_left == 6


# What comes in between.


def waiting(learner: TorchLearner) -> dict[str, Tensor]:
    """All that nobody has heard."""
    held = learner.state.residual | (learner._wanted or {})
    made = learner._progress.unpacked()
    zero = {name: torch.zeros_like(value) for name, value in learner.state.anchor.items()}
    return {name: held.get(name, zero[name]) + made.get(name, zero[name]) for name in zero}


def assert_all_waits(learner: TorchLearner, expected: dict[str, Tensor]) -> None:
    for name, value in waiting(learner).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("blend", [0.0, 0.3])
def test_progress_survives_whatever_happens_to_the_shared_state(fragments: int, blend: float) -> None:
    settings = {**STREAMING, "fragments": fragments, "blend": blend}
    learner, other = learner_of(0, settings), learner_of(1, settings)
    start = other.dump(shared_only=True)
    other.train(0, never)
    foreign = said(1, other.pack(0))
    learner.train(0, never)
    mine = learner.pack(0)
    learner.train(1, never, 2)
    before = waiting(learner)
    learner.apply(1, [foreign], Own.MISSED)
    assert_all_waits(learner, before)
    for number in (2, 3):
        learner.apply(number, [], Own.NOTHING)
    learner.load(start, own=False)
    learner.move([], [])
    assert_all_waits(learner, before)
    learner.move([], [mine])  # On the chain it moves to, the first payload was heard.
    heard = learner.heard(mine)
    expected = {name: value - heard[name] if name in heard else value for name, value in before.items()}
    assert_all_waits(learner, expected)
    learner.train(1, never, 1)
    later = waiting(learner)
    fresh = learner_of(0, settings)
    fresh.load(learner.dump(), own=True)
    assert_all_waits(fresh, later)


def test_what_was_made_for_a_round_that_passed_is_said_in_the_next_of_its_fragment() -> None:
    learner, other = learner_of(0, STREAMING), learner_of(1, STREAMING)
    learner.train(0, never)
    learner.pack(0)  # Not offered: others were quicker.
    before = waiting(learner)
    other.train(0, never)
    learner.apply(1, [said(1, other.pack(0))], Own.NOTHING)
    second = learner.heard(learner.pack(1))
    assert_all_waits(learner, before)
    assert set(second) == set(learner._parts.names[1])
    learner.apply(2, [], Own.MISSED)
    assert_all_waits(learner, before)
    again = learner.heard(learner.pack(4))
    for name in learner._parts.names[0]:
        torch.testing.assert_close(again[name], before[name])


def test_what_an_earlier_process_said_takes_its_fragment_only() -> None:
    earlier = learner_of(0, STREAMING)
    earlier.train(0, never)
    files, payload = earlier.dump(), said(0, earlier.pack(0))
    learner = learner_of(0, STREAMING)
    learner.load(files, own=True)
    learner.train(0, never, 2)
    made = learner._progress.unpacked()
    learner.apply(1, [payload], Own.FORGOTTEN)
    owed = waiting(learner)
    for name in learner._parts.names[0]:
        torch.testing.assert_close(owed[name], made[name])
    assert set(learner.state.residual) == {name for names in learner._parts.names[1:] for name in names}


def test_a_payload_of_another_fragment_is_refused_or_says_nothing() -> None:
    learner = learner_of(0, STREAMING)
    learner.train(0, never)
    payload = learner.pack(0)
    learner.check(payload)
    for bad in (b"", b"\4" + payload[1:], b"\1" + payload[1:], payload[1:], payload + b"\0"):
        with pytest.raises(ValueError):
            learner.check(bad)
    before = learner.fingerprint()
    learner.apply(2, [said(1, payload)], Own.NOTHING)
    assert learner.fingerprint() == before


def test_a_joiner_takes_all_fragments_and_goes_on_alike() -> None:
    members = [[0, 1]] * 6
    learners = [learner_of(peer, STREAMING) for peer in range(2)]
    run_rounds(learners, members)
    joiner = learner_of(2, STREAMING)
    joiner.load(learners[0].dump(shared_only=True), own=False)
    assert joiner.fingerprint() == learners[0].fingerprint()
    joiner.train(6, never)
    payload = said(2, joiner.pack(6))
    for learner, own in ((joiner, Own.SAID), (learners[0], Own.NOTHING)):
        learner.apply(7, [payload], own)
    assert joiner.fingerprint() == learners[0].fingerprint()


def test_what_diverged_is_not_kept_and_what_diverges_again_is_dropped() -> None:
    learner = learner_of(0, STREAMING)
    good = learner._trainer.sample
    learner.train(0, never, 2)
    before = waiting(learner)
    learner._trainer.sample = lambda *_: torch.full((8, 9), float("nan"))
    assert learner.train(0, never, 1).tokens == 0
    assert_all_waits(learner, before)
    assert learner.steps_left == 3
    assert learner.train(0, never, 1).tokens == 0
    assert_all_waits(learner, {name: torch.zeros_like(value) for name, value in before.items()})
    learner._trainer.sample = good
    assert learner.train(0, never).tokens > 0
