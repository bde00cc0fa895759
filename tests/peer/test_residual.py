"""The residual of the real learner: what was said is taken out of it exactly once, whatever comes between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from averaging.contribution import Contribution, sign_contribution
from averaging.record import Hash
from network.identity import Signer
from peer.learner import Own, TorchLearner
from peer.method import decode, initial_state, make_payload
from peer.trainer import Trainer
from simulator.toy import ToySigner
from tests.peer.method_parts import DELTA, RESIDUAL, TopK, rules

ME, OTHER = ToySigner(0), ToySigner(1)
DELTAS = [DELTA["w"], torch.tensor([3.0, -5.0, 7.0]), torch.tensor([-11.0, 13.0, 17.0])]


class Line(nn.Module):
    """Its loss is linear, so that its gradient, and with it the delta, is the batch that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))


def linear(model: nn.Module, batch: Tensor) -> Tensor:
    assert isinstance(model, Line)
    return (model.w * batch).sum()


class Scripted:
    """A real learner that trains exactly the deltas it is told."""

    def __init__(self, preset: str, chain: str = "topk1", *, decay: float = 1.0, residual: bool = True) -> None:
        plain = {"inner__kind": "none", "inner__clip": 0.0, "inner__lr": 1.0, "inner_steps": 1}
        self.rules = rules(preset, chain, residual_decay=decay, **plain)
        self.delta = DELTA["w"]
        trainer = Trainer(Line(), linear, lambda *_: self.delta[None], self.rules.method)
        state = initial_state(trainer.model, self.rules)
        self.learner = TorchLearner(ME.peer_id, state, self.rules, trainer, [])
        if residual:
            self.learner.move([make_payload(RESIDUAL, TopK())], [])

    def pack(self, delta: Tensor = DELTA["w"]) -> bytes:
        self.delta = delta
        self.learner.train(0, lambda: False)
        return self.learner.pack(0)

    @property
    def residual(self) -> list[float] | None:
        """None if nothing waits."""
        residual = self.learner.state.residual
        return residual["w"].tolist() if residual else None

    def heard(self, payload: bytes) -> Tensor:
        return decode(payload, self.learner.state.anchor, self.rules.compressor)["w"]


def said(signer: Signer, payload: bytes) -> Contribution:
    return sign_contribution(signer, Hash(bytes(32)), 100, bytes(16), True, payload)


def others() -> Contribution:
    return said(OTHER, make_payload(DELTA, TopK(1)))


# Rounds.


def test_with_error_feedback_what_the_others_did_not_hear_is_kept() -> None:
    peer = Scripted("sparseloco", decay=0.5, residual=False)
    peer.learner.apply(1, [said(ME, peer.pack())], Own.SAID)
    assert peer.residual == [10.0, 20.0, 0.0]
    assert not peer.learner.state.missed
    mine = peer.pack(DELTAS[2])
    peer.learner.apply(2, [others(), said(ME, mine)], Own.SAID)
    assert peer.heard(mine).tolist() == [0.0, 23.0, 0.0]
    assert peer.residual == [-6.0, 0.0, 17.0], "half of what was left, and the new delta without what was said"


def test_without_error_feedback_a_committed_contribution_leaves_nothing() -> None:
    peer = Scripted("diloco")
    peer.learner.apply(1, [said(ME, peer.pack())], Own.SAID)
    assert peer.residual is None
    assert not peer.learner.state.missed


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_what_missed_its_round_is_said_again_whole(preset: str) -> None:
    peer = Scripted(preset, "all", decay=0.5, residual=False)
    peer.pack()
    peer.learner.apply(1, [others()], Own.MISSED)
    assert peer.residual == DELTA["w"].tolist()
    assert peer.learner.state.missed
    again = peer.pack(DELTAS[1])
    assert peer.heard(again).tolist() == (DELTA["w"] + DELTAS[1]).tolist()
    peer.learner.apply(2, [said(ME, again)], Own.SAID)
    assert peer.residual in (None, [0.0, 0.0, 0.0])


def test_a_round_that_is_no_concern_of_ones_own_changes_nothing_that_waits() -> None:
    peer = Scripted("sparseloco")
    before = peer.learner.fingerprint()
    peer.learner.apply(1, [others()], Own.NOTHING)
    assert peer.learner.fingerprint() != before
    assert peer.residual == RESIDUAL["w"].tolist()
    mine = peer.pack()
    peer.learner.apply(2, [others()], Own.NOTHING)  # Committed while the payload was made: it is offered after it.
    peer.learner.apply(3, [said(ME, mine)], Own.SAID)
    assert peer.residual == [11.0, 18.0, 0.0]


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_what_an_earlier_process_said_held_all_that_waited_then_and_the_new_delta_stays(preset: str) -> None:
    peer = Scripted(preset)
    peer.learner.train(0, lambda: False)
    peer.learner.apply(1, [said(ME, make_payload(RESIDUAL, TopK(1)))], Own.FORGOTTEN)
    assert peer.residual is None and not peer.learner.state.missed
    payload = peer.learner.pack(0)
    assert peer.heard(payload).tolist() == [0.0, 0.0, -30.0]


def test_what_is_wanted_is_forgotten_with_the_residual_that_it_holds() -> None:
    peer = Scripted("sparseloco")
    peer.pack()
    peer.learner.apply(1, [said(ME, make_payload(RESIDUAL, TopK(1)))], Own.FORGOTTEN)
    peer.learner.load(peer.learner.dump(shared_only=True), own=False)
    assert peer.residual is None


def test_what_was_said_long_ago_is_taken_out_of_what_has_waited_since() -> None:
    """A round that was left is decided after all, on going back to its chain."""
    peer = Scripted("sparseloco", residual=False)
    earlier = peer.pack()
    peer.learner.apply(1, [], Own.MISSED)
    later = peer.pack(DELTAS[1])
    peer.learner.apply(2, [said(ME, later)], Own.SAID)
    waited = peer.residual
    assert waited is not None
    peer.learner.apply(3, [said(ME, earlier)], Own.SAID)
    assert peer.residual == pytest.approx((torch.tensor(waited) - peer.heard(earlier)).tolist())


def test_a_recovery_merges_nothing_and_leaves_what_was_offered_wanted() -> None:
    peer = Scripted("sparseloco")
    before = peer.learner.fingerprint()
    peer.pack()
    peer.learner.apply(1, [], Own.MISSED)
    assert peer.learner.fingerprint() == before
    assert peer.residual == (RESIDUAL["w"] + DELTA["w"]).tolist()


# Moves.


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_what_only_the_chain_that_is_left_had_heard_waits_again(preset: str) -> None:
    peer = Scripted(preset, residual=False)
    first = peer.pack()
    peer.learner.apply(1, [said(ME, first)], Own.SAID)
    left = peer.residual or [0.0, 0.0, 0.0]
    peer.learner.move([first], [])
    assert peer.residual == (torch.tensor(left) + peer.heard(first)).tolist()
    assert peer.learner.state.missed, "it is owed whole"


def test_with_error_feedback_what_the_chain_joined_has_heard_is_taken_out() -> None:
    peer = Scripted("sparseloco")
    old, new = make_payload({"w": DELTAS[1]}, TopK(1)), make_payload({"w": DELTAS[2]}, TopK(1))
    peer.learner.move([old], [new])
    assert peer.residual == [1.0, -2.0, 4.0 + 7.0 - 17.0]
    assert peer.learner.state.missed


def test_without_error_feedback_what_the_chain_joined_has_heard_leaves_nothing_of_what_waited() -> None:
    peer = Scripted("diloco")
    old, new = make_payload({"w": DELTAS[1]}, TopK(1)), make_payload({"w": DELTAS[2]}, TopK(1))
    peer.learner.move([], [new])
    assert peer.residual is None
    peer = Scripted("diloco")
    peer.learner.move([old], [new])
    assert peer.residual == [0.0, 0.0, 7.0], "but what is left waits again"


@pytest.mark.parametrize("preset", ["diloco", "sparseloco"])
def test_what_is_not_remembered_held_all_that_waits_but_not_what_is_left(preset: str) -> None:
    peer = Scripted(preset)
    peer.pack()
    peer.learner.move([], None)
    assert peer.residual is None and not peer.learner.state.missed
    peer.pack()
    peer.learner.move([make_payload({"w": DELTAS[1]}, TopK(1))], None)
    assert peer.residual == [0.0, 0.0, 7.0]


def test_a_move_counts_what_was_packed_and_not_yet_committed_as_waiting() -> None:
    peer = Scripted("sparseloco")
    mine = peer.pack()
    peer.learner.move([], [])
    assert peer.residual == (RESIDUAL["w"] + DELTA["w"]).tolist()
    peer = Scripted("sparseloco")
    peer.pack()
    peer.learner.move([], [mine])
    assert peer.residual == [11.0, 18.0, 0.0]


def test_a_move_changes_nothing_that_is_shared() -> None:
    peer = Scripted("sparseloco")
    before = peer.learner.fingerprint()
    peer.learner.move([others().payload], [others().payload])
    assert peer.learner.fingerprint() == before


# Fetched states.


def test_what_was_packed_before_a_state_was_fetched_may_be_offered_after_it() -> None:
    peer = Scripted("sparseloco")
    files = Scripted("sparseloco", residual=False).learner.dump(shared_only=True)
    mine = peer.pack()
    peer.learner.load(files, own=False)
    assert peer.residual == (RESIDUAL["w"] + DELTA["w"]).tolist()
    peer.learner.apply(1, [said(ME, mine)], Own.SAID)
    assert peer.residual == [11.0, 18.0, 0.0]


def test_a_jump_over_ones_own_round_leaves_the_same_as_applying_it() -> None:
    applied, jumped = Scripted("sparseloco"), Scripted("sparseloco")
    mine = said(ME, applied.pack())
    jumped.pack()
    applied.learner.apply(1, [mine, others()], Own.SAID)
    jumped.learner.load(applied.learner.dump(shared_only=True), own=False)
    jumped.learner.move([], [mine.payload])
    assert jumped.residual == applied.residual == [11.0, 18.0, 0.0]
    assert jumped.learner.fingerprint() == applied.learner.fingerprint()


def test_a_chain_that_is_left_and_joined_again_costs_nothing() -> None:
    peer = Scripted("sparseloco", residual=False)
    start = peer.learner.dump(shared_only=True)
    rounds = []
    for number, delta in enumerate(DELTAS, start=1):
        rounds.append(said(ME, peer.pack(delta)))
        peer.learner.apply(number, [rounds[-1]], Own.SAID)
    before, state = peer.residual, peer.learner.fingerprint()
    assert before is not None
    peer.learner.load(start, own=False)
    peer.learner.move([c.payload for c in rounds], [])
    assert peer.residual == pytest.approx(sum(DELTAS, torch.zeros(3)).tolist(), abs=1e-4)
    for number, mine in enumerate(rounds, start=1):
        peer.learner.apply(number, [mine], Own.SAID)
    assert peer.residual == pytest.approx(before, abs=1e-4)
    assert peer.learner.fingerprint() == state


def test_a_peers_own_files_bring_its_residual_and_strangers_do_not() -> None:
    peer, stranger = Scripted("sparseloco"), Scripted("sparseloco", residual=False)
    stranger.learner.load(peer.learner.dump(), own=False)
    assert stranger.residual is None
    stranger.learner.load(peer.learner.dump(), own=True)
    assert stranger.residual == RESIDUAL["w"].tolist() and stranger.learner.state.missed


# All together.

EVENTS = ["said", "missed", "others", "recovery", "left", "back"]


@given(st.lists(st.sampled_from(EVENTS), max_size=14), st.integers(0, 2**32), st.integers(1, 3))
def test_nothing_is_lost_and_nothing_is_said_twice(events: list[str], seed: int, k: int) -> None:
    """Without decay: all that was trained = what the chain has heard + the residual, after whatever came."""
    peer = Scripted("sparseloco", f"topk{k}", residual=False)
    generator = torch.Generator().manual_seed(seed)
    trained = torch.zeros(3)
    here: list[bytes] = []
    there: list[bytes] = []
    for number, event in enumerate(events, start=1):
        if event == "left":  # The chain is left back to its beginning.
            peer.learner.move(here, [])
            here, there = [], here
        elif event == "back":
            peer.learner.move(here, there)
            here, there = there, here
        else:
            delta = torch.randn(3, generator=generator)
            trained += delta
            mine = peer.pack(delta)
            if event == "said":
                here.append(mine)
                peer.learner.apply(number, [others(), said(ME, mine)], Own.SAID)
            elif event == "others":  # Round by round others go on while the payload waits; then it is void.
                peer.learner.apply(number, [others()], Own.NOTHING)
                peer.learner.apply(number, [others()], Own.MISSED)
            else:
                peer.learner.apply(number, [] if event == "recovery" else [others()], Own.MISSED)
    heard = sum(map(peer.heard, here), torch.zeros(3))
    left = torch.tensor(peer.residual or [0.0, 0.0, 0.0])
    torch.testing.assert_close(heard + left, trained, rtol=1e-4, atol=1e-4)
