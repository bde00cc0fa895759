"""Going on without a quorum (R8): who may, when, one after the other, and more slowly the more are missing."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.forks import CAUTION_MAX, CAUTION_ROUNDS, PATIENCE, Recovery, stall_seconds
from averaging.instance import is_certified
from averaging.outbox import Link, Outbox
from averaging.record import RECOVERY, Hash, Record, sha256
from averaging.round_clock import RoundClock
from averaging.timing import Pace, Timing, TimingConfig
from simulator.toy import ToySigner
from tests.averaging.strategies import BASE, SIGNERS, child_of, first, grown, offer_of, signer_of

CONFIG = TimingConfig()
TIMING = Timing(interval=Pace((20.0,) * 3), decide=Pace((0.5,) * 3))
USUAL = TIMING.interval.high
HEAD = first(4)
LEAD = signer_of(HEAD.lead)
FOLLOWERS = [s for s in SIGNERS[:4] if s is not LEAD]
ME = FOLLOWERS[0]
STRANGER = SIGNERS[7]
STARTED = 10.0
LATER = 1e6
"""Long after every deadline."""


def watch(
    here: Sequence[ToySigner],
    me: ToySigner = ME,
    head: Record = HEAD,
    share_min: float = 0.0,
    now: float = 0.0,
    chain: Container[Hash] = (),
) -> Recovery:
    """`me` among those that are `here`: linked since long, standing at `head`, and just heard."""
    outbox = Outbox(me.peer_id, CONFIG.silence_seconds)
    for signer in here:
        if signer is not me:
            outbox.links[signer.peer_id] = Link(up=-100.0, heard=LATER, sent=0.0, head=head.hash)
    return Recovery(me, outbox, CONFIG, share_min, now, chain)


def clock_of(started: float | None) -> RoundClock:
    return RoundClock(0.0, frozenset(), started=started)


def due(recovery: Recovery, head: Record = HEAD, started: float | None = STARTED, now: float = 0.0) -> float | None:
    return recovery.due_at(head, clock_of(started), TIMING, now)


def wait_of(recovery: Recovery, head: Record = HEAD) -> float:
    """Without what the turns of the survivors before this peer take."""
    at = due(recovery, head)
    assert at is not None
    return at - STARTED - turns_before(recovery, head) * turn()


def turn() -> float:
    return max(8 * CONFIG.delay_seconds_min, 4 * TIMING.decide.high)


def turns_before(recovery: Recovery, head: Record = HEAD) -> int:
    order = sorted(recovery.survivors(head, 0.0), key=lambda p: sha256(head.hash + p.encode()))
    return order.index(recovery._me)


# How long.

shares = st.floats(0.001, 1.0)
paces = st.builds(Pace, st.lists(st.floats(0, 1e5), max_size=7).map(tuple))


@given(paces, st.floats(0, 1e5), shares, shares)
def test_the_more_are_missing_the_longer_a_stall_lasts(pace: Pace, length: float, one: float, other: float) -> None:
    timing = Timing(interval=pace)
    fewer, more = sorted([one, other])
    long, short = (stall_seconds(timing, CONFIG, length, share) for share in (fewer, more))
    assert long >= short >= 2 * CONFIG.silence_seconds
    if fewer < 0.99 * more and fewer > 0.04:
        assert long > short


def test_a_stall_is_about_a_round_and_twice_as_long_for_each_who_is_missing_beside_each_who_is_here() -> None:
    assert USUAL == 30.0
    waits = [stall_seconds(TIMING, CONFIG, 0.0, share) for share in (1.0, 1 / 2, 1 / 3, 1 / 4)]
    assert waits == pytest.approx([USUAL, 2 * USUAL, 4 * USUAL, 8 * USUAL])
    assert stall_seconds(Timing(), CONFIG, 77.0, 1.0) == 77.0, "nothing is learnt yet: the round itself says"
    assert stall_seconds(Timing(), CONFIG, 0.0, 1.0) == 2 * CONFIG.silence_seconds
    assert stall_seconds(TIMING, CONFIG, 0.0, 1 / 64) > 30 * 86400, "one of 64 practically never goes on alone"


def test_the_wait_runs_from_when_enough_had_offered() -> None:
    recovery = watch(FOLLOWERS[:2])
    assert wait_of(recovery) == pytest.approx(2 * USUAL)
    one, other = due(recovery), due(recovery, started=STARTED + 5)
    assert one is not None and other is not None
    assert other - one == pytest.approx(5.0)
    assert due(recovery, started=None) is None, "nobody trains here: nothing is stalled"


def test_who_hears_a_quorum_waits_longer_for_it_may_just_be_slow() -> None:
    assert wait_of(watch(FOLLOWERS)) == pytest.approx(PATIENCE * wait_of(watch([ME])) * 2 ** (1 / 3 - 3))
    with_lead = wait_of(watch([ME, LEAD]))
    without = wait_of(watch(FOLLOWERS[:2]))
    assert HEAD.is_quorum({ME.peer_id, LEAD.peer_id})
    assert with_lead == pytest.approx(PATIENCE * without)


def test_who_is_behind_is_neither_missing_nor_slow() -> None:
    """All died, and one alone had written the last round: nobody else can come to its head before it goes on."""
    older, elsewhere = HEAD.prev, sha256(b"of another chain")
    alone = watch([ME])
    recovery = watch(SIGNERS[:4], chain={older, HEAD.hash})
    assert recovery.survivors(HEAD, 0.0) == sorted(s.peer_id for s in SIGNERS[:4])
    assert not recovery.lacks_quorum(HEAD, clock_of(STARTED), 0.0)
    links = recovery._outbox.links
    for link in links.values():
        link.head, link.said = older, STARTED - 1
    assert wait_of(recovery) == pytest.approx(8 * USUAL * PATIENCE), "where they stood before says nothing"
    for link in links.values():
        link.said = STARTED
    assert recovery.survivors(HEAD, 0.0) == [ME.peer_id]
    assert recovery.lacks_quorum(HEAD, clock_of(STARTED), 0.0)
    assert wait_of(recovery) == pytest.approx(USUAL)
    assert wait_of(alone) == pytest.approx(8 * USUAL)
    for link in links.values():
        link.head = elsewhere
    assert wait_of(recovery) == pytest.approx(8 * USUAL * PATIENCE), "they may be on a chain of their own"
    for link in links.values():
        link.head, link.heard = older, -CONFIG.silence_seconds - 1
    assert wait_of(recovery) == pytest.approx(8 * USUAL), "they are gone"


def test_too_few_contributions_are_a_stall_only_where_somebody_cannot_come() -> None:
    recovery = watch(SIGNERS[:4], chain={HEAD.prev, HEAD.hash})
    training, waiting = clock_of(None), replace(clock_of(None), spoke=STARTED)
    assert recovery.due_at(HEAD, waiting, TIMING, 0.0) is None
    for link in recovery._outbox.links.values():
        link.head, link.said = HEAD.prev, STARTED
    assert recovery.due_at(HEAD, training, TIMING, 0.0) is None
    assert recovery.due_at(HEAD, waiting, TIMING, 0.0) == due(recovery)


def test_who_waits_in_vain_for_contributions_follows_whoever_went_on() -> None:
    recovery, waiting = watch(SIGNERS[:4]), replace(clock_of(None), spoke=STARTED)
    at = due(recovery)
    assert at is not None
    assert not recovery.is_stalled(HEAD, waiting, TIMING, at - 0.1)
    assert recovery.is_stalled(HEAD, waiting, TIMING, at)
    assert not recovery.is_stalled(HEAD, clock_of(None), TIMING, at), "it trains"


def test_a_group_that_may_not_shrink_goes_on_with_those_who_are_behind() -> None:
    recovery = watch(SIGNERS[:4], share_min=1.0, chain={HEAD.prev, HEAD.hash})
    for link in recovery._outbox.links.values():
        link.head, link.said = HEAD.prev, STARTED
    assert due(recovery) is not None
    next(iter(recovery._outbox.links.values())).heard = -CONFIG.silence_seconds - 1
    assert due(recovery) is None


# Who.


def test_survivors_stand_at_the_head_are_heard_and_named() -> None:
    elsewhere, silent, leaving = SIGNERS[:4][1:4]
    me = SIGNERS[0]
    recovery = watch([*SIGNERS[:4], STRANGER], me)
    links = recovery._outbox.links
    assert recovery.survivors(HEAD, 0.0) == sorted(s.peer_id for s in SIGNERS[:4])
    links[elsewhere.peer_id].head = grown(1)[0][0].record.hash
    links[silent.peer_id].heard = -CONFIG.silence_seconds - 1
    links[leaving.peer_id].leaving = True
    assert recovery.survivors(HEAD, 0.0) == [me.peer_id]
    recovery._outbox.leaving = True
    assert me.peer_id not in recovery.survivors(HEAD, 0.0)


def test_only_if_none_of_those_named_is_here_do_others_go_on() -> None:
    recovery = watch([STRANGER, SIGNERS[8]], STRANGER)
    assert recovery.survivors(HEAD, 0.0) == sorted([STRANGER.peer_id, SIGNERS[8].peer_id])
    assert due(recovery) is not None
    with_one_of_them = watch([STRANGER, ME], STRANGER)
    assert with_one_of_them.survivors(HEAD, 0.0) == [ME.peer_id]
    assert due(with_one_of_them) is None


def test_who_is_not_of_the_last_round_waits_longer() -> None:
    assert wait_of(watch([STRANGER, SIGNERS[8]], STRANGER)) == pytest.approx(PATIENCE * wait_of(watch(FOLLOWERS[:2])))


def test_who_is_leaving_makes_no_forks() -> None:
    recovery = watch(FOLLOWERS)
    recovery._outbox.leaving = True
    assert due(recovery, now=LATER) is None


@pytest.mark.parametrize("here", [1, 2, 3, 4])
def test_a_smaller_share_than_the_run_lets_go_on_never_does(here: int) -> None:
    for share_min in (0.0, 0.25, 0.5, 0.75, 1.0):
        recovery = watch([*FOLLOWERS, LEAD][:here], share_min=share_min)
        assert (due(recovery) is None) == (here / 4 < share_min)


def test_a_contributor_counts_among_those_named() -> None:
    """Half of the voters are a third of those named."""
    head = child_of(HEAD, [offer_of(s, HEAD, willing=s in SIGNERS[:2]) for s in SIGNERS[:3]])
    assert len(head.voters) == 2 and len(head.peers) == 3
    follower = next(s for s in SIGNERS[:2] if s.peer_id != head.lead)
    assert due(watch([follower], follower, head, share_min=0.4), head) is None
    assert due(watch([SIGNERS[2]], SIGNERS[2], head, share_min=0.3), head) is not None


def test_the_last_one_without_any_link_goes_on_too() -> None:
    at = due(watch([ME]), now=LATER)
    assert at is not None and at < LATER


# One after the other.


def test_survivors_take_turns_so_that_one_is_followed() -> None:
    for here in (FOLLOWERS[:2], FOLLOWERS, [*FOLLOWERS, LEAD]):
        times = [due(watch(here, me)) for me in here]
        known = sorted(at for at in times if at is not None)
        assert len(known) == len(here)
        assert [b - a for a, b in itertools.pairwise(known)] == pytest.approx([turn()] * (len(here) - 1))
        assert sorted(turns_before(watch(here, me)) for me in here) == list(range(len(here)))


def test_another_head_gives_another_order() -> None:
    heads = [HEAD, *(entry.record for entry, _ in grown(20, 4))]
    firsts = {next(m for m in FOLLOWERS if turns_before(watch(FOLLOWERS, m, head), head) == 0) for head in heads}
    assert firsts == set(FOLLOWERS)


# After a sleep, after a needless fork.


def test_who_slept_waits_anew() -> None:
    recovery, training = watch(FOLLOWERS[:2]), clock_of(None)
    before = due(recovery)
    assert before is not None
    recovery.awake(0.0, 4000.0, training)
    recovery.awake(4002.0, 8000.0, training)
    assert due(recovery) == before, "there was nothing to do, and that was known"
    recovery.awake(9000.0, 9000.0, training)
    after = due(recovery)
    assert after is not None and after - before == pytest.approx(9000.0 - STARTED)


def test_a_sleep_is_noticed_though_nothing_had_to_be_said() -> None:
    recovery, stalled = watch(FOLLOWERS[:2]), clock_of(STARTED)
    before, now = due(recovery), 0.0
    assert before is not None
    recovery.awake(now, 4000.0, stalled)
    for _ in range(10):
        again = recovery.look_again_at(stalled)
        assert again is not None and max(now, STARTED) < again < before
        now = again
        recovery.awake(now, 4000.0, stalled)
    assert due(recovery) == before, "no gap: the clock ran on"
    now = before + 1
    recovery.awake(now, 4000.0, stalled)
    after = due(recovery)
    assert after is not None and after - before == pytest.approx(now - STARTED)


def test_who_has_just_come_back_is_heard_out_first() -> None:
    recovery = watch(FOLLOWERS[:2])
    at = due(recovery)
    assert at is not None
    for link in recovery._outbox.links.values():
        link.up = at - 1.0
    assert due(recovery) == at - 1.0 + CONFIG.silence_seconds


def test_each_fork_that_was_given_up_doubles_the_next_wait_up_to_a_limit_until_it_is_forgotten() -> None:
    recovery = watch(FOLLOWERS[:2])
    usual = wait_of(recovery)
    waits = []
    for _ in range(CAUTION_MAX + 3):
        recovery.healed(0)
        waits.append(wait_of(recovery))
    doubled = [usual * 2.0**n for n in range(1, CAUTION_MAX + 1)]
    assert waits == pytest.approx([*doubled, *[doubled[-1]] * 3])
    heads = [entry.record for entry, _ in grown(CAUTION_ROUNDS + 1, 4)]
    remembered, forgotten = heads[-2], heads[-1]
    assert remembered.round == CAUTION_ROUNDS
    at_remembered = watch(FOLLOWERS[:2], head=remembered)
    at_remembered.healed(0)
    assert wait_of(at_remembered, remembered) == pytest.approx(2 * usual)
    at_forgotten = watch(FOLLOWERS[:2], head=forgotten)
    at_forgotten.healed(0)
    assert wait_of(at_forgotten, forgotten) == pytest.approx(usual)


# Following others' recoveries.


def test_without_a_quorum_anybodys_recovery_is_followed_at_once_and_with_one_only_when_ones_own_is_due() -> None:
    clock = RoundClock(0.0, frozenset(), started=STARTED)
    assert watch(FOLLOWERS[:2]).is_stalled(HEAD, clock, TIMING, 0.0)
    assert watch([STRANGER], STRANGER).is_stalled(HEAD, clock, TIMING, 0.0)
    quorum = watch([ME, LEAD])
    assert not quorum.is_stalled(HEAD, clock, TIMING, STARTED)
    at = due(quorum)
    assert at is not None and quorum.is_stalled(HEAD, clock, TIMING, at)
    assert not quorum.is_stalled(HEAD, replace(clock, started=None), TIMING, at)


# The record.


@given(st.sets(st.sampled_from(FOLLOWERS), min_size=1), st.data())
def test_what_is_minted_names_the_survivors_adds_nothing_and_convinces_everybody(
    here: set[ToySigner], data: st.DataObject
) -> None:
    me = data.draw(st.sampled_from(sorted(here, key=lambda s: s.peer_id)))
    head = grown(1, 4)[0][0].record
    record, certificate = watch(sorted(here, key=lambda s: s.peer_id), me, head).mint(head, BASE, 0.0)
    assert (record.kind, record.prev, record.round) == (RECOVERY, head.hash, head.round + 1)
    assert record.voters == tuple(sorted(s.peer_id for s in here))
    assert (record.origin, record.lead) == (me.peer_id, me.peer_id)
    assert (record.members, record.tokens, record.base) == ((), head.tokens, BASE)
    assert is_certified(head, record, certificate, STRANGER)


def test_whoever_may_not_go_on_mints_nothing() -> None:
    with pytest.raises(AssertionError):
        watch([STRANGER, ME], STRANGER).mint(HEAD, BASE, 0.0)


def test_what_a_peer_will_do_is_said_in_words() -> None:
    clock = RoundClock(0.0, frozenset(), started=STARTED)

    def words(recovery: Recovery, clock: RoundClock = clock) -> str:
        return recovery.situation(HEAD, clock, TIMING, 0.0)

    assert "waits for those who are" in words(watch([STRANGER, ME], STRANGER))
    assert "no fewer than 0.75" in words(watch(FOLLOWERS[:2], share_min=0.75))
    assert "not known yet" in words(watch(FOLLOWERS[:2]), RoundClock(0.0, frozenset()))
    recovery = watch(FOLLOWERS[:2])
    assert f"2 of 4 go on in {due(recovery):.0f} s" in words(recovery)
