"""What was said of a round stays said: through recoveries, moves to other chains and back, rewritings of the disk."""

from __future__ import annotations

from averaging import journal
from averaging.config import EngineConfig
from averaging.contribution import Contribution
from averaging.instance import Vote
from averaging.journal import Restored
from averaging.outbox import Actions, Commit, Outbox
from averaging.record import Ballot, Record
from averaging.rounds import PARKED_MAX, Rounds
from tests.averaging.strategies import (
    BASE,
    SIGNERS,
    Grown,
    chain_with,
    child_of,
    first,
    forked,
    grown,
    offer_of,
    recovery_of,
)

HEAD = first(3)
ME = next(s for s in SIGNERS[:3] if s.peer_id != HEAD.lead)
COMMON = grown(3)
PARTING = COMMON[-1][0].record
OFFERS = [offer_of(s, PARTING, payload=b"undecided") for s in SIGNERS[:3]]
SAID = child_of(PARTING, OFFERS)
VOTE = Vote(Ballot(2, ME.peer_id), Ballot(1, ME.peer_id), SAID)
CONFIG = EngineConfig(payload_bytes_max=1000, weight_max=1000, snapshot_bytes=10**9)
ALONE = forked(PARTING, [ME], 3)
NORMAL_SIDE = grown(5, head=PARTING, weight=50)


def rounds_of(restored: Restored) -> Rounds:
    return Rounds(ME, CONFIG, restored, Outbox(ME.peer_id, 5.0), lambda *_: None, 0.0)


def undecided() -> Rounds:
    """At the parting, with a vote that was cast and the contributions that it is about."""
    rounds = rounds_of(Restored(chain_with(HEAD, COMMON), {}, ()))
    for offer in OFFERS:
        rounds.voting.instance.hold(offer)
    rounds.voting.instance.vote = VOTE
    rounds.voting.instance.base = BASE
    return rounds


def append(rounds: Rounds, piece: Grown, number: int | None = None) -> None:
    for entry, contributions in piece[:number]:
        rounds.append(entry.record, entry.certificate, contributions, 1.0)


def is_as_it_was(rounds: Rounds) -> bool:
    instance = rounds.voting.instance
    return instance.vote == VOTE and instance.held == {c.digest: c for c in OFFERS}


def restored_from(rounds: Rounds, *pieces: Grown) -> Restored:
    """What a process finds that reads this journal and a log of `pieces`."""
    log = [journal.encode_commit(entry.record, entry.certificate) for piece in pieces for entry, _ in piece]
    return journal.restore(HEAD, log, rounds.journal(), ME, 1000)


def test_a_round_that_was_left_for_a_recovery_goes_on_as_it_was_when_its_head_is_the_head_again() -> None:
    rounds = undecided()
    append(rounds, ALONE)
    assert rounds.voting.instance.vote == Vote()
    left = rounds.back_to(PARTING.round, 2.0)
    assert [r.record for r in left] == [entry.record for entry, _ in ALONE]
    assert [r.mine for r in left] == [None, *(contributions[0] for _, contributions in ALONE[1:])]
    assert rounds.head == PARTING
    assert is_as_it_was(rounds)
    assert rounds.voting.instance.offers == {c.owner: c for c in OFFERS}
    assert rounds.voting.instance.base is None, "the state there is worked out anew"
    assert rounds.voting.clock.began == 2.0


def test_the_round_that_was_in_the_air_on_the_chain_that_is_left_is_parked_too() -> None:
    rounds = undecided()
    append(rounds, ALONE)
    tip = rounds.head
    vote = Vote(Ballot(7, ME.peer_id))
    rounds.voting.instance.vote = vote
    rounds.back_to(PARTING.round, 2.0)
    append(rounds, NORMAL_SIDE, 1)
    rounds.back_to(PARTING.round, 3.0)
    append(rounds, ALONE)
    assert rounds.head == tip
    assert rounds.voting.instance.vote == vote


def test_a_round_that_a_normal_record_decided_is_not_in_the_air_again_without_its_decision() -> None:
    rounds = undecided()
    append(rounds, NORMAL_SIDE)
    rounds.back_to(PARTING.round, 2.0)
    decided = NORMAL_SIDE[0][0]
    assert rounds.voting.instance.vote == Vote(decided.certificate.ballot, decided.certificate.ballot, decided.record)
    assert rounds.voting.instance.records[decided.record.hash] == decided.record
    append(rounds, ALONE)
    rounds.back_to(PARTING.round, 3.0)
    assert rounds.voting.instance.vote.accepted == decided.record, "through a recovery and back"


def test_votes_on_a_round_that_was_left_survive_the_journals_rewriting() -> None:
    rounds = undecided()
    append(rounds, ALONE)
    for _ in range(3):
        restored = restored_from(rounds, COMMON, ALONE)
        assert restored.votes[PARTING.hash] == VOTE
        assert {c.digest for c in OFFERS} <= {c.digest for c in restored.undecided}
        rounds = rounds_of(restored)
    rounds.back_to(PARTING.round, 2.0)
    assert is_as_it_was(rounds)
    assert rounds.voting.durable >= {c.digest for c in OFFERS}, "they are on disk already"


def test_the_votes_of_a_chain_that_was_left_survive_it_too() -> None:
    rounds = rounds_of(Restored(chain_with(HEAD, COMMON), {}, ()))
    append(rounds, ALONE)
    rounds.back_to(PARTING.round, 2.0)
    append(rounds, NORMAL_SIDE)
    expected = {
        entry.record.prev: Vote(entry.certificate.ballot, entry.certificate.ballot, entry.record)
        for entry, _ in ALONE[1:]
    }
    for _ in range(3):
        restored = restored_from(rounds, COMMON, NORMAL_SIDE)
        assert dict(restored.votes) == expected
        rounds = rounds_of(restored)


def test_what_was_decided_in_this_chain_is_forgotten_with_the_next_rewriting() -> None:
    rounds = undecided()
    append(rounds, NORMAL_SIDE)
    restored = restored_from(rounds, COMMON, NORMAL_SIDE)
    assert not restored.votes and not restored.undecided
    parked = undecided()
    append(parked, ALONE)
    parked.back_to(PARTING.round, 2.0)
    append(parked, NORMAL_SIDE)
    kept = restored_from(parked, COMMON, NORMAL_SIDE)
    assert PARTING.hash not in kept.votes
    assert not {c.digest for c in OFFERS} & {c.digest for c in kept.undecided}


def test_a_vote_in_the_air_and_its_contributions_survive_a_restart() -> None:
    rounds = rounds_of(restored_from(undecided(), COMMON))
    assert rounds.head == PARTING
    assert is_as_it_was(rounds)
    assert not rounds.voting.instance.may_propose_at_zero(ME.peer_id)


def test_of_many_rounds_that_were_left_the_oldest_keep_their_votes_alone() -> None:
    rounds = undecided()
    heads: list[Record] = []
    for number in range(PARKED_MAX + 3):
        heads.append(rounds.head)
        if number:
            rounds.voting.instance.vote = Vote(Ballot(number, ME.peer_id))
        entry = recovery_of(rounds.head, [ME])
        rounds.append(entry.record, entry.certificate, [], 1.0)
    restored = journal.restore(HEAD, [], rounds.journal(), ME, 1000)
    assert restored.votes[PARTING.hash] == VOTE
    for number, head in enumerate(heads[1:], start=1):
        assert restored.votes[head.hash] == Vote(Ballot(number, ME.peer_id))
    rounds.back_to(PARTING.round, 2.0)
    assert rounds.voting.instance.vote == VOTE


def drain(rounds: Rounds) -> Actions:
    return rounds._outbox.drain()


def test_a_commit_is_written_and_told_and_a_state_that_was_fetched_is_written_alone() -> None:
    rounds = undecided()
    (one, ones), (two, _) = NORMAL_SIDE[:2]
    rounds.append(one.record, one.certificate, ones, 1.0)
    actions = drain(rounds)
    assert actions.log == [journal.encode_commit(one.record, one.certificate)]
    assert actions.lazy == [journal.encode_packet(c) for c in ones]
    assert actions.commits == [Commit(one.record, tuple(ones))]
    rounds.append(two.record, two.certificate, None, 1.0)
    actions = drain(rounds)
    assert actions.log == [journal.encode_commit(two.record, two.certificate)]
    assert not actions.lazy and not actions.commits


def test_a_record_of_another_anchor_says_that_this_state_is_lost() -> None:
    for base, diverged in ((BASE, False), (None, False), (b"\x01" * 16, True)):
        rounds = undecided()
        rounds.voting.instance.base = base
        append(rounds, NORMAL_SIDE, 1)
        assert drain(rounds).diverged == diverged


def test_a_pace_is_learnt_from_rounds_that_were_trained_for_and_not_from_what_was_replayed_or_stalled() -> None:
    rounds = undecided()
    append(rounds, NORMAL_SIDE, 2)
    assert not rounds.timing.interval.is_known
    rounds.voting.clock.started = 2.0
    entry = recovery_of(rounds.head, [ME])
    rounds.append(entry.record, entry.certificate, [], 500.0)
    assert not rounds.timing.interval.is_known
    rounds.voting.clock.started = 501.0
    own, mine = grown(1, head=entry.record, signers=[ME])[0]
    rounds.append(own.record, own.certificate, mine, 503.0)
    assert rounds.timing.interval.times == (3.0,)


def test_own_contributions_of_what_was_left_come_back_though_others_are_forgotten() -> None:
    rounds = rounds_of(Restored(chain_with(HEAD, COMMON), {}, ()))
    append(rounds, ALONE)
    rounds.chain.forget_before(rounds.head.round + 1)
    mine: list[Contribution | None] = [None, *(contributions[0] for _, contributions in ALONE[1:])]
    assert [r.mine for r in rounds.back_to(PARTING.round, 2.0)] == mine
