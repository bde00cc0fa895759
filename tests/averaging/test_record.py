"""Records: one form in bytes, strangers' bytes refused by name, and quorums that always meet."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.record import (
    MEMBERS_MAX,
    NORMAL,
    Ballot,
    Certificate,
    Malformed,
    Record,
    encode_ballot,
    encode_certificate,
    genesis,
    parse_ballot,
    parse_certificate,
    parse_record,
    sha256,
)
from network.seam import PeerID
from tests.averaging.strategies import (
    BASE,
    SIGNERS,
    ballots,
    certificates,
    first,
    normals,
    peers,
    records,
    recoveries,
)


@given(records)
def test_a_record_goes_there_and_back(record: Record) -> None:
    parsed = parse_record(record.encoded)
    assert parsed == record
    assert parsed.hash == record.hash
    assert parsed.lead == record.lead


@given(records, st.data())
def test_changed_bytes_are_another_record_or_malformed(record: Record, data: st.DataObject) -> None:
    """No two encodings of one record: else one record had two names."""
    encoded = bytearray(record.encoded)
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        parsed = parse_record(bytes(encoded))
    except Malformed:
        return
    assert parsed.encoded == bytes(encoded)
    assert parsed != record


@given(records, st.data())
def test_cut_or_longer_bytes_are_malformed(record: Record, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(record.encoded) - 1))
    for wrong in (record.encoded[:cut], record.encoded + b"\0"):
        with pytest.raises(Malformed):
            parse_record(wrong)


@given(st.binary(max_size=200))
def test_any_bytes_are_malformed_at_worst(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_record(data)


nested = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.binary(max_size=40)
    | st.text(max_size=5)
    | st.floats(),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=30,
)


@given(nested, nested)
def test_any_msgpack_is_malformed_at_worst(value: object, other: object) -> None:
    for parse in (parse_ballot, parse_certificate):
        with suppress(Malformed):
            parse(value)
    fields = [1, NORMAL, bytes(32), 1, bytes(32), 0, value, other, BASE, 0]
    for data in (msgpack.packb(value), msgpack.packb(fields)):
        with pytest.raises(Malformed):
            parse_record(data)


@given(normals)
def test_what_is_unsorted_or_repeated_is_malformed(record: Record) -> None:
    wrong = [
        replace(record, members=record.members + record.members[:1]),
        replace(record, voters=record.voters + record.voters[-1:]),
        replace(record, voters=()),
        replace(record, members=()),
        replace(record, kind=7),
        replace(record, base=b"short"),
        replace(record, tokens=-1),
    ]
    if len(record.voters) > 1:
        wrong.append(replace(record, voters=record.voters[::-1]))
    if len(record.members) > 1:
        wrong.append(replace(record, members=record.members[::-1]))
    for bad in wrong:
        with pytest.raises(Malformed):
            parse_record(bad.encoded)


@given(recoveries, normals)
def test_a_recovery_commits_nothing_and_names_its_survivors_in_order(recovery: Record, normal: Record) -> None:
    assert parse_record(recovery.encoded) == recovery
    wrong = [
        replace(recovery, members=normal.members),
        replace(recovery, voters=()),
        replace(recovery, voters=recovery.voters + recovery.voters[:1]),
    ]
    if len(recovery.voters) > 1:
        wrong.append(replace(recovery, voters=recovery.voters[::-1]))
    for bad in wrong:
        with pytest.raises(Malformed):
            parse_record(bad.encoded)


def test_too_many_members_are_malformed() -> None:
    record = first()
    many = replace(record, voters=tuple(record.voters * (MEMBERS_MAX + 1)))
    with pytest.raises(Malformed, match="voters"):
        parse_record(many.encoded)


@given(ballots)
def test_ballots_go_there_and_back(ballot: Ballot) -> None:
    assert parse_ballot(encode_ballot(ballot)) == ballot


@given(certificates)
def test_certificates_go_there_and_back(certificate: Certificate) -> None:
    packed = msgpack.unpackb(msgpack.packb(encode_certificate(certificate)))
    assert parse_certificate(packed) == certificate


# Which chain goes before which (R9).

few_tokens = st.builds(lambda record, tokens: replace(record, tokens=tokens), records, st.integers(0, 2))


@given(few_tokens, few_tokens, few_tokens)
def test_of_any_two_records_exactly_one_ends_the_better_chain(one: Record, two: Record, three: Record) -> None:
    assert not one.is_better(one)
    if one != two:
        assert one.is_better(two) != two.is_better(one)
    if one.is_better(two) and two.is_better(three):
        assert one.is_better(three)


@given(few_tokens, few_tokens)
def test_more_tokens_are_better_and_of_equal_ones_the_lower_hash(one: Record, two: Record) -> None:
    if one.tokens != two.tokens:
        assert one.is_better(two) == (one.tokens > two.tokens)
    else:
        assert one.is_better(two) == (one.hash < two.hash)


# Quorums.


def electorates(most: int) -> list[Record]:
    """Every size of electorate, with every voter as its lead, and with a lead by hash."""
    found = []
    for count in range(1, most + 1):
        voters = tuple(sorted(s.peer_id for s in SIGNERS[:count]))
        origins = [*voters, PeerID(SIGNERS[8].peer_id)] if count < 9 else list(voters)
        found += [replace(first(), voters=voters, origin=origin) for origin in origins]
    return found


@pytest.mark.parametrize("record", electorates(9), ids=lambda r: f"{len(r.voters)}-{r.origin[-4:]}")
def test_any_two_quorums_meet_and_an_even_split_has_exactly_one(record: Record) -> None:
    voters = set(record.voters)
    for size in range(len(voters) + 1):
        for chosen in itertools.combinations(record.voters, size):
            rest = voters - set(chosen)
            assert not (record.is_quorum(set(chosen)) and record.is_quorum(rest))
            if 2 * size == len(voters):
                assert record.is_quorum(set(chosen)) == (record.lead in chosen)
            if 2 * size > len(voters) + 1 or size == len(voters):
                assert record.is_quorum(set(chosen)), "a majority of two more always decides"


def test_more_peers_never_break_a_quorum_and_strangers_never_make_one() -> None:
    for record in electorates(5):
        for size in range(len(record.voters) + 1):
            for chosen in itertools.combinations(record.voters, size):
                strangers = {s.peer_id for s in SIGNERS} - set(record.voters)
                assert record.is_quorum(set(chosen)) == record.is_quorum(set(chosen) | strangers)
                if record.is_quorum(set(chosen)):
                    assert all(record.is_quorum({*chosen, voter}) for voter in record.voters)


def test_of_two_the_lead_alone_goes_on() -> None:
    record = first(2)
    other = next(v for v in record.voters if v != record.lead)
    assert record.is_quorum({record.lead})
    assert not record.is_quorum({other})


@given(records)
def test_the_lead_is_a_voter_and_a_function_of_the_record_only(record: Record) -> None:
    assert record.lead in record.voters
    assert parse_record(record.encoded).lead == record.lead
    if record.origin in record.voters:
        assert record.lead == record.origin


@given(st.binary(min_size=32, max_size=32), peers, st.binary(min_size=16, max_size=16))
def test_a_genesis_follows_from_the_run(run: bytes, creator: PeerID, base: bytes) -> None:
    one, other = (genesis(sha256(run), creator, base) for _ in range(2))
    assert one.hash == other.hash
    assert one.lead == creator
    assert parse_record(one.encoded) == one
