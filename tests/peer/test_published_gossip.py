"""Meetings reach the weights that the published NoLoCo reaches, and rounds those of its sparse DiLoCo."""

from __future__ import annotations

from torch import Tensor

from compression.chain import parse_chain
from optimizers.presets import method_from_settings
from peer.gossip_learner import GossipRules, apply_meeting, gossip_rules_of, make_gossip_payload
from peer.method import Contribution, TrainingState, rules_of
from tests.peer.published import STEPS
from tests.peer.published_noloco import ALIKE, FILE, GOSSIP, GROUP, INNER_LR, REPLICAS, SHAPES, SPARSE, SPARSE_KEPT
from tests.peer.published_parts import CONSTANT, assert_reached, numbers, rounds_from, trained, trainer_of

EXACT = "identity all fp32"
INNER = {**CONSTANT, "inner.lr": INNER_LR, "inner.beta2": 0.999, "inner_steps": STEPS, "chain": EXACT}
"""The program's Adam has torch's moments."""


def test_noloco_is_the_published_one() -> None:
    """All four replicas, which the program paired as it pleased. Its `mixing` is its outer learning rate; replicas
    travel unrounded here, as there.
    """
    settings = {
        **INNER,
        "outer.lr": GOSSIP["outer_lr"],
        "outer.momentum": GOSSIP["outer_momentum"],
        "gossip.group": GROUP,
        "gossip.mixing": GOSSIP["outer_lr"],
        "gossip.chain": EXACT,
    }
    rules = gossip_rules_of(method_from_settings("noloco", settings), parse_chain)
    replicas = met(rules, numbers(FILE)["groups"])
    for peer, expected in enumerate(numbers(FILE)["gossip"]):
        assert_reached(replicas[peer], expected, SHAPES)


def met(rules: GossipRules, groups: list[list[list[int]]]) -> list[dict[str, Tensor]]:
    """The replicas after a round of meetings for each of `groups`."""
    trainers = [trainer_of(rules.delta.method, SHAPES, peer) for peer in range(REPLICAS)]
    start = {name: parameter.detach().clone() for name, parameter in trainers[0].parameters.items()}
    states = [TrainingState(start, rules.delta.outer.init(start), {}) for _ in trainers]
    for index, span in enumerate(rounds_from(STEPS)):
        said = []
        for peer, trainer in enumerate(trainers):
            made = trainer.run(states[peer].anchor, {}, span, index, lambda: False).made
            said.append(Contribution(f"p{peer}", 1, make_gossip_payload(made, states[peer], rules)))
        states = [
            apply_meeting(
                states[peer], [said[other] for other in group], rules, me=f"p{peer}", wanted=None, round_index=index
            )
            for peer, group in sorted((peer, group) for group in groups[index] for peer in group)
        ]
    return [state.anchor for state in states]


def test_nolocos_sparse_diloco_is_a_mix_of_settings() -> None:
    """Error feedback without decay, top-k of whole tensors, heavy-ball momentum outside: a DiLoCo, not SparseLoCo."""
    settings = {
        **INNER,
        "chain": f"identity globaltopk({SPARSE_KEPT}/192) fp32",
        "error_feedback": True,
        "residual_decay": 1.0,
        "merge": "mean",
        "outer.kind": "heavyball",
        "outer.lr": SPARSE["outer_lr"],
        "outer.momentum": SPARSE["outer_momentum"],
    }
    rules = rules_of(method_from_settings("diloco", settings), parse_chain)
    assert_reached(trained(rules, ALIKE, rounds_from(STEPS)), numbers(FILE)["sparse"], ALIKE)
