"""Fetching contributions: each source in turn, ever more rarely, and never more than may be wanted at a time."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from averaging.fetcher import WANTED_MAX, Fetcher
from averaging.messages import DIGESTS_MAX
from averaging.record import Hash, sha256
from network.seam import PeerID
from tests.averaging.strategies import SIGNERS

PEERS = [s.peer_id for s in SIGNERS]


def digest(number: int) -> Hash:
    return sha256(b"%d" % number)


def linked(peer: PeerID) -> bool:
    return True


def test_sources_are_asked_in_turn_and_ever_more_rarely() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0)], PEERS[:2], 1.0)
    assert fetcher.ask(0.9, 1.0, linked) == {}
    assert fetcher.next_due(1.0) == 1.0
    asked, times = [], []
    for _ in range(5):
        now = fetcher.next_due(1.0)
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
    fetcher.arrived(digest(0), 0.25)
    assert digest(0) not in fetcher
    assert fetcher.ask(100.0, 1.0, linked) == {PEERS[0]: [digest(1)]}
    fetcher.clear()
    assert fetcher.next_due(1.0) is None


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


def test_how_long_answers_take_is_learnt_from_what_was_asked_for() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0), digest(1)], PEERS[:2], 0.0)
    fetcher.arrived(digest(0), 0.5)
    assert not fetcher.pace.is_known, "it was pushed"
    fetcher.ask(1.0, 4.0, linked)
    fetcher.ask(5.0, 4.0, linked)
    fetcher.arrived(digest(1), 5.5)
    assert fetcher.pace.times == (0.5,), "a lost question says nothing of how long answers take"


def test_a_question_that_is_out_is_repeated_as_soon_as_answers_prove_quick() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0)], PEERS[:2], 0.0)
    fetcher.ask(0.0, 100.0, linked)
    assert fetcher.next_due(100.0) == 100.0
    assert fetcher.next_due(0.5) == 0.5
    assert fetcher.ask(0.5, 0.5, linked) == {PEERS[1]: [digest(0)]}


def test_of_what_is_kept_nothing_is_asked_twice() -> None:
    fetcher = Fetcher()
    fetcher.need([digest(0), digest(1)], PEERS[:1], 0.0)
    fetcher.ask(0.0, 1.0, linked)
    fetcher.keep([digest(1), digest(2)])
    assert digest(0) not in fetcher and digest(1) in fetcher and digest(2) not in fetcher
    assert fetcher.ask(0.5, 1.0, linked) == {}
