"""Catching up on one's own chain: certified records only, pages that overlap, whom to believe, when to jump."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from averaging.catch_up import ASKED_IN_VAIN_MAX, DOUBT_SECONDS, REPLAY_ROUNDS_MAX, REPLAY_SECONDS_MAX, CatchUp
from averaging.chain import Chain
from averaging.messages import KNOWN_MAX, Log, LogEntry
from averaging.record import Certificate, Record, sha256
from tests.averaging.strategies import SIGNERS, chain_with, first, grown
from tests.averaging.test_certified import wrong_rounds

PEERS = [s.peer_id for s in SIGNERS]
HEAD = first(3)
TRUNK = grown(12)
ENTRIES = tuple(entry for entry, _ in TRUNK)


def chain(rounds: int = 0) -> Chain:
    return chain_with(HEAD, TRUNK[:rounds])


def catch_up(snapshot_bytes: int = 10**9) -> CatchUp:
    return CatchUp(SIGNERS[0], snapshot_bytes)


def log(entries: Sequence[LogEntry], after: Record = HEAD, number: int | None = None) -> Log:
    return Log(after.hash, entries[-1].record.round if number is None else number, tuple(entries))


def records(following: CatchUp) -> list[Record]:
    return [entry.record for entry in following.pending]


def test_a_certified_gap_is_taken_and_replayed_in_order() -> None:
    following, own = catch_up(), chain()
    assert following.receive(PEERS[1], log(ENTRIES), own) is None
    for entry, contributions in TRUNK:
        assert following.next(own, 0.0) == entry
        assert following.follows(own.head) and not following.leads_away(own.head)
        assert following.lacking(1) == [c.digest for c in contributions]
        following.held.update((c.digest, c) for c in contributions)
        assert following.lacking(1) == []
        own.append(entry.record, entry.certificate, contributions)
        following.applied(own.head)
    assert following.next(own, 0.0) is None
    assert not following.held and following.base is None
    assert following.tip(own.head) == own.head


def test_wrong_certificates_are_refused() -> None:
    for name, entry in wrong_rounds().items():
        following = catch_up()
        assert following.receive(PEERS[1], log([entry]), chain()) is not None, name
        assert following.next(chain(), 0.0) is None, name


def test_what_came_before_a_wrong_certificate_is_kept() -> None:
    following = catch_up()
    lie = replace(ENTRIES[2], certificate=Certificate(ENTRIES[2].certificate.ballot, {}))
    assert following.receive(PEERS[1], log([*ENTRIES[:2], lie]), chain()) is not None
    assert records(following) == [e.record for e in ENTRIES[:2]]


def test_a_longer_log_extends_a_shorter_one() -> None:
    following = catch_up()
    assert following.receive(PEERS[1], log(ENTRIES[:3]), chain()) is None
    assert following.receive(PEERS[2], log(ENTRIES[:9]), chain()) is None
    assert following.receive(PEERS[2], log(ENTRIES[9:], after=ENTRIES[8].record), chain()) is None
    assert records(following) == [e.record for e in ENTRIES]


def test_a_page_that_overlaps_or_is_old_changes_nothing() -> None:
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES[:6]), chain())
    assert following.receive(PEERS[2], log(ENTRIES[:4]), chain()) is None
    assert following.receive(PEERS[2], log(ENTRIES[3:], after=ENTRIES[2].record), chain()) is None
    assert records(following) == [e.record for e in ENTRIES[:6]]


def test_an_overlapping_page_cannot_replace_what_was_verified() -> None:
    """Certificates are kept and passed on: an unverified one would make this peer's own log worthless to others."""
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES[:3]), chain())
    lies = [replace(e, certificate=Certificate(e.certificate.ballot, {})) for e in ENTRIES[:3]]
    following.receive(PEERS[2], log(lies), chain())
    assert [e.certificate for e in following.pending] == [e.certificate for e in ENTRIES[:3]]


def test_a_commit_by_votes_trims_the_gap() -> None:
    following, own = catch_up(), chain()
    following.receive(PEERS[1], log(ENTRIES), own)
    own = chain(5)
    following.applied(own.head)
    assert records(following) == [e.record for e in ENTRIES[5:]]
    assert following.follows(own.head)
    own = chain(12)
    following.applied(own.head)
    assert not following.pending and following.base is None


def test_a_page_that_begins_with_what_was_committed_meanwhile_is_taken_from_there() -> None:
    following, own = catch_up(), chain(5)
    assert following.receive(PEERS[1], log(ENTRIES), own) is None
    assert records(following) == [e.record for e in ENTRIES[5:]]
    assert following.base == own.head.hash


def test_an_answer_to_an_older_question_is_no_lie_and_changes_nothing() -> None:
    following, own = catch_up(), chain()
    following.receive(PEERS[1], log(ENTRIES[:3]), own)
    assert following.receive(PEERS[2], log(ENTRIES[6:], after=ENTRIES[5].record), own) is None
    assert records(following) == [e.record for e in ENTRIES[:3]]


def test_a_heavy_gap_is_jumped_unless_nobody_has_a_snapshot() -> None:
    size = sum(e.payload_bytes for e in ENTRIES)
    light, heavy = catch_up(size), catch_up(size - 1)
    for following in (light, heavy):
        following.receive(PEERS[1], log(ENTRIES), chain())
    assert not light.wants_snapshot(chain())
    assert heavy.wants_snapshot(chain()) and heavy.next(chain(), 0.0) is None
    heavy.snapshot_failed()
    assert heavy.next(chain(), 0.0) == ENTRIES[0], "it replays instead"


def test_a_gap_without_contributions_is_jumped_or_asked_for_again() -> None:
    following = catch_up()
    gone = [replace(e, payload_bytes=0) for e in ENTRIES[:4]]
    following.receive(PEERS[1], log([*gone, *ENTRIES[4:]]), chain())
    assert following.wants_snapshot(chain())
    following.receive(PEERS[2], log(ENTRIES), chain())
    assert not following.wants_snapshot(chain()), "another peer still has them"
    following = catch_up()
    following.receive(PEERS[1], log(gone), chain())
    following.snapshot_failed()
    assert not following.pending and not following.wants_snapshot(chain())


def test_a_jump_is_attested_by_the_record_after_it() -> None:
    following = catch_up(1)
    following.receive(PEERS[1], log(ENTRIES), chain())
    assert following.child_of(ENTRIES[3].record.hash, chain()) == ENTRIES[4].record
    assert following.child_of(ENTRIES[-1].record.hash, chain()) is None
    assert following.child_of(sha256(b"elsewhere"), chain()) is None
    assert following.up_to(ENTRIES[3].record.hash) == list(ENTRIES[:4])
    assert following.up_to(sha256(b"elsewhere")) == []


def test_who_is_ahead_is_asked_after_some_patience_and_in_turn() -> None:
    following = catch_up()
    assert following.ask_at(1.0, 5.0) is None
    following.notice(PEERS[1], 12, 10.0)
    following.notice(PEERS[2], 12, 11.0)
    assert following.behind_since == 10.0
    assert following.ask_at(1.0, 5.0) == 11.0
    asked = {following.whom_to_ask(HEAD, 11.0), following.whom_to_ask(HEAD, 16.0)}
    assert asked == {PEERS[1], PEERS[2]}
    assert following.ask_at(1.0, 5.0) == 21.0
    following.receive(PEERS[1], log(ENTRIES), chain())
    following.lost(PEERS[2], HEAD)
    assert following.behind_since is None


def test_who_was_asked_often_and_never_delivered_is_no_longer_believed() -> None:
    following = catch_up()
    following.notice(PEERS[1], 12, 0.0)
    for _ in range(ASKED_IN_VAIN_MAX + 1):
        assert following.whom_to_ask(HEAD, 0.0) == PEERS[1]
    assert following.behind_since is None
    following.notice(PEERS[1], 12, 1.0)
    assert following.behind_since is None
    following.notice(PEERS[1], 13, 2.0)
    assert following.behind_since == 2.0, "it speaks of something new"
    following.lost(PEERS[1], HEAD)
    following.notice(PEERS[1], 12, 3.0)
    assert following.behind_since == 3.0, "it may be another process by now"


def test_whom_nobody_believes_is_heard_again_after_a_while() -> None:
    """The network may have stood still, and all were asked in vain."""
    following = catch_up()
    following.notice(PEERS[1], 12, 0.0)
    for _ in range(ASKED_IN_VAIN_MAX + 1):
        following.whom_to_ask(HEAD, 5.0)
    following.notice(PEERS[1], 12, 5.0 + DOUBT_SECONDS)
    assert following.behind_since == 5.0 + DOUBT_SECONDS


def test_who_delivers_may_be_asked_again_at_once_and_without_end() -> None:
    following = catch_up()
    following.notice(PEERS[1], 12, 0.0)
    for number in range(12):
        assert following.ask_at(1.0, 5.0) == 1.0
        assert following.whom_to_ask(HEAD, 1.0) == PEERS[1]
        after = ENTRIES[number - 1].record if number else HEAD
        following.receive(PEERS[1], log(ENTRIES[number : number + 1], after, number=12), chain())
    assert records(following) == [e.record for e in ENTRIES]
    assert following.behind_since is None


def test_the_tip_of_what_is_pending_is_known_first() -> None:
    following = catch_up()
    long = chain_with(HEAD, TRUNK)
    assert following.known(long) == long.known()
    following.receive(PEERS[1], log(ENTRIES[:3]), chain())
    known = following.known(chain())
    assert known == (ENTRIES[2].record.hash, HEAD.hash)
    assert following.known(long)[1:8] == long.known()[:7]
    assert following.known(long)[-1] == HEAD.hash
    assert len(following.known(long)) == len(long.known()) <= KNOWN_MAX


def test_a_long_gap_is_jumped_and_a_growing_one_is_waited_for() -> None:
    long = [entry for entry, _ in grown(REPLAY_ROUNDS_MAX + 2)]
    few, many = catch_up(), catch_up()
    few.receive(PEERS[1], log(long[:REPLAY_ROUNDS_MAX]), chain())
    assert not few.wants_snapshot(chain())
    many.notice(PEERS[1], 500, 0.0)
    many.receive(PEERS[1], log(long, number=500), chain())
    assert not many.wants_snapshot(chain()), "most of the log is still to come"
    assert many.next(chain(), 0.0) == long[0]
    many.lost(PEERS[1], HEAD)
    assert many.wants_snapshot(chain())
    many.snapshot_failed()
    assert many.next(chain(), 0.0) == long[0]


def test_contributions_that_do_not_come_are_gone_whatever_was_said_of_them() -> None:
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES), chain())
    assert following.next(chain(), 0.0) == ENTRIES[0]
    assert following.next(chain(), REPLAY_SECONDS_MAX) == ENTRIES[0]
    following.next(chain(), REPLAY_SECONDS_MAX + 1.0)
    assert following.wants_snapshot(chain())
    assert following.next(chain(), REPLAY_SECONDS_MAX + 1.0) is None


def test_a_single_round_without_contributions_is_no_reason_to_jump() -> None:
    """Nothing would attest the state after it."""
    following = catch_up()
    following.receive(PEERS[1], log([replace(ENTRIES[0], payload_bytes=0)]), chain())
    assert not following.wants_snapshot(chain())


def test_a_lost_state_is_wanted_wherever_the_log_stands_and_any_record_of_it_attests() -> None:
    following, own = catch_up(), chain(6)
    assert not following.wants_snapshot(own)
    assert following.child_of(ENTRIES[2].record.hash, own) is None
    following.is_lost = True
    assert following.wants_snapshot(own)
    assert [following.child_of(e.record.hash, own) for e in ENTRIES[:6]] == [e.record for e in ENTRIES[1:6]] + [None]
    following.receive(PEERS[1], log(ENTRIES), own)
    assert following.child_of(own.head.hash, own) == ENTRIES[6].record


def test_rounds_that_are_to_be_applied_again_come_before_the_rest() -> None:
    following, own = catch_up(), chain(6)
    following.receive(PEERS[1], log(ENTRIES), own)
    following.resume(ENTRIES[2].record.hash, list(ENTRIES[3:6]))
    assert records(following) == [e.record for e in ENTRIES[3:]]
    assert following.follows(ENTRIES[2].record)


def test_whoever_gave_the_state_has_what_others_said_was_gone() -> None:
    following = catch_up()
    following.receive(PEERS[1], log([replace(entry, payload_bytes=0) for entry in ENTRIES]), chain())
    assert following.wants_snapshot(chain())
    following.have_donor()
    assert not following.wants_snapshot(chain())
    assert records(following) == [entry.record for entry in ENTRIES]
