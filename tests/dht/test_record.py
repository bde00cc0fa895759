"""Records: what a peer signed is read as it was, and anything else is refused by name."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dht.record import (
    DEFAULT_LIMITS,
    HEADER_BYTES,
    InvalidRecord,
    RecordLimits,
    expiry,
    just_after,
    key_id,
    open_hashed,
    open_record,
    seal,
)
from network.identity import Identity, peer_id_of

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
NOW = 1_700_000_000.0
EXPIRES = expiry(NOW, 60)
RECORD = seal(ALICE, "key", ALICE.peer_id, b"payload", EXPIRES)

keys = st.text(max_size=40)
payloads = st.binary(max_size=300)
lifetimes = st.floats(0, 7200, allow_nan=False)


@given(st.binary(min_size=32, max_size=32), keys, payloads, lifetimes)
def test_what_a_peer_seals_is_read_as_it_was(seed: bytes, key: str, payload: bytes, lifetime: float) -> None:
    signer, expires = Identity(seed), expiry(NOW, lifetime)
    record = seal(signer, key, signer.peer_id, payload, expires)
    assert open_record(key, signer.peer_id, record, expires, now=NOW - 0.001) == payload
    assert len(record) == HEADER_BYTES + len(payload)


@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(place: int, change: int) -> None:
    forged = bytearray(RECORD)
    forged[place] ^= change
    with pytest.raises(InvalidRecord) as refused:
        open_record("key", ALICE.peer_id, bytes(forged), EXPIRES)
    assert refused.value.reason == ("format" if place == 0 else "signature")


@given(st.integers(0, len(RECORD) - 1))
def test_a_truncated_record_is_refused(length: int) -> None:
    with pytest.raises(InvalidRecord):
        open_record("key", ALICE.peer_id, RECORD[:length], EXPIRES)


@given(keys)
def test_a_record_holds_under_its_own_key_only(key: str) -> None:
    if key != "key":
        with pytest.raises(InvalidRecord, match="signature"):
            open_record(key, ALICE.peer_id, RECORD, EXPIRES)


@pytest.mark.parametrize(
    "subkey", [BOB.peer_id, ALICE.peer_id + " ", " " + ALICE.peer_id, ALICE.peer_id[:-1], "", "é" * 52]
)
def test_a_record_holds_under_the_id_of_its_signer_only(subkey: str) -> None:
    with pytest.raises(InvalidRecord) as refused:
        open_record("key", subkey, RECORD, EXPIRES)
    assert refused.value.reason == ("signature" if subkey == BOB.peer_id else "owner")


@given(st.one_of(st.floats(), st.floats(EXPIRES - 1, EXPIRES + 1)))
@example(math.inf)
@example(math.nan)
@example(-0.0)
@example(math.nextafter(EXPIRES, math.inf))
@example(just_after(EXPIRES))
def test_no_other_expiry_is_believed(expires: float) -> None:
    if expires != EXPIRES:
        with pytest.raises(InvalidRecord):
            open_record("key", ALICE.peer_id, RECORD, expires)


def test_a_record_is_refused_when_it_has_expired_or_would_live_too_long() -> None:
    limits = RecordLimits(lifetime_seconds_max=50, clock_seconds_slack=5)
    for now, valid in ((EXPIRES - 55, True), (EXPIRES - 55.5, False), (EXPIRES, True), (EXPIRES + 0.5, False)):
        if valid:
            assert open_record("key", ALICE.peer_id, RECORD, EXPIRES, now=now, limits=limits) == b"payload"
        else:
            with pytest.raises(InvalidRecord, match="expiry"):
                open_record("key", ALICE.peer_id, RECORD, EXPIRES, now=now, limits=limits)


def test_a_record_larger_than_the_limit_is_refused() -> None:
    for num_bytes, valid in ((DEFAULT_LIMITS.payload_bytes_max, True), (DEFAULT_LIMITS.payload_bytes_max + 1, False)):
        record = seal(ALICE, "key", ALICE.peer_id, bytes(num_bytes), EXPIRES)
        if valid:
            open_record("key", ALICE.peer_id, record, EXPIRES)
        else:
            with pytest.raises(InvalidRecord, match="size"):
                open_record("key", ALICE.peer_id, record, EXPIRES)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.binary(max_size=30), anything, anything, anything)
def test_garbage_of_any_type_is_refused_by_name(hashed: bytes, subkey: object, value: object, expires: object) -> None:
    with pytest.raises(InvalidRecord):
        open_hashed(hashed, subkey, value, expires, now=NOW)


@given(st.binary(min_size=HEADER_BYTES - 1, max_size=HEADER_BYTES + 40))
def test_garbage_under_a_real_peer_id_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(InvalidRecord):
        open_hashed(key_id("key"), ALICE.peer_id, b"\x01" + value[1:], EXPIRES)


@given(st.binary(min_size=32, max_size=32))
def test_a_public_key_that_is_no_point_is_refused_by_name(public_key: bytes) -> None:
    with pytest.raises(InvalidRecord):
        open_record("key", peer_id_of(public_key), RECORD, EXPIRES)


@given(st.floats(0, 1e11), st.floats(0, 1e6))
def test_an_expiry_is_whole_milliseconds_and_the_next_one_is_later(now: float, lifetime: float) -> None:
    expires = expiry(now, lifetime)
    assert expires <= now + lifetime
    assert just_after(expires) > expires
    assert seal(ALICE, "", ALICE.peer_id, b"", expires)
