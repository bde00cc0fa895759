"""The observer's codec reads what hivemind writes, and refuses what it never would."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from dht.codec import MESSAGE_BYTES_MAX, InvalidAnswer, decode_found, encode_find, frame_length
from dht.record import key_id
from network.identity import Identity

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
CALL = b"c" * 16
records = st.dictionaries(st.text(max_size=60), st.tuples(st.binary(max_size=300), st.floats(0, 2e9)), max_size=20)


def answer(response: bytes | None = None, error: bytes | None = None, call_id: bytes = CALL) -> bytes:
    message = p2pd_pb2.PersistentConnectionRequest(callId=call_id)
    # The answer travels in the same shape as a request, in a field of its own.
    content = b"" if response is None else b"\x0a" + varint(len(response)) + response
    content += b"" if error is None else b"\x12" + varint(len(error)) + error
    return bytes(message.SerializeToString()) + b"\x22" + varint(len(content)) + content


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def find_response(**result: Any) -> bytes:
    peer = dht_pb2.NodeInfo(node_id=b"n" * 20)
    response = dht_pb2.FindResponse(results=[dht_pb2.FindResult(**result)], peer=peer)
    return bytes(response.SerializeToString())


def as_hivemind_packs(items: dict[str, tuple[bytes, float]]) -> bytes:
    dictionary = DictionaryDHTValue()
    with dictionary.freeze():
        for subkey, (value, expires) in items.items():
            dictionary.store(subkey, MSGPackSerializer.dumps(value), expires)
        return bytes(MSGPackSerializer.dumps(dictionary))


@given(records)
def test_a_dictionary_is_read_as_hivemind_stores_it(items: dict[str, tuple[bytes, float]]) -> None:
    response = find_response(
        type=dht_pb2.FOUND_DICTIONARY,
        value=as_hivemind_packs(items),
        expiration_time=1.0,
        nearest_node_ids=[b"x" * 20, b"y" * 20, b"z" * 20],
        nearest_peer_ids=[_raw(ALICE), b"no peer id", _raw(BOB)],
    )
    found = decode_found(CALL, answer(response))
    assert found.records == items
    assert found.neighbours == (ALICE.peer_id, BOB.peer_id)


def _raw(identity: Identity) -> bytes:
    return bytes.fromhex("002408011220") + identity.public_key


def test_nothing_found_and_plain_values_are_no_records() -> None:
    for result in ({"type": dht_pb2.NOT_FOUND}, {"type": dht_pb2.FOUND_REGULAR, "value": b"\xc0"}, {}):
        assert decode_found(CALL, answer(find_response(**result))).records == {}


def test_a_call_is_what_p2pd_and_hivemind_expect() -> None:
    framed = encode_find(CALL, _raw(ALICE), key_id("key"))
    start, length = frame_length(framed) or (0, 0)
    assert len(framed) == start + length
    call = p2pd_pb2.PersistentConnectionRequest.FromString(framed[start:])
    assert (call.callId, call.callUnary.peer, call.callUnary.proto) == (CALL, _raw(ALICE), "DHTProtocol.rpc_find")
    request = dht_pb2.FindRequest.FromString(call.callUnary.data)
    assert [DHTID.from_bytes(key) for key in request.keys] == [DHTID.generate("key")]
    assert not request.peer.node_id


@given(st.integers(0, MESSAGE_BYTES_MAX))
def test_a_length_is_read_as_soon_as_it_is_complete(length: int) -> None:
    encoded = varint(length)
    assert frame_length(encoded + b"message") == (len(encoded), length)
    assert frame_length(encoded[:-1]) is None


@pytest.mark.parametrize("length", [varint(MESSAGE_BYTES_MAX + 1), b"\xff" * 10])
def test_a_length_above_the_limit_is_refused(length: bytes) -> None:
    with pytest.raises(InvalidAnswer):
        frame_length(length)


def test_errors_and_answers_to_others_are_named() -> None:
    with pytest.raises(InvalidAnswer, match="reports an error: too busy"):
        decode_found(CALL, answer(error=b"too busy"))
    with pytest.raises(InvalidAnswer, match="another call"):
        decode_found(CALL, answer(find_response(), call_id=b"d" * 16))


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(garbage: bytes) -> None:
    with pytest.raises(InvalidAnswer):
        decode_found(CALL, garbage)
    for message in (answer(garbage), answer(find_response(type=dht_pb2.FOUND_DICTIONARY, value=garbage))):
        with suppress(InvalidAnswer):
            assert decode_found(CALL, message).records == {}


@given(st.data())
def test_an_answer_cut_anywhere_or_changed_is_read_or_refused_by_name(data: st.DataObject) -> None:
    value = as_hivemind_packs({ALICE.peer_id: (b"value", 1.5), BOB.peer_id: (b"other", 2.5)})
    message = bytearray(answer(find_response(type=dht_pb2.FOUND_DICTIONARY, value=value)))
    place = data.draw(st.integers(0, len(message) - 1))
    if data.draw(st.booleans()):
        del message[place:]
    else:
        message[place] ^= data.draw(st.integers(1, 255))
    with suppress(InvalidAnswer):
        decode_found(CALL, bytes(message))
