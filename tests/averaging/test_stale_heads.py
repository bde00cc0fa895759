"""Where owners reduce, who votes says for many rounds not where it stands to those whom the log does not name."""

from __future__ import annotations

from averaging.messages import Head, Log, Offer
from averaging.record import Ballot
from tests.averaging.one_peer import HEAD, LEAD, ONE, RECORD, STRANGER, TWO, ZERO, Peer, accepted, proposal
from tests.averaging.strategies import SIGNERS, offer_of, recovery_of

OTHER_STRANGER = SIGNERS[4]
VOTERS = (LEAD, ONE, TWO)


def in_the_second_round() -> Peer:
    """A newcomer whose voters said before the first round where they stood; since then they voted and offered anew."""
    peer = Peer(STRANGER, parts=2)
    for voter in VOTERS:
        peer.hear(voter, Head(HEAD.hash, HEAD.round, HEAD.tokens, 1, False, 60_000), 0.4)
    peer.hold()
    peer.hear(LEAD, proposal(RECORD, ZERO), 1.0)
    for voter in (ONE, TWO):
        peer.hear(voter, accepted(voter, Ballot(0, LEAD.peer_id), RECORD), 1.1)
    assert peer.engine.head == RECORD
    peer.engine.anchored(RECORD.hash, RECORD.base, 1.2)
    for voter in VOTERS:
        peer.hear(voter, Offer(offer_of(voter, RECORD).encoded), 5.0)
    assert peer.engine.rounds.voting.clock.started == 5.0
    return peer


def test_voters_that_are_silent_on_where_they_stand_are_not_called_behind() -> None:
    assert "behind" not in in_the_second_round().engine.situation(5.1)


def test_while_the_voters_go_on_nobody_follows_the_recovery_of_a_single_peer() -> None:
    peer, entry = in_the_second_round(), recovery_of(RECORD, [OTHER_STRANGER])
    peer.hear(OTHER_STRANGER, Log(RECORD.hash, entry.record.round, (entry,)), 5.1)
    assert peer.engine.head == RECORD
