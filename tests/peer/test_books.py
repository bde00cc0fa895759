"""What a peer has said and to whom it still owes what, through commits, forks, jumps and restarts: nothing twice."""

from __future__ import annotations

import msgpack

from averaging.chain import Left
from averaging.contribution import Contribution, parse_contribution, sign_contribution
from averaging.following import Moved
from averaging.record import Hash, Record
from peer.books import Books
from peer.learner import Own
from tests.averaging.strategies import BASE, SIGNERS, child_of, first, offer_of, recovery_of

ME, OTHER = SIGNERS[0], SIGNERS[1]
HEAD = first(2)


def said_on(head: Record, payload: bytes = b"mine", weight: int = 10) -> Contribution:
    return sign_contribution(ME, head.hash, weight, BASE, True, payload)


def others(head: Record) -> Contribution:
    return offer_of(OTHER, head)


def books(trained: int = 0, said: tuple[Contribution, ...] = (), bytes_max: int = 10**6) -> Books:
    fresh = Books(ME.peer_id, bytes_max, said)
    fresh.trained(trained)
    return fresh


def moved(left: tuple[Left, ...] = (), joined: tuple[Record, ...] = (), again: frozenset[Hash] = frozenset()) -> Moved:
    return Moved(left, joined, again)


# Round by round.


def test_what_was_said_and_committed_is_said() -> None:
    mine = said_on(HEAD)
    kept = books(trained=25)
    kept.offered(mine)
    assert kept.offered_on == HEAD.hash
    assert kept.committed(child_of(HEAD, [mine, others(HEAD)])) is Own.SAID
    assert kept.offered_on is None
    assert kept.pending_tokens == 15


def test_what_was_said_and_not_committed_is_missed_and_still_waits() -> None:
    kept = books(trained=10)
    kept.offered(said_on(HEAD))
    assert kept.committed(child_of(HEAD, [others(HEAD)])) is Own.MISSED
    assert kept.offered_on is None
    assert kept.pending_tokens == 10


def test_a_recovery_makes_an_offer_void_but_the_record_that_it_left_may_still_commit_it() -> None:
    mine = said_on(HEAD)
    kept = books(trained=10)
    kept.offered(mine)
    recovery = recovery_of(HEAD, [ME]).record
    assert kept.committed(recovery) is Own.MISSED
    kept.left([Left(recovery, None)])
    assert kept.committed(child_of(HEAD, [mine])) is Own.SAID
    assert kept.pending_tokens == 0


def test_a_round_on_which_nothing_was_offered_is_no_concern() -> None:
    kept = books(trained=10)
    record = child_of(HEAD, [others(HEAD)])
    assert kept.committed(record) is Own.NOTHING
    kept.offered(said_on(record))
    assert kept.committed(recovery_of(HEAD, [ME]).record) is Own.NOTHING
    assert kept.offered_on == record.hash
    assert kept.pending_tokens == 10


def test_an_offer_that_was_replaced_may_be_the_one_that_counts() -> None:
    earlier, later = said_on(HEAD, b"earlier", 10), said_on(HEAD, b"later", 30)
    kept = books(trained=30)
    kept.offered(earlier)
    kept.offered(later)
    assert kept.committed(child_of(HEAD, [earlier])) is Own.SAID
    assert kept.pending_tokens == 20


def test_what_an_earlier_process_offered_is_forgotten_unless_the_snapshot_remembers_it() -> None:
    mine = said_on(HEAD)
    record = child_of(HEAD, [mine])
    assert books().committed(record) is Own.FORGOTTEN
    assert books(said=(mine,)).committed(record) is Own.SAID


def test_tokens_never_fall_below_zero() -> None:
    kept = books(trained=3)
    assert kept.committed(child_of(HEAD, [said_on(HEAD, weight=10)])) is Own.FORGOTTEN
    assert kept.pending_tokens == 0


# What is remembered.


def read(remembered: bytes) -> list[Contribution]:
    return [parse_contribution(data, ME, 10**6) for data in msgpack.unpackb(remembered)]


def test_offers_that_may_yet_count_are_remembered_for_a_later_process() -> None:
    mine = said_on(HEAD)
    kept = books()
    kept.offered(mine)
    assert read(kept.remembered()) == [], "what is out now is not in the residual that is saved with it"
    kept.committed(recovery_of(HEAD, [ME]).record)
    assert read(kept.remembered()) == [mine]
    again = books(said=tuple(read(kept.remembered())))
    assert again.committed(child_of(HEAD, [mine])) is Own.SAID


def test_a_normal_record_ends_the_chances_of_all_other_offers_on_the_same() -> None:
    mine, other = said_on(HEAD, b"one"), said_on(HEAD, b"two")
    elsewhere = said_on(recovery_of(HEAD, [ME]).record)
    kept = books(said=(mine, other, elsewhere))
    kept.committed(child_of(HEAD, [mine]))
    assert read(kept.remembered()) == [elsewhere]


def test_of_many_offers_the_newest_are_remembered_as_far_as_their_bytes_allow() -> None:
    heads = [HEAD]
    for _ in range(4):
        heads.append(recovery_of(heads[-1], [ME]).record)
    offers = [said_on(head) for head in heads]
    kept = books(bytes_max=2 * len(offers[0].encoded) + 10)
    for offer in offers:
        kept.offered(offer)
    answers = [kept.committed(child_of(head, [offer])) for head, offer in zip(heads, offers, strict=True)]
    assert answers == [Own.FORGOTTEN] * 3 + [Own.SAID] * 2
    tiny = books(bytes_max=1)
    tiny.offered(offers[0])
    assert tiny.committed(child_of(HEAD, [offers[0]])) is Own.SAID, "the newest always is"


# Forks.


def test_what_was_said_on_the_chain_that_is_left_waits_again() -> None:
    recovery = recovery_of(HEAD, [ME]).record
    mine = said_on(recovery, weight=40)
    record = child_of(recovery, [mine])
    kept = books(trained=50)
    kept.offered(mine)
    assert kept.committed(record) is Own.SAID
    assert kept.pending_tokens == 10
    kept.offered(said_on(record))
    kept.left([Left(recovery, None), Left(record, mine)])
    assert kept.offered_on is None
    assert kept.pending_tokens == 50
    assert kept.committed(record) is Own.SAID, "should that chain prove the better one after all"
    assert kept.pending_tokens == 10


def test_what_is_left_and_no_longer_here_gives_no_tokens_back() -> None:
    record = child_of(HEAD, [said_on(HEAD, weight=40)])
    kept = books(trained=5)
    kept.left([Left(record, None)])
    assert kept.pending_tokens == 5
    assert kept.committed(record) is Own.FORGOTTEN


# Jumps.


def test_a_jump_over_what_was_said_gives_its_payloads() -> None:
    mine = said_on(HEAD, b"said", 10)
    one = child_of(HEAD, [mine, others(HEAD)])
    two = child_of(one, [others(one)])
    kept = books(trained=12)
    kept.offered(mine)
    assert kept.moved(moved(joined=(one, two))) == [b"said"]
    assert kept.pending_tokens == 2
    assert kept.offered_on is None


def test_a_jump_over_rounds_of_others_gives_none() -> None:
    kept = books(trained=12)
    kept.offered(said_on(HEAD))
    assert kept.moved(moved(joined=(child_of(HEAD, [others(HEAD)]),))) == []
    assert kept.pending_tokens == 12
    assert kept.offered_on is None, "it is void"


def test_a_jump_over_something_that_is_not_remembered_says_so() -> None:
    mine = said_on(HEAD, weight=10)
    one = child_of(HEAD, [mine])
    two = child_of(one, [said_on(one, weight=5)])
    kept = books(trained=20)
    kept.offered(mine)
    assert kept.moved(moved(joined=(one, two))) is None
    assert kept.pending_tokens == 5


def test_a_jump_to_another_chain_leaves_one_and_joins_the_other() -> None:
    recovery = recovery_of(HEAD, [ME]).record
    old, new = said_on(recovery, b"old", 30), said_on(HEAD, b"new", 20)
    left = child_of(recovery, [old])
    kept = books(trained=60, said=(new,))
    kept.offered(old)
    kept.committed(left)
    assert kept.pending_tokens == 30
    joined = child_of(HEAD, [new, others(HEAD)])
    assert kept.moved(moved((Left(recovery, None), Left(left, old)), (joined,))) == [b"new"]
    assert kept.pending_tokens == 40


def test_rounds_that_are_applied_once_more_to_a_fetched_state_are_not_counted_again() -> None:
    mine = said_on(HEAD, weight=10)
    one = child_of(HEAD, [mine])
    two = child_of(one, [said_on(one, weight=10)])
    three = child_of(two, [said_on(two, weight=10)])
    kept = books(trained=100)
    kept.offered(mine)
    assert kept.committed(one) is Own.SAID
    kept.committed(two)
    assert kept.pending_tokens == 80
    assert kept.moved(moved(again=frozenset({one.hash, two.hash}))) == []
    assert [kept.committed(record) for record in (one, two)] == [Own.NOTHING] * 2
    assert kept.pending_tokens == 80
    assert kept.committed(three) is Own.FORGOTTEN, "a new one counts"


def test_a_second_jump_over_rounds_that_were_to_be_applied_once_more_does_not_count_them_either() -> None:
    mine = said_on(HEAD, weight=10)
    one = child_of(HEAD, [mine])
    two = child_of(one, [others(one)])
    kept = books(trained=100)
    kept.offered(mine)
    kept.committed(one)
    kept.committed(two)
    kept.moved(moved(again=frozenset({one.hash, two.hash})))
    assert kept.moved(moved(joined=(one,))) == []
    assert kept.pending_tokens == 90
    assert kept.committed(two) is Own.NOTHING
    assert kept.committed(one) is Own.FORGOTTEN, "it was not among those that are still to come"


# By parts.


def by_parts(trained: int) -> Books:
    fresh = Books(ME.peer_id, 10**6, by_parts=True)
    fresh.trained(trained)
    return fresh


def test_parts_in_the_air_are_given_up_with_their_tokens_when_a_state_is_fetched() -> None:
    kept = by_parts(trained=10)
    kept.shared(HEAD, 10)
    kept.trained(4)
    kept.moved(moved(joined=(child_of(HEAD, [others(HEAD)]),)))
    assert kept.pending_tokens == 4, "owners may have merged the others: to claim them again would count them twice"
    assert kept.reduced(child_of(HEAD, [others(HEAD)]), None, 4) is None


def test_parts_in_the_air_are_given_up_with_their_tokens_when_the_chain_is_left() -> None:
    kept = by_parts(trained=10)
    kept.shared(HEAD, 10)
    kept.left(())
    assert kept.pending_tokens == 0
    kept.trained(3)
    kept.left(())
    assert kept.pending_tokens == 3, "nothing was in the air"
