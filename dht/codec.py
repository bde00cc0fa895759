"""hivemind's DHT on the wire, written and read without hivemind: what the light observer sends and receives.

A unary call is one protobuf message each way, behind its length as a varint (p2pd's `persistent_stream.go`):
`PersistentConnectionRequest{1: call id, 3: {1: peer, 2: protocol, 3: request}}`, answered by
`{1: call id, 4: {1: response | 2: error}}`. The messages inside are those of hivemind's `dht.proto`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgpack

from dht.record import InvalidRecord, parse_peer_id
from network.identity import peer_id_of
from network.seam import PeerID

FIND_PROTOCOL = "DHTProtocol.rpc_find"
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
RECORDS_MAX = 4096
NEIGHBOURS_MAX = 64
_FIELDS_MAX = 16384
_VARINT_BYTES_MAX = 10
_FOUND_DICTIONARY = 2
_DICTIONARY_EXTENSION = 0x50
_PEER_ID_PREFIX = bytes.fromhex("002408011220")

Field = int | bytes
Fields = dict[int, list[Field]]


class InvalidAnswer(ValueError):
    """A node answered with something that is not of this protocol, or with an error."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one node knows about one key: records by subkey, unverified, and nodes nearer to the key."""

    records: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    neighbours: tuple[PeerID, ...] = ()


def encode_find(call_id: bytes, node: bytes, key_id: bytes) -> bytes:
    """The framed call. It names no node of ours, so the asked one keeps us out of its routing table."""
    call = _field(1, node) + _field(2, FIND_PROTOCOL.encode()) + _field(3, _field(2, key_id))
    message = _field(1, call_id) + _field(3, call)
    return _varint(len(message)) + message


def frame_length(received: bytes) -> tuple[int, int] | None:
    """(bytes of the length itself, bytes of the message behind it), or None if the length is not yet complete."""
    try:
        length, start = _read_varint(received, 0)
    except IndexError:
        return None
    if length > MESSAGE_BYTES_MAX:
        raise InvalidAnswer(f"an answer of {length} bytes")
    return start, length


def decode_found(call_id: bytes, message: bytes) -> Found:
    """What the answer to `encode_find` says; raises `InvalidAnswer`."""
    answer = _parse(message)
    if _bytes(answer, 1) != call_id:
        raise InvalidAnswer("the answer to another call")
    outcome = _parse(_bytes(answer, 4))
    if 2 in outcome:
        raise InvalidAnswer("the node reports an error: " + _bytes(outcome, 2)[:200].decode(errors="replace"))
    result = _parse(_bytes(_parse(_bytes(outcome, 1)), 2))
    neighbours = [peer for raw in result.get(5, [])[:NEIGHBOURS_MAX] if (peer := _peer_id(raw)) is not None]
    if result.get(1, [0])[0] != _FOUND_DICTIONARY:
        return Found(neighbours=tuple(neighbours))
    return Found(_records(_bytes(result, 2)), tuple(neighbours))


def _records(packed: bytes) -> dict[str, tuple[bytes, float]]:
    """hivemind's `DictionaryDHTValue`: an extension of [size, expiry, [[subkey, packed value, expiry], ...]]."""
    extension = _unpack(packed)
    if not isinstance(extension, msgpack.ExtType) or extension.code != _DICTIONARY_EXTENSION:
        raise InvalidAnswer("no dictionary")
    content = _unpack(extension.data)
    if not isinstance(content, list) or len(content) != 3 or not isinstance(content[2], list):
        raise InvalidAnswer("no dictionary")
    records: dict[str, tuple[bytes, float]] = {}
    for item in content[2][:RECORDS_MAX]:
        if not isinstance(item, list) or len(item) != 3:
            raise InvalidAnswer("no item of a dictionary")
        subkey, packed_value, expires = item
        if isinstance(subkey, str) and isinstance(packed_value, bytes) and isinstance(expires, float):
            value = _unpack(packed_value)
            records[subkey] = (value if isinstance(value, bytes) else b"", expires)
    return records


def _unpack(packed: bytes) -> object:
    try:
        unpacked: object = msgpack.unpackb(packed, raw=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidAnswer(f"no msgpack: {error}") from error
    return unpacked


def _peer_id(raw: Field) -> PeerID | None:
    if not isinstance(raw, bytes) or not raw.startswith(_PEER_ID_PREFIX):
        return None
    try:
        return parse_peer_id(peer_id_of(raw[len(_PEER_ID_PREFIX) :]))
    except InvalidRecord:
        return None


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes(fields: Fields, number: int) -> bytes:
    values: Sequence[Field] = fields.get(number, [])
    if not values or not isinstance(values[0], bytes):
        raise InvalidAnswer(f"field {number} is missing")
    return values[0]


def _parse(message: bytes) -> Fields:
    """Any protobuf message as its fields' values, in order."""
    fields: Fields = {}
    place = number_of_fields = 0
    try:
        while place < len(message):
            number_of_fields += 1
            if number_of_fields > _FIELDS_MAX:
                raise InvalidAnswer("too many fields")
            tag, place = _read_varint(message, place)
            value, place = _read_value(message, place, tag & 7)
            fields.setdefault(tag >> 3, []).append(value)
    except (IndexError, struct.error) as error:
        raise InvalidAnswer("a message cut short") from error
    return fields


def _read_value(message: bytes, place: int, wire_type: int) -> tuple[Field, int]:
    if wire_type == 0:
        return _read_varint(message, place)
    if wire_type not in (1, 2, 5):
        raise InvalidAnswer(f"wire type {wire_type}")
    length = {1: 8, 5: 4}.get(wire_type, 0)
    if wire_type == 2:
        length, place = _read_varint(message, place)
    if place + length > len(message):
        raise InvalidAnswer("a message cut short")
    return message[place : place + length], place + length


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for count in range(_VARINT_BYTES_MAX):
        byte = message[place + count]
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise InvalidAnswer("a number without an end")
