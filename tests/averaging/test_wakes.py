"""When an engine wants to be woken: never for nothing, whatever others say, and at once where something changed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from averaging.catch_up import REPLAY_ROUNDS_MAX
from averaging.messages import Head, Log, Offer
from averaging.timing import Pace, Timing, TimingConfig, start_patience
from tests.averaging.one_peer import HEAD, LEAD, ONE, OTHER_BASE, STRANGER, TWO, Peer
from tests.averaging.owning import OTHER_BASE as ANOTHER
from tests.averaging.owning import OWNER, SHARER, owners_of, share_of
from tests.averaging.strategies import SIGNERS, grown, offer_of

PATIENCE = start_patience(Timing(), TimingConfig())
STANDS = Head(HEAD.hash, HEAD.round, HEAD.tokens, 1, False, 2000)


@given(
    st.sampled_from([LEAD, ONE, STRANGER]),
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.floats(0.01, 15)), max_size=8),
)
def test_no_offers_make_an_engine_spin(me: object, offers: list[tuple[int, bool, float]]) -> None:
    """A later offer takes the place of an earlier one, and may be made from another state."""
    signer = next(s for s in SIGNERS if s is me)
    peer, now = Peer(signer), 1.0
    for number, is_same, seconds in offers:
        other = SIGNERS[number]
        if other is not signer:
            offer = offer_of(other, HEAD, base=HEAD.base if is_same else OTHER_BASE, payload=b"%d" % len(peer.disk))
            peer.hear(other, Offer(offer.encoded), now)
        now += seconds
        for _ in range(3):
            peer.engine.tick(now)
            peer.drain()
        assert peer.engine.next_wake(now) > now


def test_a_round_whose_offers_became_useless_is_not_closed_with_too_few() -> None:
    owners = owners_of(OWNER)
    for sharer in (SHARER, OWNER):
        owners.on_share(share_of(sharer))
    assert owners.due_at(Timing(), 2, 1.0) is not None
    for sharer in (SHARER, OWNER):
        owners.on_share(share_of(sharer, base=ANOTHER))
    for at in (1.1, 1.0 + PATIENCE, 2.0 + 2 * PATIENCE):
        assert owners.due_at(Timing(), 2, at) is None


def test_who_leaves_is_no_longer_waited_for_from_that_moment() -> None:
    peer = Peer(LEAD)
    peer.hear(ONE, Offer(offer_of(ONE, HEAD).encoded), 1.0)
    clock = peer.engine.rounds.voting.clock
    assert clock.started is None, "one of three"
    peer.hear(TWO, replace(STANDS, leaving=True), 1.2)
    assert clock.started == 1.2, "one of two"


def test_who_sleeps_in_an_open_round_notices_and_hears_the_others_before_it_forks() -> None:
    """They said that they would be silent for long, so it says little too, and stands still until all seem dead."""
    peer, now = Peer(ONE, parts=2), 1.0
    peer.engine.rounds.timing = Timing(interval=Pace((60.0,) * 3))
    for other in (LEAD, TWO):
        peer.hear(other, replace(STANDS, pause=60_000), now)
        peer.hear(other, Offer(offer_of(other, HEAD).encoded), now)
    assert peer.engine.rounds.voting.clock.started == now
    while (wake := peer.engine.next_wake(now)) < 20:
        assert wake <= now + 3, "a sleep would not be noticed"
        now = wake
        peer.engine.tick(now)
        peer.drain()
    for late in (300.0, 303.0):
        peer.engine.tick(late)
        peer.drain()
        assert peer.engine.head == HEAD
    now = 303.0
    while peer.engine.head == HEAD:
        now = peer.engine.next_wake(now)
        assert now < 1000, "nobody came: it goes on in the end"
        peer.engine.tick(now)
        peer.drain()
    assert now > 310


def test_an_owner_looks_again_when_a_link_is_gone() -> None:
    owners = owners_of(OWNER)
    owners.on_share(share_of(OWNER))
    owners.collector.clock.contributors = frozenset({OWNER.peer_id, SHARER.peer_id})
    due = owners.due_at(Timing(), 1, 1.0)
    assert due is not None and due > 1.0
    del owners._outbox.links[SHARER.peer_id]
    assert owners.due_at(Timing(), 1, 1.01) == due, "worked out a moment ago"
    owners.look_again()
    again = owners.due_at(Timing(), 1, 1.01)
    assert again is not None and again <= 1.01


def test_when_no_state_can_be_fetched_the_gap_is_replayed_at_once() -> None:
    peer = Peer(ONE)
    gap = grown(REPLAY_ROUNDS_MAX + 2, head=HEAD)
    last = gap[-1][0].record
    peer.hear(TWO, replace(STANDS, head=last.hash, round=last.round, tokens=last.tokens), 1.0)
    peer.hear(TWO, Log(HEAD.hash, last.round, tuple(entry for entry, _ in gap)), 1.1)
    assert peer.engine.catch_up.wants_snapshot(peer.engine.chain)
    assert not peer.engine._fetcher
    peer.engine.snapshot_failed(1.2)
    assert peer.engine._fetcher
