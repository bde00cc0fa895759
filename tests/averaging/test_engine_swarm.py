"""Engines in a seeded storm agree; and the same storm catches each broken rule, so that its silence means something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from averaging import journal
from averaging.instance import Instance, Vote
from averaging.record import Record
from averaging.voting import Voting
from tests.averaging.engine_swarm import Chaos, EngineSwarm

STORM = Chaos(loss=0.15, breaks=0.02, crashes=0.05, torn=0.01, blackouts=0.05, down_seconds=0.4)
SEEDS = 120


def storm(seed: int, rounds: int = 40, chaos: Chaos = STORM) -> EngineSwarm:
    swarm = EngineSwarm(seed, 4 + seed % 2, chaos)
    swarm.run(rounds, 4000.0)
    return swarm


@pytest.mark.parametrize("num_peers", [1, 2, 3, 5, 8])
def test_a_calm_swarm_commits_with_everybody(num_peers: int) -> None:
    swarm = EngineSwarm(0, num_peers, Chaos(start_peers=num_peers))
    swarm.run(40, 1000.0)
    report = swarm.report()
    assert report["rounds"] == 40
    assert report["members"] > 0.7 * num_peers


@pytest.mark.parametrize("seed", range(8))
def test_a_storm_ends_in_one_log(seed: int) -> None:
    swarm = storm(seed)
    report = swarm.report()
    assert report["rounds"] >= 40, f"seed {seed}: {report}"
    assert report["crashes"] > 3


@pytest.mark.parametrize("seed", range(3))
def test_who_was_away_for_long_jumps(seed: int) -> None:
    swarm = storm(seed, 100, Chaos(crashes=0.03, down_seconds=20.0, compact_rounds=8))
    assert swarm.report()["rounds"] >= 100
    assert swarm.jumps > 0


def test_the_same_seed_gives_the_same_trace() -> None:
    one, other = storm(5), storm(5)
    assert one.trace.digest() == other.trace.digest()
    assert storm(6).trace.digest() != one.trace.digest()


# Broken rules.

Mutant = Callable[[pytest.MonkeyPatch], None]


def nothing_is_carried_on(patch: pytest.MonkeyPatch) -> None:
    """R5 without its point: a taker-over proposes afresh what may have been decided otherwise."""
    patch.setattr(Instance, "carried", lambda self: None)


def votes_are_forgotten_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """R3 and R4 without their fsync."""
    restore = journal.restore

    def forgetful(*arguments: Any) -> journal.Restored:
        restored = restore(*arguments)
        return journal.Restored(restored.chain, {}, restored.undecided)

    patch.setattr(journal, "restore", forgetful)


def half_is_a_quorum(patch: pytest.MonkeyPatch) -> None:
    def is_quorum(self: Record, peers: Any) -> bool:
        return 2 * sum(voter in peers for voter in self.voters) >= len(self.voters)

    patch.setattr(Record, "is_quorum", is_quorum)


def promises_bind_nobody(patch: pytest.MonkeyPatch) -> None:
    """R3 without its promise: an old proposal is accepted after a newer ballot was promised."""
    patch.setattr(Instance, "may_accept", lambda self, ballot: ballot > self.vote.accepted_ballot)
    patch.setattr(Instance, "accept", lambda self, ballot, record: Vote(self.vote.promised, ballot, record))


def everybody_owns_ballot_zero(patch: pytest.MonkeyPatch) -> None:
    """R2 by reachability: whoever thinks itself the lead is."""
    patch.setattr(
        Instance,
        "may_propose_at_zero",
        lambda self, me: me in self.head.voters and self.vote.promised.attempt <= 0 and self.vote.accepted is None,
    )
    patch.setattr(Voting, "_usurped", lambda self, peer, message: None)


def the_ballot_is_stamped_into_what_is_carried_on(patch: pytest.MonkeyPatch) -> None:
    carried = Instance.carried

    def stamped(self: Instance) -> Record | None:
        record, ballot = carried(self), self.ballot
        if record is None or ballot is None:
            return record
        fields = (record.kind, record.prev, record.round, ballot.owner, ballot.attempt)
        return Record(*fields, record.members, record.voters, record.base, record.tokens)

    patch.setattr(Instance, "carried", stamped)


MUTANTS: dict[str, Mutant] = {
    f.__name__: f
    for f in (
        nothing_is_carried_on,
        votes_are_forgotten_in_a_crash,
        half_is_a_quorum,
        promises_bind_nobody,
        everybody_owns_ballot_zero,
        the_ballot_is_stamped_into_what_is_carried_on,
    )
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    for seed in range(SEEDS):
        try:
            storm(seed)
        except AssertionError as error:
            print(f"{name}: caught by seed {seed}: {error}")
            return
    raise AssertionError(f"{name} was not caught by {SEEDS} seeds")
