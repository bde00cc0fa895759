"""Signs of life: no link is silent for longer than a heartbeat, and one look serves many links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.messages import Accepted, Head, Message
from averaging.outbox import Link, Outbox
from averaging.pulse import EARLY, IDLE_FACTOR, Pulse
from averaging.record import Ballot, sha256
from averaging.timing import TimingConfig
from network.seam import PeerID
from tests.averaging.one_peer import HEAD, ONE, OTHER_BASE, TWO, Peer
from tests.averaging.strategies import SIGNERS

CONFIG = TimingConfig()
PAUSE = CONFIG.heartbeat_seconds
PEERS = [s.peer_id for s in SIGNERS[1:6]]


def pulse(sent: list[float]) -> Pulse:
    outbox = Outbox(SIGNERS[0].peer_id, CONFIG.silence_seconds)
    for peer, at in zip(PEERS, sent, strict=False):
        outbox.links[peer] = Link(up=0.0, heard=0.0, sent=at)
    return Pulse(outbox, CONFIG)


def busy(peer: PeerID) -> bool:
    return False


@given(st.lists(st.floats(0, 1.9), min_size=1, max_size=5), st.sets(st.integers(0, 4)))
def test_no_link_is_silent_for_longer_than_its_pause_and_looks_are_few(sent: list[float], idle: set[int]) -> None:
    one = pulse(sent)
    links, looks = one._outbox.links, 0
    now = 1.9
    while now < 100.0:
        for peer in one.due(now, lambda p: PEERS.index(p) in idle):
            links[peer].sent = now
        looks += 1
        assert one.next_at > now, "else the caller would spin"
        now = one.next_at
        for peer, link in links.items():
            assert now - link.sent <= PAUSE * (IDLE_FACTOR if PEERS.index(peer) in idle else 1) + 1e-9
    assert looks <= 98.1 / (PAUSE * (1 - EARLY)) + 2


def test_links_that_are_nearly_due_are_served_together() -> None:
    one = pulse([0.0, 0.3, 0.4])
    assert one.due(PAUSE, busy) == sorted(PEERS[:3])
    assert pulse([0.0, 1.0]).due(PAUSE, busy) == [PEERS[0]]


def test_between_two_looks_nothing_is_looked_at() -> None:
    one = pulse([0.0])
    one.due(0.0, busy)
    one._outbox.links[PEERS[0]].sent = -100.0
    assert one.due(PAUSE / 2, busy) == []
    assert one.due(PAUSE, busy) == [PEERS[0]]


def test_a_new_link_is_looked_at_within_a_heartbeat() -> None:
    one = pulse([])
    one.due(10.0, busy)
    one._outbox.links[PEERS[0]] = Link(up=10.5, heard=10.5, sent=10.5)
    one.opened(10.5)
    assert one.next_at <= 10.5 + PAUSE


def test_who_has_no_links_looks_now_and_then() -> None:
    one = pulse([])
    assert one.due(5.0, busy) == []
    assert one.next_at == 5.0 + PAUSE


# What a sign of life that says nothing new is good for.

AGAIN = Head(HEAD.hash, 0, 0, 1, False)
GONE = Head(HEAD.hash, 0, 0, 1, True)
ELSEWHERE = Head(sha256(OTHER_BASE), 1, 10, 1, False)
VOTE = Accepted(HEAD.hash, Ballot(0, TWO.peer_id), HEAD.hash, bytes(64))


def test_a_sign_of_life_that_says_nothing_new_is_heard_and_that_is_all() -> None:
    peer = Peer(ONE)
    assert not peer.engine.is_old_news(TWO.peer_id, AGAIN, 1.0), "where it stands is new"
    peer.hear(TWO, AGAIN, 1.0)
    assert peer.engine.is_old_news(TWO.peer_id, AGAIN, 3.0)
    assert peer.engine.links[TWO.peer_id].heard == 3.0
    before = repr(peer.engine.links)
    actions = peer.hear(TWO, AGAIN, 3.0)
    assert not actions.sends and repr(peer.engine.links) == before, "nothing was missed"


@pytest.mark.parametrize("message", [GONE, ELSEWHERE, VOTE], ids=["leaving", "elsewhere", "vote"])
def test_anything_else_is_news(message: Message) -> None:
    peer = Peer(ONE)
    peer.hear(TWO, AGAIN, 1.0)
    assert not peer.engine.is_old_news(TWO.peer_id, message, 3.0)
    assert peer.engine.links[TWO.peer_id].heard == 1.0


def test_who_is_not_linked_is_not_heard() -> None:
    assert not Peer(ONE).engine.is_old_news(SIGNERS[7].peer_id, AGAIN, 1.0)
