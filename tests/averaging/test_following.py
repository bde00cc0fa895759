"""Fetching and catching up: each source in turn, only certified records, overlapping pages, the wish for a snapshot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from averaging.catch_up import ASKED_IN_VAIN_MAX, DOUBT_SECONDS, CatchUp
from averaging.fetcher import WANTED_MAX, Fetcher
from averaging.messages import DIGESTS_MAX, Log, LogEntry
from averaging.record import Certificate, Hash, Record, sha256
from network.seam import PeerID
from tests.averaging.strategies import SIGNERS, certificate_of, child_of, first, grown, offer_of

PEERS = [s.peer_id for s in SIGNERS]


def digest(number: int) -> Hash:
    return sha256(b"%d" % number)


def linked(peer: PeerID) -> bool:
    return True


def test_sources_are_asked_in_turn_and_ever_more_rarely() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0)], PEERS[:2], 1.0)
    assert fetcher.ask(0.9, 1.0, linked) == {}
    assert fetcher.next_due == 1.0
    asked, times = [], []
    for _ in range(5):
        now = fetcher.next_due
        assert now is not None
        asked += list(fetcher.ask(now, 1.0, linked))
        times.append(now)
    assert asked == [PEERS[0], PEERS[1], PEERS[0], PEERS[1], PEERS[0]]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == [1, 2, 3, 4]


def test_what_arrived_is_not_asked_for_again() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0), digest(1)], PEERS[:1], 0.0)
    assert fetcher.ask(0.0, 1.0, linked) == {PEERS[0]: [digest(0), digest(1)]}
    fetcher.arrived(digest(0))
    assert digest(0) not in fetcher
    assert fetcher.ask(100.0, 1.0, linked) == {PEERS[0]: [digest(1)]}
    fetcher.clear()
    assert fetcher.next_due is None


def test_only_linked_peers_are_asked_and_new_sources_are_added() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0)], PEERS[:1], 0.0)
    assert fetcher.ask(0.0, 1.0, lambda peer: peer != PEERS[0]) == {}
    fetcher.need([digest(0)], PEERS[1:2], 99.0)
    assert fetcher.ask(100.0, 1.0, lambda peer: peer != PEERS[0]) == {PEERS[1]: [digest(0)]}


@given(st.integers(1, 2 * WANTED_MAX), st.integers(1, 4))
def test_what_is_wanted_and_asked_is_bounded(count: int, num_sources: int) -> None:
    fetcher = Fetcher()
    fetcher.need([digest(n) for n in range(count)], PEERS[:num_sources], 0.0)
    requests = fetcher.ask(0.0, 1.0, linked)
    assert all(len(digests) <= DIGESTS_MAX for digests in requests.values())
    assert sum(digest(n) in fetcher for n in range(count)) == min(count, WANTED_MAX)


# Catching up.

HEAD = first(3)
CHAIN = grown(12)
ENTRIES = tuple(entry for entry, _ in CHAIN)


def catch_up(snapshot_bytes: int = 10**9) -> CatchUp:
    return CatchUp(SIGNERS[0], snapshot_bytes)


def log(entries: Sequence[LogEntry], after: Record = HEAD, number: int | None = None) -> Log:
    return Log(after.hash, entries[-1].record.round if number is None else number, tuple(entries))


def records(following: CatchUp) -> list[Record]:
    return [entry.record for entry in following.pending]


def test_a_certified_gap_is_taken_and_replayed_in_order() -> None:
    following = catch_up()
    assert following.receive(PEERS[1], log(ENTRIES), HEAD) is None
    head = HEAD
    for entry, contributions in CHAIN:
        assert following.next(0.0) == entry
        assert following.contributions(entry.record) is None
        following.held.update((c.digest, c) for c in contributions)
        assert following.contributions(entry.record) == contributions
        head = entry.record
        following.applied(head)
    assert following.next(0.0) is None
    assert not following.held
    assert following.tip(head) == head


def wrong_certificates() -> dict[str, LogEntry]:
    entry, other = ENTRIES[0], ENTRIES[1]
    record, good = entry.record, entry.certificate
    lead = HEAD.lead
    signers = [s for s in SIGNERS[:3] if s.peer_id != lead]
    few = certificate_of(HEAD, record, signers[:1])
    strangers = certificate_of(HEAD, record, SIGNERS[3:9])
    elsewhere = certificate_of(other.record, record, SIGNERS[:3])
    ballot = replace(good.ballot, attempt=good.ballot.attempt + 1)
    forged = Certificate(good.ballot, dict.fromkeys(good.signatures, bytes(64)))
    skipping = child_of(HEAD, [offer_of(SIGNERS[0], HEAD)])
    skipping = replace(skipping, round=skipping.round + 1)
    return {
        "one of three": replace(entry, certificate=few),
        "nobody": replace(entry, certificate=Certificate(good.ballot, {})),
        "strangers": replace(entry, certificate=strangers),
        "of another instance": replace(entry, certificate=elsewhere),
        "of another ballot": replace(entry, certificate=replace(good, ballot=ballot)),
        "of another record": replace(entry, certificate=other.certificate),
        "forged": replace(entry, certificate=forged),
        "skips a round": LogEntry(skipping, certificate_of(HEAD, skipping, SIGNERS[:3]), 1),
    }


def test_wrong_certificates_are_refused() -> None:
    for name, entry in wrong_certificates().items():
        following = catch_up()
        assert following.receive(PEERS[1], log([entry]), HEAD) is not None, name
        assert following.next(0.0) is None, name


def test_what_came_before_a_wrong_certificate_is_kept() -> None:
    following = catch_up()
    lie = replace(ENTRIES[2], certificate=Certificate(ENTRIES[2].certificate.ballot, {}))
    assert following.receive(PEERS[1], log([*ENTRIES[:2], lie]), HEAD) is not None
    assert records(following) == [e.record for e in ENTRIES[:2]]


def test_a_longer_log_extends_a_shorter_one() -> None:
    following = catch_up()
    assert following.receive(PEERS[1], log(ENTRIES[:3]), HEAD) is None
    assert following.receive(PEERS[2], log(ENTRIES[:9]), HEAD) is None
    assert following.receive(PEERS[2], log(ENTRIES[9:], after=ENTRIES[8].record), HEAD) is None
    assert records(following) == [e.record for e in ENTRIES]


def test_a_page_that_overlaps_or_is_old_changes_nothing() -> None:
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES[:6]), HEAD)
    assert following.receive(PEERS[2], log(ENTRIES[:4]), HEAD) is None
    assert following.receive(PEERS[2], log(ENTRIES[3:], after=ENTRIES[2].record), HEAD) is None
    assert records(following) == [e.record for e in ENTRIES[:6]]


def test_an_overlapping_page_cannot_replace_what_was_verified() -> None:
    """Certificates are kept and passed on: an unverified one would make this peer's own log worthless to others."""
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES[:3]), HEAD)
    lies = [replace(e, certificate=Certificate(e.certificate.ballot, {})) for e in ENTRIES[:3]]
    following.receive(PEERS[2], log(lies), HEAD)
    assert [e.certificate for e in following.pending] == [e.certificate for e in ENTRIES[:3]]


def test_a_log_that_contradicts_a_certified_one_is_refused() -> None:
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES[:3]), HEAD)
    other = child_of(HEAD, [offer_of(SIGNERS[0], HEAD, payload=b"other")])
    lie = LogEntry(other, certificate_of(HEAD, other, SIGNERS[:3]), 1)
    assert following.receive(PEERS[2], log([lie]), HEAD) is not None
    assert records(following) == [e.record for e in ENTRIES[:3]]


def test_a_commit_by_votes_trims_the_gap_and_another_chain_voids_it() -> None:
    following = catch_up()
    following.receive(PEERS[1], log(ENTRIES), HEAD)
    following.applied(ENTRIES[4].record)
    assert records(following) == [e.record for e in ENTRIES[5:]]
    following.applied(ENTRIES[0].record)  # Not what precedes the rest.
    assert not following.pending


def test_a_heavy_gap_is_jumped_unless_nobody_has_a_snapshot() -> None:
    size = sum(e.payload_bytes for e in ENTRIES)
    light, heavy = catch_up(size), catch_up(size - 1)
    for following in (light, heavy):
        following.receive(PEERS[1], log(ENTRIES), HEAD)
    assert not light.wants_snapshot
    assert heavy.wants_snapshot and heavy.next(0.0) is None
    heavy.snapshot_failed()
    assert heavy.next(0.0) == ENTRIES[0], "it replays instead"


def test_a_gap_without_contributions_is_jumped_or_asked_for_again() -> None:
    following = catch_up()
    gone = [replace(e, payload_bytes=0) for e in ENTRIES[:4]]
    following.receive(PEERS[1], log([*gone, *ENTRIES[4:]]), HEAD)
    assert following.wants_snapshot
    following.receive(PEERS[2], log(ENTRIES), HEAD)
    assert not following.wants_snapshot, "another peer still has them"
    following = catch_up()
    following.receive(PEERS[1], log(gone), HEAD)
    following.snapshot_failed()
    assert not following.pending and not following.wants_snapshot


def test_a_jump_is_attested_by_the_record_after_it() -> None:
    following = catch_up(1)
    following.receive(PEERS[1], log(ENTRIES), HEAD)
    assert following.child_of(ENTRIES[3].record.hash) == ENTRIES[4].record
    assert following.child_of(ENTRIES[-1].record.hash) is None
    assert following.up_to(ENTRIES[3].record.hash) == list(ENTRIES[:4])
    assert following.up_to(sha256(b"elsewhere")) == []


def test_who_is_ahead_is_asked_after_some_patience_and_in_turn() -> None:
    following = catch_up()
    assert following.ask_at(1.0, 5.0) is None
    following.notice(PEERS[1], 12, 10.0)
    following.notice(PEERS[2], 12, 11.0)
    assert following.behind_since == 10.0
    assert following.ask_at(1.0, 5.0) == 11.0
    asked = {following.whom_to_ask(11.0), following.whom_to_ask(16.0)}
    assert asked == {PEERS[1], PEERS[2]}
    assert following.ask_at(1.0, 5.0) == 21.0
    following.receive(PEERS[1], log(ENTRIES), HEAD)
    following.lost(PEERS[2])
    assert following.behind_since is None


def test_doubt_does_not_last_for_ever() -> None:
    """Where the network stood still, all others were asked in vain; an offer says no round higher than the next."""
    follower, other = CatchUp(SIGNERS[0], 1000), PEERS[1]
    follower.notice(other, 5, 0.0)
    for at in range(ASKED_IN_VAIN_MAX + 1):
        assert follower.whom_to_ask(float(at)) == other
    follower.notice(other, 5, 6.0)
    assert follower.behind_since is None
    follower.notice(other, 5, 6.0 + DOUBT_SECONDS)
    assert follower.behind_since is not None
