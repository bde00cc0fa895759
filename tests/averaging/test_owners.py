"""Reducing by owners: who owns what, which shares are taken, and who votes and owns in the next round."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.contribution import sign_contribution
from averaging.instance import Instance, Vote
from averaging.owners import (
    PARTS_MAX,
    RECENT_ROUNDS,
    Owners,
    encode_parts,
    owned_parts,
    owner_of,
    parse_parts,
)
from averaging.record import GENESIS, Malformed, Record, parse_record, sha256
from averaging.timing import Timing, TimingConfig, start_patience
from simulator.toy import ToySigner
from tests.averaging.owning import (
    CONFIG,
    HEAD,
    OTHER_BASE,
    OTHER_OWNER,
    OWNER,
    PARTS,
    SHARER,
    VOTERS,
    owners_of,
    share_of,
)
from tests.averaging.strategies import BASE, SIGNERS

many_voters = st.sets(st.integers(0, 39), min_size=1, max_size=12)


def voted_by(numbers: set[int]) -> Record:
    voters = tuple(sorted(ToySigner(number).peer_id for number in numbers))
    return Record(GENESIS, sha256(b"run"), 0, voters[0], 0, (), voters, BASE, 0)


# Who owns what.


@given(many_voters)
def test_every_part_has_one_owner_and_it_votes(numbers: set[int]) -> None:
    head = voted_by(numbers)
    assert sorted(p for v in head.voters for p in owned_parts(head, v, PARTS)) == list(range(PARTS))


def test_few_parts_move_beside_those_of_who_goes() -> None:
    """With bounded loads some must; without hashing, nearly all would."""
    moved = lost = 0
    for seed in range(20):
        voters = set(range(20 * seed, 20 * seed + 9))
        one, other, who = voted_by(voters), voted_by(voters - {20 * seed}), ToySigner(20 * seed).peer_id
        lost += len(owned_parts(one, who, 64))
        moved += sum(owner_of(one, part, 64) != owner_of(other, part, 64) for part in range(64))
    assert lost <= moved < 3 * lost


@given(many_voters, st.integers(1, 64))
def test_parts_spread_evenly_over_the_voters(numbers: set[int], parts: int) -> None:
    head = voted_by(numbers)
    counts = [len(owned_parts(head, voter, parts)) for voter in head.voters]
    assert sum(counts) == parts
    assert max(counts) == -(-parts // len(counts))


# Payloads.

packets = st.dictionaries(st.integers(0, PARTS_MAX - 1), st.binary(max_size=20), max_size=8)


@given(packets)
def test_parts_go_there_and_back(parts: dict[int, bytes]) -> None:
    assert parse_parts(encode_parts(parts)) == parts


@pytest.mark.parametrize(
    "fields",
    [
        7,
        {},
        [7],
        [[0]],
        [[0, b"x", 1]],
        [["0", b"x"]],
        [[True, b"x"]],
        [[-1, b"x"]],
        [[PARTS_MAX, b"x"]],
        [[0, "x"]],
        [[0, None]],
        [[1, b"x"], [0, b"y"]],
        [[0, b"x"], [0, b"y"]],
        [[part, b""] for part in [*range(PARTS_MAX), 0]],
    ],
)
def test_what_is_no_list_of_sorted_parts_is_malformed(fields: object) -> None:
    with pytest.raises(Malformed):
        parse_parts(msgpack.packb(fields))


@given(st.binary(max_size=60))
def test_any_bytes_are_parts_or_malformed(data: bytes) -> None:
    try:
        parts = parse_parts(data)
    except Malformed:
        return
    assert list(parts) == sorted(parts)


# What an owner collects.


def test_a_newer_share_of_the_same_peer_takes_the_place_of_its_older() -> None:
    owners = owners_of(OWNER)
    older, newer = share_of(SHARER), replace(share_of(SHARER), weight=20)
    assert owners.on_share(older) and owners.on_share(newer)
    assert owners.close().shares == (newer,)


def test_no_share_is_taken_after_the_owner_has_closed() -> None:
    owners = owners_of(OWNER)
    owners.on_share(share_of(SIGNERS[3]))
    closed = owners.close()
    assert not owners.on_share(share_of(SHARER))
    assert [share.owner for share in closed.shares] == [SIGNERS[3].peer_id]
    assert owners.collector.usable() == list(closed.shares)
    assert owners.due_at(Timing(), 1, 100.0) is None, "it merges once a round"


def test_shares_are_merged_in_peer_id_order_and_those_of_another_state_are_not() -> None:
    owners = owners_of(OWNER)
    for signer in reversed(SIGNERS[:5]):
        owners.on_share(share_of(signer, base=OTHER_BASE if signer is SIGNERS[2] else BASE))
    merged = [share.owner for share in owners.close().shares]
    assert merged == sorted(s.peer_id for s in SIGNERS[:5] if s is not SIGNERS[2])


def test_a_share_of_parts_that_this_peer_does_not_own_is_refused() -> None:
    owners = owners_of(OWNER)
    for wrong in (share_of(SHARER, OTHER_OWNER), replace(share_of(SHARER), payload=encode_parts({}))):
        with pytest.raises(Malformed):
            owners.on_share(wrong)
    assert not owners.collector.shares


def test_who_owns_nothing_never_merges() -> None:
    owners = owners_of(SHARER)
    assert owners.owned == []
    assert owners.due_at(Timing(), 1, 0.0) is None


def test_an_owner_waits_for_those_who_shared_lately_and_are_heard() -> None:
    owners = owners_of(OWNER)
    owners._owning_since = -RECENT_ROUNDS
    for signer in SIGNERS[3:5]:
        owners.on_share(share_of(signer))
    owners.begin(HEAD, 10.0)
    owners.collector.base = BASE
    owners.on_share(share_of(SIGNERS[3]))
    for signer in SIGNERS[3:5]:
        owners._outbox.links[signer.peer_id].heard = 10.0
    due = owners.due_at(Timing(), 1, 10.0)
    assert due is not None and due > 10.0, "one of two is there"
    owners.on_share(share_of(SIGNERS[4]))
    assert owners.due_at(Timing(), 1, 10.0) == 10.0, "both are"


def test_a_new_owner_waits_for_those_who_stand_where_it_stands() -> None:
    """Nobody has shared with it yet: it would close on its own share, and leave out everybody else's."""
    owners = owners_of(OWNER)
    here, behind, elsewhere = SIGNERS[3:5], SIGNERS[5], next(s for s in VOTERS if s is not OWNER)
    for signer in here:
        owners._outbox.links[signer.peer_id].head = HEAD.hash
    owners._outbox.links[elsewhere.peer_id].head = sha256(b"another")
    assert owners._outbox.links[behind.peer_id].head is None
    owners.on_share(share_of(OWNER))
    assert owners.due_at(Timing(), 1, 1.0) == 1.0 + start_patience(Timing(), TimingConfig()), "one of three"
    owners.on_share(share_of(here[0]))
    due = owners.due_at(Timing(), 1, 1.0)
    assert due is not None and due > 1.0, "two of three"
    owners.on_share(share_of(here[1]))
    assert owners.due_at(Timing(), 1, 1.0) == 1.0, "all three"
    for number in range(1, RECENT_ROUNDS + 1):
        head = replace(HEAD, round=number)
        owners.begin(head, 2.0)
        owners._outbox.links[here[1].peer_id].head = head.hash
        owners.collector.base = BASE
        owners.due_at(Timing(), 1, 2.0)
        is_expected = here[1].peer_id in owners.collector.clock.contributors
        assert is_expected == (number < RECENT_ROUNDS), "later only those who shared lately"
        owners.collector.shares.clear()
        owners._recent.clear()


def test_who_shared_in_none_of_the_last_rounds_is_not_waited_for() -> None:
    owners = owners_of(OWNER)
    owners.on_share(share_of(SHARER))
    head = HEAD
    for number in range(1, RECENT_ROUNDS + 2):
        head = replace(HEAD, round=number)
        owners.begin(head, float(number))
        assert (SHARER.peer_id in owners.collector.clock.contributors) == (number <= RECENT_ROUNDS)


# Who votes and who owns next.


def crowded(willing: set[int], alive: set[int], parts: int = PARTS, number: int = 12) -> tuple[Owners, list[ToySigner]]:
    """An owner with which a crowd has shared."""
    crowd = [ToySigner(100 + n) for n in range(number)]
    owners = owners_of(OWNER, [*SIGNERS[:6], *(crowd[n] for n in alive)])
    owners.parts = parts
    for n, signer in enumerate(crowd):
        owners.collector.shares[signer.peer_id] = replace(share_of(signer), willing=n in willing)
    return owners, crowd


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11), min_size=1, max_size=3))
def test_voters_are_likely_or_willing_and_alive_and_no_more_than_there_is_room(
    willing: set[int], alive: set[int], likely: set[int]
) -> None:
    owners, crowd = crowded(willing, alive)
    voters, owning = owners.assemble([crowd[n].peer_id for n in likely], 0.0)
    able = {crowd[n].peer_id for n in (willing & alive) | likely}
    assert set(voters) <= able and not owning
    assert len(voters) == len(set(voters)) == min(CONFIG.voters_max, len(able))


def test_who_votes_goes_on_voting() -> None:
    owners, _ = crowded(set(range(12)), set(range(12)))
    voters, _ = owners.assemble(HEAD.voters, 0.0)
    assert set(HEAD.voters) < set(voters)


@pytest.mark.parametrize(
    ("number", "parts", "owning"), [(40, 64, 0), (80, 64, 10), (80, 8, 8), (80, 4, 0), (17, 64, 0)]
)
def test_owners_grow_with_the_group_and_voters_do_not(number: int, parts: int, owning: int) -> None:
    everybody = set(range(number))
    owners, _ = crowded(everybody, everybody, parts, number)
    voters, chosen = owners.assemble(HEAD.voters, 0.0)
    assert len(voters) == CONFIG.voters_max
    assert len(chosen) == owning
    assert not chosen or set(voters) < set(chosen)


def test_who_owns_goes_on_owning() -> None:
    everybody = set(range(80))
    owners, _ = crowded(everybody, everybody, 64, 80)
    voters, chosen = owners.assemble(HEAD.voters, 0.0)
    owners.head = replace(HEAD, voters=tuple(sorted(voters)), owners=tuple(sorted(chosen)), round=1)
    again, same = owners.assemble(voters, 0.0)
    assert (set(again), set(same)) == (set(voters), set(chosen))


def test_a_record_names_voters_and_owners_in_order() -> None:
    everybody = set(range(80))
    owners, _ = crowded(everybody, everybody, 64, 80)
    instance = Instance(HEAD, Vote())
    instance.base, instance.may_recruit = BASE, True
    instance.hold(sign_contribution(OWNER, HEAD.hash, 10, BASE, True, b"x"))
    record = instance.fresh(OWNER.peer_id, 0, lambda p: True, lambda v: owners.assemble(v, 0.0))
    assert len(record.voters) == CONFIG.voters_max and len(record.owners) == 10
    assert parse_record(record.encoded) == record
    assert instance.flaw(record) is None
    assert record.peers >= set(record.owners)
    assert {owner_of(record, part, 64) for part in range(64)} == set(record.owners)
    instance.may_recruit = False
    assert instance.flaw(replace(record, voters=(OWNER.peer_id,))) is not None
