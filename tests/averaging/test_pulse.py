"""Signs of life: no link is silent for longer than a heartbeat, and one look serves many links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.messages import PAUSE_MILLISECONDS_MAX, Accepted, Head, Message
from averaging.outbox import LATE_SECONDS, Link, Outbox
from averaging.pulse import EARLY, Pulse
from averaging.record import Ballot, sha256
from averaging.timing import TimingConfig
from network.seam import PeerID
from simulator.toy import ToySigner
from tests.averaging.one_peer import HEAD, ONE, OTHER_BASE, STRANGER, TWO, Peer
from tests.averaging.strategies import SIGNERS

CONFIG = TimingConfig()
PAUSE = CONFIG.heartbeat_seconds
PEERS = [s.peer_id for s in SIGNERS[1:6]]


FAR = 40.0


def pulse(sent: list[float], pause: float = PAUSE) -> Pulse:
    """After links were last spoken to at `sent`, with the announcement of `pause`."""
    outbox = Outbox(SIGNERS[0].peer_id, CONFIG.silence_seconds)
    for peer, at in zip(PEERS, sent, strict=False):
        outbox.links[peer] = Link(up=0.0, heard=0.0, sent=at, pause=pause)
    return Pulse(outbox, CONFIG)


def near(peer: PeerID) -> float:
    return PAUSE


def far(peer: PeerID) -> float:
    return FAR


def look(one: Pulse, now: float, pause_of: Callable[[PeerID], float]) -> list[PeerID]:
    """Speaks to those who are due."""
    due = one.due(now, pause_of)
    for pause, peers in due.items():
        for peer in peers:
            one._outbox.send(peer, replace(AGAIN, pause=round(1000 * pause)), now)
    return [peer for peers in due.values() for peer in peers]


@given(
    st.lists(st.floats(0, 1.9), min_size=1, max_size=5),
    st.lists(st.tuples(st.floats(0.01, 50), st.sets(st.integers(0, 4))), max_size=5),
)
def test_no_link_is_silent_for_longer_than_it_announced_and_looks_are_few(
    sent: list[float], changes: list[tuple[float, set[int]]]
) -> None:
    """Whatever pauses change to, and whenever."""
    one = pulse(sent)
    links, idle, now, looks = one._outbox.links, set[int](), 1.9, 0

    def pause_of(peer: PeerID) -> float:
        return FAR if PEERS.index(peer) in idle else PAUSE

    for length, after in [*changes, (300.0, set())]:
        until = now + length
        while True:
            look(one, now, pause_of)
            looks += 1
            assert one.next_at > now, "else the caller would spin"
            if one.next_at > until:
                break
            now = one.next_at
            assert all(now - link.sent <= link.pause + 1e-9 for link in links.values())
        now, idle = until, after
        one.hurry()
    assert looks <= (now - 1.9) / (PAUSE * (1 - EARLY)) + len(changes) + 3


def test_links_that_are_nearly_due_are_served_together() -> None:
    one = pulse([0.0, 0.3, 0.4])
    assert look(one, PAUSE, near) == sorted(PEERS[:3])
    assert look(pulse([0.0, 1.0]), PAUSE, near) == [PEERS[0]]


def test_between_two_looks_nothing_is_looked_at() -> None:
    one = pulse([0.0])
    look(one, 0.0, near)
    one._outbox.links[PEERS[0]].sent = -100.0
    assert look(one, PAUSE / 2, near) == []
    assert look(one, PAUSE, near) == [PEERS[0]]


def test_a_longer_pause_holds_once_it_was_announced() -> None:
    one = pulse([0.0])
    assert look(one, 0.0, far) == []
    assert one.next_at == PAUSE
    assert look(one, PAUSE, far) == [PEERS[0]]
    assert one.next_at == PAUSE + FAR


def test_a_shorter_pause_holds_at_once() -> None:
    one = pulse([0.0], FAR)
    look(one, 0.0, far)
    one.hurry()
    assert look(one, 10.0, near) == [PEERS[0]]
    assert one.next_at == 10.0 + PAUSE


def test_who_has_no_links_looks_now_and_then() -> None:
    one = pulse([])
    assert look(one, 5.0, near) == []
    assert one.next_at == 5.0 + CONFIG.idle_seconds_max


# Who is believed to live.


@given(st.floats(0, 200), st.floats(0, 300))
def test_who_is_silent_for_longer_than_it_announced_is_not_alive(announced: float, gone: float) -> None:
    one = pulse([0.0])
    one._outbox.links[PEERS[0]].their_pause = announced
    bound = max(CONFIG.silence_seconds, announced + LATE_SECONDS)
    assert one._outbox.alive(PEERS[0], gone) == (gone <= bound)


@pytest.mark.parametrize(("parts", "longest"), [(0, CONFIG.heartbeat_seconds_max), (8, CONFIG.idle_seconds_max)])
def test_nobody_is_believed_to_live_for_longer_than_the_limit_whatever_it_announces(parts: int, longest: float) -> None:
    peer = Peer(ONE, parts=parts)
    peer.hear(TWO, replace(AGAIN, pause=PAUSE_MILLISECONDS_MAX), 1.0)
    gone = longest + LATE_SECONDS
    assert peer.engine._outbox.alive(TWO.peer_id, 1.0 + gone)
    assert not peer.engine._outbox.alive(TWO.peer_id, 1.1 + gone)


# How long the pauses are.


def said_pauses(parts: int, length: float, *, me: ToySigner = ONE, silent: bool = False) -> dict[PeerID, int]:
    """By whom it was said to, when a round has lasted so long."""
    peer = Peer(me, parts=parts)
    if not silent:
        for other in SIGNERS[:6]:
            if other is not me:
                peer.hear(other, AGAIN, length)
    peer.engine.tick(length)
    return {to: m.pause for to, m in peer.drain().sends if isinstance(m, Head)}


VOTERS = set(HEAD.voters)


def test_pauses_follow_the_rounds_within_bounds() -> None:
    for length, pause in ((1.6, 2000), (10.0, 2000), (40.0, 4000), (500.0, 6000)):
        assert set(said_pauses(0, length).values()) == {pause}


def test_where_owners_reduce_only_those_whom_the_log_names_speak_often_to_each_other() -> None:
    said = said_pauses(8, 60.0)
    assert {said[peer] for peer in said if peer in VOTERS} == {6000}
    assert {said[peer] for peer in said if peer not in VOTERS} == {75_000}
    assert set(said_pauses(8, 60.0, me=STRANGER).values()) == {75_000}
    assert max(said_pauses(8, 5000.0).values()) == 120_000


def test_who_hears_no_quorum_speaks_often_to_everybody() -> None:
    assert set(said_pauses(8, 60.0, me=STRANGER, silent=True).values()) == {2000}


# What a sign of life that says nothing new is good for.

AGAIN = Head(HEAD.hash, 0, 0, 1, False)
GONE = Head(HEAD.hash, 0, 0, 1, True)
ELSEWHERE = Head(sha256(OTHER_BASE), 1, 10, 1, False)
VOTE = Accepted(HEAD.hash, Ballot(0, TWO.peer_id), HEAD.hash, bytes(64))


def test_a_sign_of_life_that_says_nothing_new_is_heard_and_that_is_all() -> None:
    one, other = Peer(ONE), Peer(ONE)
    again = replace(AGAIN, pause=7000)
    assert one.engine.is_old_news(TWO.peer_id, again, 3.0)
    assert one.engine.links[TWO.peer_id].heard == 3.0
    actions = other.hear(TWO, again, 3.0)
    assert not actions.sends and repr(other.engine.links) == repr(one.engine.links), "nothing was missed"


@pytest.mark.parametrize("message", [GONE, ELSEWHERE, VOTE], ids=["leaving", "elsewhere", "vote"])
def test_anything_else_is_news(message: Message) -> None:
    peer = Peer(ONE)
    peer.hear(TWO, AGAIN, 1.0)
    assert not peer.engine.is_old_news(TWO.peer_id, message, 3.0)
    assert peer.engine.links[TWO.peer_id].heard == 1.0


def test_who_is_not_linked_is_not_heard() -> None:
    assert not Peer(ONE).engine.is_old_news(SIGNERS[7].peer_id, AGAIN, 1.0)
