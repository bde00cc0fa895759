"""Replaying a gap: whom to ask for its contributions, each once, and what that teaches about the swarm's pace."""

from __future__ import annotations

from averaging.messages import Get, Log, Offer
from averaging.record import Hash
from averaging.timing import Pace, Timing
from simulator.toy import ToySigner
from tests.averaging.one_peer import HEAD, LEAD, ONE, TWO, Peer, accepted, proposal, unsigned
from tests.averaging.strategies import SIGNERS, grown

GAP = grown(6)
AHEAD = SIGNERS[4]
"""Who alone is ahead; not the first of the links by its name."""
DIGESTS = [c.digest for _, contributions in GAP for c in contributions]


def behind() -> Peer:
    """One peer of many that stand where it stands, which has just heard the log of `AHEAD`."""
    peer = Peer(ONE)
    assert min(peer.engine.links) != AHEAD.peer_id
    peer.hear(AHEAD, Log(HEAD.hash, GAP[-1][0].record.round, tuple(entry for entry, _ in GAP)))
    return peer


def asked(peer: Peer, now: float) -> list[tuple[str, Hash]]:
    """Of whom it asks what, until `now`."""
    peer.engine.tick(now)
    return [(to, digest) for to, m in peer.drain().sends if isinstance(m, Get) for digest in m.digests]


def answer(peer: Peer, rounds: int, source: ToySigner = AHEAD) -> None:
    for contribution in (c for _, contributions in GAP[:rounds] for c in contributions):
        peer.hear(source, Offer(contribution.encoded), 1.1)


def test_who_gave_the_log_is_asked_first_for_what_it_holds() -> None:
    assert asked(behind(), 1.0) == [(AHEAD.peer_id, digest) for digest in DIGESTS]


def test_if_that_one_does_not_answer_others_are_asked() -> None:
    peer = behind()
    asked(peer, 1.0)
    later = asked(peer, 1.0 + peer.engine._retry)
    assert [digest for _, digest in later] == DIGESTS
    assert {to for to, _ in later} == {min(p for p in peer.engine.links if p != AHEAD.peer_id)}


def test_what_is_on_its_way_is_not_asked_for_again_when_a_round_before_it_is_applied() -> None:
    peer = behind()
    asked(peer, 1.0)
    answer(peer, 2)
    assert peer.engine.head == GAP[1][0].record
    assert asked(peer, 1.1) == []
    answer(peer, 6)
    assert peer.engine.head == GAP[5][0].record


def test_a_replayed_round_says_nothing_of_how_long_votes_take() -> None:
    """Else a peer that lags learns to ask ever more slowly, and lags for ever."""
    record, offers = GAP[0][0].record, GAP[0][1]
    assert record.origin == LEAD.peer_id
    ballot = GAP[0][0].certificate.ballot
    late, prompt = Peer(ONE), Peer(ONE)
    for peer in (late, prompt):
        peer.hold(offers)
        peer.hear(LEAD, unsigned(proposal(record, ballot)), 0.6)
        assert peer.engine.rounds.timing == Timing()
    prompt.hear(TWO, accepted(TWO, ballot, record), 0.7)
    late.hear(AHEAD, Log(HEAD.hash, record.round, (GAP[0][0],)), 9.0)
    assert prompt.engine.head == late.engine.head == record
    assert prompt.engine.rounds.timing.decide.is_known
    assert not late.engine.rounds.timing.decide.is_known


def test_who_saw_slow_votes_asks_again_as_quickly_as_answers_come() -> None:
    """Where a proposal once took long, a lost answer must not cost so much every time."""
    peer = behind()
    peer.engine.rounds.timing = Timing(decide=Pace((60.0,)))
    asked(peer, 1.0)
    answer(peer, 5)
    assert peer.engine.head == GAP[4][0].record
    late = [digest for _, digest in asked(peer, 2.1)]
    assert late == [c.digest for c in GAP[5][1]]
