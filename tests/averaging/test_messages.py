"""Messages and contributions: there and back, and nothing but `Malformed` from a stranger's bytes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging.contribution import HEADER_BYTES_MAX, Contribution, parse_contribution, sign_contribution
from averaging.messages import (
    DIGESTS_MAX,
    KNOWN_MAX,
    LOG_ENTRIES_MAX,
    Get,
    GetLog,
    Log,
    Message,
    Promise,
    encode_message,
    parse_message,
)
from averaging.record import NO_BALLOT, Ballot, Malformed
from network.identity import Identity
from tests.averaging.strategies import BASE, SIGNERS, first, grown, hashes, integers, messages

LIMIT = 1000
contributions = st.builds(
    sign_contribution,
    st.sampled_from(SIGNERS),
    hashes,
    integers,
    st.binary(min_size=16, max_size=16),
    st.booleans(),
    st.binary(max_size=100),
)


@given(messages)
def test_a_message_goes_there_and_back(message: Message) -> None:
    assert parse_message(encode_message(message)) == message


@given(messages, st.data())
def test_a_changed_message_is_another_one_or_malformed(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode_message(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        parsed = parse_message(bytes(encoded))
    except Malformed:
        return
    assert type(parsed) in {type(message), *Message.__args__}
    encode_message(parsed)


@given(messages, st.data())
def test_a_cut_message_is_malformed(message: Message, data: st.DataObject) -> None:
    encoded = encode_message(message)
    with pytest.raises(Malformed):
        parse_message(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(st.binary(max_size=300))
def test_any_bytes_are_malformed_or_a_message(data: bytes) -> None:
    with suppress(Malformed):
        encode_message(parse_message(data))


leaves = st.none() | st.booleans() | st.integers(-1, 2**63) | st.binary(max_size=64) | st.text(max_size=3)


@given(st.integers(-1, 12), st.lists(st.recursive(leaves, lambda s: st.lists(s, max_size=4)), max_size=5))
def test_any_fields_are_malformed_or_a_message(kind: int, fields: list[object]) -> None:
    with suppress(Malformed):
        encode_message(parse_message(msgpack.packb([kind, *fields])))


def test_lists_longer_than_their_limits_are_malformed() -> None:
    digest = first().hash
    assert parse_message(encode_message(Get((digest,) * DIGESTS_MAX)))
    with pytest.raises(Malformed):
        parse_message(encode_message(Get((digest,) * (DIGESTS_MAX + 1))))
    assert parse_message(encode_message(GetLog((digest,) * KNOWN_MAX)))
    with pytest.raises(Malformed):
        parse_message(encode_message(GetLog((digest,) * (KNOWN_MAX + 1))))
    entry = grown(1)[0][0]
    with pytest.raises(Malformed):
        parse_message(encode_message(Log(digest, 1, (entry,) * (LOG_ENTRIES_MAX + 1))))


def test_a_promise_has_both_an_accepted_ballot_and_a_record_or_neither() -> None:
    head, ballot = first(), Ballot(1, SIGNERS[0].peer_id)
    for wrong in (Promise(head.hash, ballot, NO_BALLOT, head), Promise(head.hash, ballot, ballot, None)):
        with pytest.raises(Malformed, match="promise"):
            parse_message(encode_message(wrong))


# Contributions.


@given(contributions)
def test_a_contribution_goes_there_and_back(contribution: Contribution) -> None:
    parsed = parse_contribution(contribution.encoded, SIGNERS[0], LIMIT)
    assert parsed == contribution
    assert parsed.digest == contribution.digest


@given(contributions, st.data())
def test_a_changed_contribution_is_malformed(contribution: Contribution, data: st.DataObject) -> None:
    """Or says the same in other bytes of the envelope, which no record names."""
    encoded = bytearray(contribution.encoded)
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        parsed = parse_contribution(bytes(encoded), SIGNERS[0], LIMIT)
    except Malformed:
        return
    assert parsed == contribution


@given(st.binary(max_size=300))
def test_any_bytes_are_no_contribution(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse_contribution(data, SIGNERS[0], LIMIT)


@given(st.lists(leaves, max_size=7), st.binary(max_size=64))
def test_any_header_is_no_contribution(fields: list[object], signature: bytes) -> None:
    with pytest.raises(Malformed):
        parse_contribution(msgpack.packb([msgpack.packb(fields), signature, b"payload"]), SIGNERS[0], LIMIT)


def test_a_contribution_beyond_the_limit_is_refused() -> None:
    large = sign_contribution(SIGNERS[0], first().hash, 1, BASE, True, bytes(LIMIT))
    assert parse_contribution(large.encoded, SIGNERS[0], LIMIT + HEADER_BYTES_MAX) == large
    with pytest.raises(Malformed):
        parse_contribution(large.encoded, SIGNERS[0], LIMIT)


def test_nobody_can_offer_in_anothers_name() -> None:
    one, other = Identity(bytes(32)), Identity(bytes([1] * 32))
    honest = sign_contribution(one, first().hash, 1, BASE, True, b"payload")
    assert parse_contribution(honest.encoded, other, LIMIT) == honest
    stolen = replace(honest, owner=other.peer_id)
    heavier = replace(honest, weight=2)
    for lie in (stolen, heavier, replace(honest, payload=b"other"), replace(honest, signature=bytes(64))):
        with pytest.raises(Malformed, match="signature"):
            parse_contribution(lie.encoded, other, LIMIT)
