"""Each broken rule is caught by some scenario, so that the silence of the checkers means something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest

from averaging import journal, links
from averaging.instance import Instance, Vote
from averaging.links import Links
from averaging.merge import Mean
from averaging.node import Node
from averaging.record import Record
from averaging.voting import Voting
from network.seam import PeerID
from peer import method
from simulator.scenario import Scenario
from simulator.toy import ToyLearner
from simulator.trial import run_scenario
from tests.simulator.storms import voting_storm

SEEDS = 60
Mutant = Callable[[pytest.MonkeyPatch], None]


def nothing_is_carried_on(patch: pytest.MonkeyPatch) -> None:
    """R5 without its point."""
    patch.setattr(Instance, "carried", lambda self: None)


def votes_are_forgotten_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """R3 and R4 without their fsync."""
    restore = journal.restore

    def forgetful(*arguments: Any) -> journal.Restored:
        return replace(restore(*arguments), votes={})

    patch.setattr(journal, "restore", forgetful)


def half_is_a_quorum(patch: pytest.MonkeyPatch) -> None:
    def is_quorum(self: Record, peers: Any) -> bool:
        return 2 * sum(voter in peers for voter in self.voters) >= len(self.voters)

    patch.setattr(Record, "is_quorum", is_quorum)


def promises_bind_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Instance, "may_accept", lambda self, ballot: ballot > self.vote.accepted_ballot)
    patch.setattr(Instance, "accept", lambda self, ballot, record: Vote(self.vote.promised, ballot, record))


def everybody_owns_ballot_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Instance,
        "may_propose_at_zero",
        lambda self, me: me in self.head.voters and self.vote.promised.attempt <= 0 and self.vote.accepted is None,
    )
    patch.setattr(Voting, "_usurped", lambda self, peer, message: None)


def votes_leave_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    perform = Node._perform

    async def hasty(self: Node, actions: Any) -> None:
        self._send(actions.sends)
        actions.sends = []
        await perform(self, actions)

    patch.setattr(Node, "_perform", hasty)


def what_missed_its_round_is_dropped(patch: pytest.MonkeyPatch) -> None:
    apply = ToyLearner.apply

    def careless(self: ToyLearner, number: int, contributions: Any, *arguments: Any, **options: Any) -> None:
        mine = any(c.owner == self.me for c in contributions)
        apply(self, number, contributions, *arguments, **options)
        if not mine:
            self.residual = set()

    patch.setattr(ToyLearner, "apply", careless)


def what_was_said_is_said_again(patch: pytest.MonkeyPatch) -> None:
    move = ToyLearner.move

    def deaf(self: ToyLearner, left: Any, joined: Any) -> None:
        move(self, left, None if joined is None else [])

    patch.setattr(ToyLearner, "move", deaf)


def weights_count_what_others_trained(patch: pytest.MonkeyPatch) -> None:
    offer = Node.offer

    async def boastful(self: Node, payload: bytes, weight: int, willing: bool) -> Any:
        return await offer(self, payload, weight + 1, willing)

    patch.setattr(Node, "offer", boastful)


def the_merge_forgets_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mean, "merge_one", lambda self, values, weights: values[0])


def the_residual_is_never_subtracted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(method, "residual_after", lambda payload, wanted, anchor, rules: dict(wanted or {}))


def nobody_follows(patch: pytest.MonkeyPatch) -> None:
    """R7 without its question: who missed a round stays behind."""
    patch.setattr("averaging.catch_up.CatchUp.notice", lambda self, peer, number, now: None)
    patch.setattr("averaging.engine.Engine._tell", lambda self, peer, prev, now: None)


def broken_links_stay_broken(patch: pytest.MonkeyPatch) -> None:
    async def give_up(self: Links, peer: PeerID, state: Any) -> None:
        state.dialling = False

    patch.setattr(Links, "_dial", give_up)


def queues_have_no_end(patch: pytest.MonkeyPatch) -> None:
    """The writer stops, and what is to be sent piles up."""

    async def idle(self: Links, state: Any, stream: Any) -> None:
        await anyio.sleep_forever()

    patch.setattr(Links, "_write", idle)
    patch.setattr(links, "send_frame_at_once", lambda stream, payload: False)


CAUGHT_BY: dict[Mutant, tuple[str, ...]] = {
    nothing_is_carried_on: ("Disagreement",),
    votes_are_forgotten_in_a_crash: ("Disagreement",),
    half_is_a_quorum: ("Disagreement",),
    promises_bind_nobody: ("Disagreement",),
    everybody_owns_ballot_zero: ("Disagreement",),
    votes_leave_before_they_are_written: ("Disagreement",),
    what_missed_its_round_is_dropped: ("BooksWrong",),
    what_was_said_is_said_again: ("BooksWrong",),
    weights_count_what_others_trained: ("Disagreement",),
    the_merge_forgets_one: ("BooksWrong",),
    the_residual_is_never_subtracted: ("BooksWrong",),
    nobody_follows: ("NoProgress",),
    broken_links_stay_broken: ("NoProgress",),
    queues_have_no_end: ("NoProgress", "Unbounded"),
}


def test_storms_of_votes_end_in_one_log() -> None:
    verdicts = [run_scenario(voting_storm(seed)) for seed in range(6)]
    assert [verdict.failure for verdict in verdicts] == [None] * 6
    assert sum(verdict.outcome.restarts for verdict in verdicts) > 30


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in range(SEEDS):
        scenario = voting_storm(seed) if CAUGHT_BY[mutant] == ("Disagreement",) else Scenario.random(seed)
        if mutant in (the_merge_forgets_one, the_residual_is_never_subtracted):
            scenario = replace(scenario, learner="vector")
        failure = run_scenario(replace(scenario, live_seconds=60.0)).failure
        if failure is not None:
            print(f"{mutant.__name__}: caught by seed {seed}: {failure}")
            assert failure.partition(":")[0] in CAUGHT_BY[mutant], failure
            return
    raise AssertionError(f"{mutant.__name__} was not caught by {SEEDS} seeds")
