"""The learner under owners: nothing that was trained is said twice or vanishes, with the sharers or the owners."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from averaging.contribution import Contribution, sign_contribution
from averaging.outbox import Reduction
from averaging.owners import encode_parts, owner_of, parse_parts
from averaging.record import Hash, Record
from compression.chain import parse_chain
from optimizers.presets import method_from_settings
from peer import method
from peer.learner import Own, TorchLearner
from peer.method import Rules, initial_state, rules_of
from peer.owners_learner import OwnersLearner
from peer.trainer import Trainer
from simulator.toy import ToySigner
from tests.averaging.strategies import first
from tests.peer.method_parts import parse_test_chain, toy_batch, toy_loss, toy_model

NAMES = ("a", "b", "c", "d")
SIZE = 16
PARTS = len(NAMES)
SIGNERS = sorted((ToySigner(n) for n in range(5)), key=lambda signer: signer.peer_id)
TOLERANCE = 1e-5
REAL = "dct(8) topk(4/16) bits(4)"
NOTHING: frozenset[int] = frozenset()
ALL = frozenset(range(PARTS))


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.zeros(SIZE)))


def linear(model: nn.Module, batch: Tensor) -> Tensor:
    """So that the delta is the batch."""
    return (torch.cat([p for _, p in sorted(model.named_parameters())]) * batch[0]).sum()


def rules(chain: str, *, error_feedback: bool = True, merge: str = "mean") -> Rules:
    settings = {
        "merge": merge,
        "inner.kind": "none",
        "inner.lr": 1.0,
        "inner.clip": 0.0,
        "inner_steps": 1,
        "schedule.kind": "constant",
        "schedule.warmup": 0,
        "outer.kind": "sgd",
        "outer.lr": 0.5,
        "error_feedback": error_feedback,
        "residual_decay": 1.0,
        "chain": chain,
    }
    parse = parse_chain if "(" in chain else parse_test_chain
    return rules_of(method_from_settings("sparseloco", settings), parse)


def joined(tensors: dict[str, Tensor]) -> Tensor:
    zero = torch.zeros(SIZE)
    return torch.cat([tensors.get(name, zero) for name in NAMES]).double()


class Swarm:
    """Learners whose rounds the test plays by hand: who shares, what the owners heard, what each knows of it."""

    def __init__(self, chain: str, count: int = 3) -> None:
        self.rules = rules(chain)
        self.generator = torch.Generator().manual_seed(1)
        self.signers = SIGNERS[:count]
        self.produced = [torch.zeros(PARTS * SIZE).double() for _ in self.signers]
        self.heard = [torch.zeros(PARTS * SIZE).double() for _ in self.signers]
        """Of each peer what its shares that were merged said."""
        self.lost = [torch.zeros(PARTS * SIZE).double() for _ in self.signers]
        """What each gave up, not knowing its fate."""
        self.means = torch.zeros(PARTS * SIZE).double()
        """What the owners were to say in all."""
        self.learners = [self.learner(number) for number in range(count)]
        self.head: Record = first(count)
        self.round = 0

    def learner(self, number: int) -> OwnersLearner:
        def batch(round_index: int, step: int) -> Tensor:
            drawn = torch.randn(1, PARTS * SIZE, generator=self.generator)
            self.produced[number] += drawn[0].double()
            return drawn

        model = Vectors()
        trainer = Trainer(model, linear, batch, self.rules.method)
        state = initial_state(model, self.rules)
        return OwnersLearner(self.signers[number].peer_id, state, self.rules, trainer, [], PARTS)

    def share(self, number: int) -> dict[int, bytes]:
        learner = self.learners[number]
        learner.train(self.round, lambda: False)
        return parse_parts(learner.pack(self.round))

    def contribution(self, number: int, payload: bytes) -> Contribution:
        return sign_contribution(self.signers[number], self.head.hash, 10, bytes(16), True, payload)

    def decoded(self, part: int, packet: bytes) -> Tensor:
        learner = self.learners[0]
        like = learner.parts.part(part, learner.state.anchor)
        return joined(method.decode(packet, like, self.rules.compressor))

    def play(self, fate: dict[tuple[int, int], str]) -> None:
        """One round: (peer, part) are "heard", "missed" or "unknown"; whoever is named in none does not share."""
        sharers = sorted({number for number, _ in fate})
        packets = {number: self.share(number) for number in sharers}
        offers = []
        for owner, signer in enumerate(self.signers):
            owned = [part for part in range(PARTS) if owner_of(self.head, part, PARTS) == signer.peer_id]
            offers += self.reduce(owner, owned, packets, fate)
        self.round += 1
        for number, learner in enumerate(self.learners):
            mine = {part: what for (peer, part), what in fate.items() if peer == number}
            knows = (
                frozenset(p for p, w in mine.items() if w == "heard"),
                frozenset(p for p, w in mine.items() if w.startswith("unknown")),
            )
            wanted = None if learner._wanted is None else joined(learner._wanted)
            learner.apply_shared(self.round, offers, knows if mine else None)
            for part in knows[1]:
                at = slice(part * SIZE, (part + 1) * SIZE)
                assert wanted is not None
                self.lost[number][at] += wanted[at]
            for part in knows[0]:
                self.heard[number] += self.decoded(part, packets[number][part])

    def reduce(
        self, owner: int, owned: Sequence[int], packets: dict[int, dict[int, bytes]], fate: dict[tuple[int, int], str]
    ) -> list[Contribution]:
        """What this owner offers; its shares all hold the same parts, so it reduces those that fully came, by part."""
        merged: dict[int, bytes] = {}
        for part in owned:
            came = [n for n in packets if fate.get((n, part)) in ("heard", "unknown, merged")]
            if not came:
                continue
            shares = tuple(self.contribution(n, encode_parts({part: packets[n][part]})) for n in came)
            merged |= parse_parts(self.learners[owner].reduce(Reduction(self.head, shares)))
            self.means += torch.stack([self.decoded(part, packets[n][part]) for n in came]).mean(0)
        return [self.contribution(owner, encode_parts(merged))] if merged else []

    def check(self) -> None:
        """The books of every peer, and those of all owners together."""
        assert len({learner.fingerprint() for learner in self.learners}) == 1
        for number, learner in enumerate(self.learners):
            waits = joined(dict(learner.state.residual))
            balance = self.heard[number] + waits + self.lost[number]
            assert float((self.produced[number] - balance).abs().max()) < TOLERANCE * (1 + self.round)
        kept = torch.zeros(PARTS * SIZE).double()
        for learner in self.learners:
            for tensors in learner._kept.values():
                kept += joined(tensors)
        moved = -joined(dict(self.learners[0].state.anchor)) / 0.5
        assert float((self.means - moved - kept).abs().max()) < TOLERANCE * (1 + self.round)


FATES = ("heard", "missed", "unknown", "unknown, merged")


@pytest.mark.parametrize("chain", ["all", "topk3", REAL])
@pytest.mark.parametrize("seed", range(4))
def test_the_books_balance_whatever_becomes_of_the_shares(chain: str, seed: int) -> None:
    rng = random.Random(seed)
    swarm = Swarm(chain)
    for _ in range(12):
        sharers = [n for n in range(3) if rng.random() < 0.8]
        swarm.play({(n, part): rng.choice(FATES) for n in sharers for part in range(PARTS)})
        swarm.check()


def test_what_one_round_missed_is_said_whole_in_the_next() -> None:
    swarm = Swarm("all")
    swarm.play({(0, part): "missed" for part in range(PARTS)})
    assert torch.equal(joined(dict(swarm.learners[0].state.residual)), swarm.produced[0])
    swarm.play({(0, part): "heard" for part in range(PARTS)})
    assert not joined(dict(swarm.learners[0].state.residual)).any()
    swarm.check()


def test_an_owner_says_later_what_its_packets_left_out() -> None:
    swarm = Swarm("topk3")
    swarm.play({(n, part): "heard" for n in range(3) for part in range(PARTS)})
    left_out = sum(float(joined(t).abs().sum()) for learner in swarm.learners for t in learner._kept.values())
    assert left_out > 0, "nine different values do not fit into three"
    swarm.check()
    swarm.play({(n, part): "heard" for n in range(3) for part in range(PARTS)})
    swarm.check()


def test_a_merged_packet_that_no_round_commits_is_made_again_of_the_same_and_nothing_is_kept_of_it() -> None:
    swarm = Swarm("topk3")
    packets = swarm.share(0)
    part = 2
    shares = (swarm.contribution(0, encode_parts({part: packets[part]})),)
    owner = next(n for n in swarm.learners if n._me == owner_of(swarm.head, part, PARTS))
    once = owner.reduce(Reduction(swarm.head, shares))
    owner.apply_shared(1, [], None)
    assert owner._kept == {}
    assert owner.reduce(Reduction(swarm.head, shares)) == once


def test_in_an_owners_merge_none_weighs_more_than_eight_times_the_median() -> None:
    swarm = Swarm("all")
    chosen = rules("all", merge="weighted_mean")
    owner = OwnersLearner(SIGNERS[0].peer_id, swarm.learners[0].state, chosen, swarm.learners[0]._trainer, [], PARTS)
    like = owner.parts.part(0, owner.state.anchor)
    shares = []
    for signer, weight, value in zip(SIGNERS, (10, 10, 2560), (1.0, 1.0, -1.0), strict=False):
        packet = method.make_payload({n: torch.full_like(t, value) for n, t in like.items()}, chosen.compressor)
        payload = encode_parts({0: packet})
        shares.append(sign_contribution(signer, swarm.head.hash, weight, bytes(16), True, payload))
    merged = parse_parts(owner.reduce(Reduction(swarm.head, tuple(shares))))
    for said in method.decode(merged[0], like, chosen.compressor).values():
        # Ten of a hundred each, and eighty against them.
        torch.testing.assert_close(said, torch.full_like(said, -0.6))


def test_with_exact_packets_and_everybody_heard_owners_do_what_all_gather_does_bit_for_bit() -> None:
    swarm = Swarm("all", 5)
    plain = [
        TorchLearner(s.peer_id, initial_state(Vectors(), swarm.rules), swarm.rules, learner._trainer, [])
        for s, learner in zip(swarm.signers, swarm.learners, strict=True)
    ]
    for number in range(4):
        packets = [swarm.share(n) for n in range(5)]
        whole = [
            swarm.contribution(n, method.make_payload(dict(learner._wanted or {}), swarm.rules.compressor))
            for n, learner in enumerate(swarm.learners)
        ]
        shares = [
            tuple(swarm.contribution(n, encode_parts({part: packets[n][part]})) for n in range(5))
            for part in range(PARTS)
        ]
        merged: dict[int, dict[int, bytes]] = {}
        for part in range(PARTS):
            owner = next(n for n, s in enumerate(swarm.signers) if s.peer_id == owner_of(swarm.head, part, PARTS))
            made = parse_parts(swarm.learners[owner].reduce(Reduction(swarm.head, shares[part])))
            merged.setdefault(owner, {}).update(made)
        offers = [swarm.contribution(owner, encode_parts(parts)) for owner, parts in merged.items()]
        for learner in swarm.learners:
            learner.apply_shared(number + 1, offers, (ALL, NOTHING))
        for gathering in plain:
            gathering.apply(number + 1, whole, Own.NOTHING)
        assert len({learner.fingerprint() for learner in [*swarm.learners, *plain]}) == 1
        assert not any(joined(t).any() for learner in swarm.learners for t in learner._kept.values())
    assert joined(dict(swarm.learners[0].state.anchor)).any()


def with_weights() -> tuple[OwnersLearner, list[dict[str, Tensor]]]:
    """A learner with an inner optimiser, in two parts; and where its weights were at each step."""
    chosen = rules_of(
        method_from_settings("diloco", {"inner_steps": 2, "chain": "all", "merge": "mean"}), parse_test_chain
    )
    seen: list[dict[str, Tensor]] = []

    def sample(round_index: int, step: int) -> Tensor:
        seen.append({n: p.detach().clone() for n, p in trainer.parameters.items()})
        return toy_batch(0, round_index, step)

    trainer = Trainer(toy_model(), toy_loss, sample, chosen.method)
    return OwnersLearner(SIGNERS[0].peer_id, initial_state(trainer.model, chosen), chosen, trainer, [], 2), seen


def trained(learner: OwnersLearner, round_index: int) -> dict[int, bytes]:
    learner.train(round_index, lambda: False)
    return parse_parts(learner.pack(round_index))


def merged_by_others(part: int, packet: bytes) -> list[Contribution]:
    return [sign_contribution(SIGNERS[1], Hash(bytes(32)), 10, bytes(16), True, encode_parts({part: packet}))]


@pytest.mark.parametrize("fate", ["heard", "unknown"])
def test_training_goes_on_from_where_the_own_weights_are_in_the_parts_that_missed_and_only_there(fate: str) -> None:
    learner, seen = with_weights()
    packets = trained(learner, 0)
    known = (frozenset({0}), NOTHING) if fate == "heard" else (NOTHING, frozenset({0}))
    learner.apply_shared(1, merged_by_others(0, packets[0]), known)
    trained(learner, 1)
    owed = learner.parts.part(1, learner.state.residual)
    anchor = learner.state.anchor
    for name in learner.parts.names[0]:
        assert torch.equal(seen[2][name], anchor[name])
    for name in learner.parts.names[1]:
        assert owed[name].any()
        assert torch.equal(seen[2][name], anchor[name] - owed[name])


def test_what_is_owed_is_not_learnt_again_after_a_round_without_a_share_and_is_done_with_once_it_is_heard() -> None:
    learner, seen = with_weights()
    trained(learner, 0)
    learner.apply_shared(1, [], (NOTHING, NOTHING))
    learner.apply_shared(2, [], None)
    owed, anchor = dict(learner.state.residual), learner.state.anchor
    packets = trained(learner, 2)
    for name, value in seen[2].items():
        assert torch.equal(value, anchor[name] - owed[name])
    shared = (frozenset({0, 1}), NOTHING)
    learner.apply_shared(3, [c for part in (0, 1) for c in merged_by_others(part, packets[part])], shared)
    trained(learner, 3)
    for name, value in seen[4].items():
        assert torch.equal(value, learner.state.anchor[name])


def test_on_another_chain_nothing_of_what_was_in_the_air_is_said_again() -> None:
    swarm = Swarm("topk3")
    swarm.play({(n, part): "heard" for n in range(3) for part in range(PARTS)})
    learner = swarm.learners[0]
    before = joined(dict(learner.state.residual))
    swarm.share(0)
    assert before.any()
    learner.move([], ())
    assert not learner.state.residual and not learner._kept and learner._wanted is None


def test_a_snapshot_holds_nothing_that_may_have_been_shared() -> None:
    swarm = Swarm("topk3")
    swarm.play({(n, part): "heard" for n in range(3) for part in range(PARTS)})
    assert swarm.learners[0].state.residual
    later = swarm.learner(0)
    assert later.load(swarm.learners[0].dump(), own=True) == swarm.learners[0].fingerprint()
    assert not later.state.residual


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=50))
def test_any_payload_is_checked_or_refused(data: bytes) -> None:
    learner = Swarm(REAL, 1).learners[0]
    try:
        learner.check(data)
    except ValueError:
        return
    assert all(part < PARTS for part in parse_parts(data))


def test_a_part_that_the_model_does_not_have_is_refused() -> None:
    swarm = Swarm(REAL)
    packets = swarm.share(0)
    learner = swarm.learners[0]
    learner.check(encode_parts(packets))
    with pytest.raises(ValueError, match="part 4"):
        learner.check(encode_parts({PARTS: packets[0]}))
    with pytest.raises(ValueError):
        learner.check(encode_parts({0: b""}))


def test_more_parts_than_parameters_are_refused() -> None:
    swarm = Swarm("all")
    learner = swarm.learners[0]
    with pytest.raises(ValueError):
        OwnersLearner(SIGNERS[0].peer_id, learner.state, swarm.rules, learner._trainer, [], PARTS + 1)
