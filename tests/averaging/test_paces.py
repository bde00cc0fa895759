"""A peer's pace is learnt from the rounds in which it was linked all the time, not from how long it was away."""

from __future__ import annotations

import pytest

from averaging.messages import Offer
from tests.averaging.one_peer import LEAD, ONE, RECORD, TWO, ZERO, Peer, proposal
from tests.averaging.strategies import offer_of

COMMITTED = 1.0


def committed() -> Peer:
    """ONE, after a round to which all three contributed; with LEAD's vote and its own that is a quorum."""
    peer = Peer(ONE)
    peer.hold()
    peer.hear(LEAD, proposal(RECORD, ZERO), COMMITTED)
    assert peer.engine.head == RECORD
    return peer


@pytest.mark.parametrize("is_away", [False, True])
def test_how_long_a_peer_was_away_is_not_its_pace(is_away: bool) -> None:
    peer = committed()
    if is_away:
        peer.engine.disconnected(TWO.peer_id)
        peer.engine.connected(TWO.peer_id, 100.0)
        peer.drain()
    for signer, now in ((LEAD, 31.0), (TWO, 101.0)):
        peer.hear(signer, Offer(offer_of(signer, RECORD).encoded), now)
    cycles = peer.engine.rounds.timing.cycles
    assert cycles[LEAD.peer_id].times == (30.0,)
    assert (TWO.peer_id in cycles) == (not is_away)


def test_who_comes_back_is_expected_from_then_on_and_who_is_gone_is_not_known_to_have_come() -> None:
    peer = committed()
    clock = peer.engine._voting.clock
    assert TWO.peer_id in clock.came and TWO.peer_id in clock.freed
    peer.engine.disconnected(TWO.peer_id)
    assert TWO.peer_id not in clock.came and TWO.peer_id not in clock.freed
    assert LEAD.peer_id in clock.came and LEAD.peer_id in clock.freed
    peer.engine.connected(TWO.peer_id, 50.0)
    assert clock.came[TWO.peer_id] == 50.0 and TWO.peer_id not in clock.freed


def test_an_owner_too_forgets_since_when_a_peer_that_is_gone_was_free() -> None:
    peer = Peer(ONE, parts=2)
    owners = peer.engine.rounds.owners
    assert owners is not None
    owners.collector.clock.freed = {LEAD.peer_id: COMMITTED, TWO.peer_id: COMMITTED}
    peer.engine.disconnected(TWO.peer_id)
    assert owners.collector.clock.freed == {LEAD.peer_id: COMMITTED}
