"""A replica that meets others: NoLoCo's equation on tensors, the mean kept whatever chains lose, and its files."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from averaging.contribution import sign_contribution
from averaging.record import Hash
from compression.chain import parse_chain
from network.identity import Identity
from optimizers.presets import method_from_settings
from peer import method
from peer.build import build_with
from peer.data import load_corpus
from peer.gossip_learner import (
    GossipLearner,
    GossipRules,
    apply_meeting,
    check_gossip_payload,
    gossip_rules_of,
    make_gossip_payload,
)
from peer.learner import Own
from peer.method import TrainingState
from peer.spec import GroupPart, InvalidSpec, make_spec

SHAPES = {"a": (6, 5), "b": (7,), "scalar": ()}


def rules_with(**settings: object) -> GossipRules:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return gossip_rules_of(method_from_settings("noloco", overrides), parse_chain)


def tensors(seed: int, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state_of(seed: int, rules: GossipRules) -> TrainingState:
    replica = tensors(seed)
    return TrainingState(replica, rules.delta.outer.init(replica), {})


def meet(states: list[TrainingState], deltas: list[dict[str, Tensor]], rules: GossipRules) -> list[TrainingState]:
    wanted = [method.wanted(state, delta, rules.delta.method) for state, delta in zip(states, deltas, strict=True)]
    members = [
        method.Contribution(f"peer {i}", 1, make_gossip_payload(wanted[i], states[i], rules))
        for i in range(len(states))
    ]
    return [
        apply_meeting(states[i], members, rules, me=f"peer {i}", wanted=wanted[i], round_index=0)
        for i in range(len(states))
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_it_equals_the_equation_over_many_rounds(count: int) -> None:
    exact = "identity all fp32"
    rules = rules_with(chain=exact, gossip__chain=exact, outer__lr=0.7, outer__momentum=0.5, gossip__mixing=0.6)
    states = [state_of(number, rules) for number in range(count)]
    phi = [{name: value.double() for name, value in state.anchor.items()} for state in states]
    momentum = [{name: torch.zeros(shape).double() for name, shape in SHAPES.items()} for _ in range(count)]
    for number in range(40):
        deltas = [tensors(100 * number + i, 0.05) for i in range(count)]
        states = meet(states, deltas, rules)
        before = [dict(vector) for vector in phi]
        for name in SHAPES:
            step = sum(delta[name].double() for delta in deltas) / count
            mean = sum(vector[name] for vector in before) / count
            for i in range(count):
                pull = 0.6 * (mean - before[i][name])
                momentum[i][name] = 0.5 * momentum[i][name] - 0.7 * step + pull
                phi[i][name] = before[i][name] + momentum[i][name]
    for i in range(count):
        for name in SHAPES:
            torch.testing.assert_close(states[i].anchor[name], phi[i][name].float(), rtol=1e-5, atol=1e-5)


def test_in_a_meeting_none_weighs_more_than_eight_times_the_median() -> None:
    exact = "identity all fp32"
    rules = rules_with(chain=exact, gossip__chain=exact, merge="weighted_mean", outer__lr=1.0, outer__momentum=0.0)
    state = state_of(0, rules)
    members = []
    for number, (weight, value) in enumerate(((10, 1.0), (10, 1.0), (2560, -1.0))):
        delta = {name: torch.full(shape, value) for name, shape in SHAPES.items()}
        members.append(method.Contribution(f"peer {number}", weight, make_gossip_payload(delta, state, rules)))
    after = apply_meeting(state, members, rules, me="peer 0", wanted=None, round_index=0)
    for name, replica in state.anchor.items():
        # All stand at one place: only the deltas move it. Ten of a hundred each, and eighty against them.
        torch.testing.assert_close(replica - after.anchor[name], torch.full_like(replica, -0.6), rtol=0, atol=1e-5)


@pytest.mark.parametrize("chain", ["identity all fp16", "identity all bits(4)", "identity topk(3/8) bits(2)"])
def test_the_mean_of_the_replicas_stays_whatever_their_chain_loses(chain: str) -> None:
    rules = rules_with(gossip__chain=chain)
    states = [state_of(number, rules) for number in range(3)]
    zero = [{name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in states]
    after = meet(states, zero, rules)
    for name in SHAPES:
        before_mean = sum(state.anchor[name] for state in states) / 3
        after_mean = sum(state.anchor[name] for state in after) / 3
        torch.testing.assert_close(after_mean, before_mean, rtol=1e-5, atol=1e-5)
    assert not torch.equal(after[0].anchor["a"], states[0].anchor["a"])


def test_with_error_feedback_the_residual_is_what_was_not_said() -> None:
    rules = rules_with(chain="identity topk(2/8) bits(2)", error_feedback=True, residual_decay=0.5)
    states = [state_of(number, rules) for number in range(2)]
    deltas = [tensors(10), tensors(11)]
    first = meet(states, deltas, rules)
    for i, state in enumerate(first):
        payload = method.make_payload(deltas[i], rules.delta.compressor)
        heard = method.decode(payload, states[i].anchor, rules.delta.compressor)
        for name in SHAPES:
            torch.testing.assert_close(state.residual[name], deltas[i][name] - heard[name])
    wanted = method.wanted(first[0], deltas[0], rules.delta.method)
    torch.testing.assert_close(wanted["a"], 0.5 * first[0].residual["a"] + deltas[0]["a"])


def test_what_cannot_be_applied_is_refused() -> None:
    rules = rules_with()
    state = state_of(0, rules)
    payload = make_gossip_payload(tensors(1), state, rules)
    check_gossip_payload(payload, state.anchor, rules)
    huge = {name: torch.full(shape, 1e30) for name, shape in SHAPES.items()}
    exact = rules_with(gossip__chain="identity all fp32")
    wild = make_gossip_payload(tensors(1), TrainingState(huge, {}, {}), exact)
    for bad in (b"", b"\x90", payload[:-1], payload + b"x", payload[: len(payload) // 2], b"\x92\x01\x02"):
        with pytest.raises(ValueError):
            check_gossip_payload(bad, state.anchor, rules)
    with pytest.raises(ValueError, match="coefficient"):
        check_gossip_payload(wild, state.anchor, exact)


def test_a_wrong_chain_of_the_replica_is_named() -> None:
    with pytest.raises(ValueError, match=r"gossip.chain = 'identity all': .*three words"):
        rules_with(gossip__chain="identity all")


def test_a_run_in_which_nobody_could_meet_is_refused() -> None:
    identity = Identity(bytes(32))
    with pytest.raises(InvalidSpec, match=r"group.min_peers: 3 never meet where method.gossip.group = 2"):
        make_spec(identity.peer_id, name="x", model="gpt-nano", preset="noloco", group=GroupPart(min_peers=3))


def test_a_real_model_meets_keeps_its_work_and_comes_back_from_its_files() -> None:
    identities = [Identity(bytes([number]) * 32) for number in range(2)]
    spec = make_spec(
        identities[0].peer_id,
        name="x",
        model="gpt-nano",
        preset="noloco",
        settings={"inner_steps": 2, "batch": 2, "error_feedback": True, "chain": "identity topk(64/4096) bits(2)"},
    )
    corpus = load_corpus(())
    learners = []
    for identity in identities:
        learner = build_with(spec, identity.peer_id, corpus).learner
        assert isinstance(learner, GossipLearner)
        learners.append(learner)
    said = []
    for identity, learner in zip(identities, learners, strict=True):
        tokens = learner.train(0, lambda: False).tokens
        payload = learner.pack(0)
        learners[0].check(payload)
        said.append(sign_contribution(identity, Hash(bytes(32)), tokens, bytes(16), False, payload))
    before = [learner.fingerprint() for learner in learners]
    assert before[0] == before[1], "founders begin with the same weights"
    for learner in learners:
        learner.apply(1, said, Own.SAID)
    assert learners[0].fingerprint() not in before
    files = learners[0].dump()
    again = build_with(spec, identities[0].peer_id, corpus).learner
    assert again.load(files, own=True) == learners[0].fingerprint()
    assert again.state.residual.keys() == learners[0].state.residual.keys() != set()
    newcomer = build_with(spec, identities[1].peer_id, corpus).learner
    assert newcomer.load(learners[0].dump(shared_only=True), own=False) == learners[0].fingerprint()
    assert newcomer.state.residual == {}
