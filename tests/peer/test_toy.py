"""The toy learner, whose units can be counted: what is said is subtracted once; the ledger sees every mistake."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.contribution import Contribution, sign_contribution
from averaging.record import Hash
from peer.learner import Own
from simulator.ledger import BooksWrong
from simulator.toy import Ledger, ToyLearner, ToySigner, payload_of, units_of

ME, OTHER = ToySigner(0), ToySigner(1)
NOTHING_SAID = payload_of([])


def never() -> bool:
    return False


def contribution(signer: ToySigner, payload: bytes) -> Contribution:
    return sign_contribution(signer, Hash(bytes(32)), 10, bytes(16), True, payload)


def train_and_pack(learner: ToyLearner) -> bytes:
    learner.train(0, never)
    return learner.pack(0)


def test_what_a_round_merged_is_no_longer_wanted_and_the_rest_stays() -> None:
    learner = Ledger().learner(ME.peer_id)
    train_and_pack(learner)
    learner.apply(1, [], Own.MISSED)
    payload = train_and_pack(learner)
    assert units_of(payload) == set(range(16))
    learner.apply(2, [contribution(ME, payload)], Own.SAID)
    assert learner.waiting() == set(range(16, 20))


def test_what_missed_its_round_is_said_again() -> None:
    learner = Ledger().learner(ME.peer_id)
    payload = train_and_pack(learner)
    learner.apply(1, [contribution(OTHER, NOTHING_SAID)], Own.MISSED)
    assert learner.waiting() == units_of(payload)


def test_a_round_of_no_concern_changes_nothing_that_waits() -> None:
    learner = Ledger().learner(ME.peer_id)
    train_and_pack(learner)
    learner.apply(1, [], Own.MISSED)
    payload = train_and_pack(learner)
    learner.apply(2, [contribution(OTHER, NOTHING_SAID)], Own.NOTHING)
    learner.apply(3, [contribution(ME, payload)], Own.SAID)
    assert learner.waiting() == set(range(16, 20))


def test_what_an_earlier_process_offered_is_dropped_and_not_subtracted() -> None:
    ledger = Ledger()
    before = ledger.learner(ME.peer_id)
    saved = before.dump()
    old = train_and_pack(before)
    after = ledger.learner(ME.peer_id)
    after.load(saved, own=True)
    train_and_pack(after)
    after.apply(2, [contribution(ME, old)], Own.FORGOTTEN)
    assert not after.waiting()


def test_a_fetched_state_keeps_what_was_wanted_and_what_it_stands_for_is_not_said_again() -> None:
    ledger = Ledger()
    donor, learner = ledger.learner(OTHER.peer_id), ledger.learner(ME.peer_id)
    payload = train_and_pack(learner)
    learner.load(donor.dump(shared_only=True), own=False)
    assert learner.waiting() == units_of(payload)
    donor.apply(1, [contribution(ME, payload)], Own.NOTHING)
    learner.load(donor.dump(shared_only=True), own=False)
    learner.move([], [payload])
    assert learner.waiting() == set()
    learner.check_left(crashed=False)


def test_a_move_says_again_what_only_the_old_chain_heard_and_not_what_the_new_one_did() -> None:
    ledger = Ledger()
    learner = ledger.learner(ME.peer_id)
    start = learner.dump(shared_only=True)
    said = [train_and_pack(learner)]
    learner.apply(1, [contribution(ME, said[0])], Own.SAID)
    said.append(train_and_pack(learner))
    learner.apply(2, [contribution(ME, said[1])], Own.SAID)
    assert not learner.waiting()
    learner.load(start, own=False)
    learner.move(said, [])
    assert learner.waiting() == set(range(20))
    learner.move([], [said[1]])
    assert learner.waiting() == units_of(said[0])
    learner.move([said[1]], None)
    assert learner.waiting() == units_of(said[1]), "what waited is gone, what was left is not"


def test_the_ledger_sees_what_is_merged_twice_or_was_never_made() -> None:
    ledger = Ledger()
    one, other, lead = (ledger.learner(peer) for peer in (ME.peer_id, ME.peer_id, OTHER.peer_id))
    payload = train_and_pack(one)
    merged = [contribution(ME, payload)]
    one.apply(1, merged, Own.SAID)
    other.apply(1, merged, Own.NOTHING)  # Somebody else comes to the same state.
    with pytest.raises(BooksWrong, match="again"):
        other.apply(2, [contribution(ME, payload_of([3]))], Own.NOTHING)
    with pytest.raises(BooksWrong, match="never made"):
        lead.apply(1, [contribution(OTHER, payload)], Own.NOTHING)
    lead.apply(1, [contribution(ME, payload_of([3]))], Own.NOTHING)  # Another chain has it once, too.


def test_at_its_end_a_peer_has_said_or_kept_all_that_it_made() -> None:
    ledger = Ledger()
    learner = ledger.learner(ME.peer_id)
    start = learner.dump(shared_only=True)
    payload = train_and_pack(learner)
    learner.check_left(crashed=False)
    learner.apply(1, [contribution(ME, payload)], Own.NOTHING)
    with pytest.raises(BooksWrong):
        learner.check_left(crashed=False)
    learner.move([], [payload])
    learner.check_left(crashed=False)
    learner.load(start, own=False)  # A chain that never heard of it.
    with pytest.raises(BooksWrong):
        learner.check_left(crashed=False)
    lossy = ledger.learner(OTHER.peer_id)
    train_and_pack(lossy)
    lossy.move([], None)
    with pytest.raises(BooksWrong, match="vanished"):
        lossy.check_left(crashed=False)
    lossy.check_left(crashed=True)


def test_what_is_wanted_twice_or_subtracted_without_having_been_wanted_is_seen() -> None:
    learner = Ledger().learner(ME.peer_id)
    payload = train_and_pack(learner)
    with pytest.raises(BooksWrong, match="already"):
        learner.move([payload], [])
    with pytest.raises(BooksWrong, match="did not want"):
        learner.move([], [payload_of([99])])


@given(st.binary(max_size=40))
def test_any_toy_payload_is_refused_or_merged(payload: bytes) -> None:
    learner = ToyLearner(ME.peer_id)
    try:
        learner.check(payload)
    except ValueError:
        return
    units_of(payload)


def test_what_is_no_list_of_units_is_refused() -> None:
    for bad in (b"", msgpack.packb(7), msgpack.packb([-1]), msgpack.packb(["1"]), msgpack.packb([True])):
        with pytest.raises(ValueError):
            ToyLearner(ME.peer_id).check(bad)
