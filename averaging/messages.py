"""What peers say to each other in a round, as values, and their bytes.

One frame of the message protocol is one message: a msgpack array whose first entry names its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from averaging.record import (
    HASH_BYTES,
    NO_BALLOT,
    RECORD_BYTES_MAX,
    Ballot,
    Certificate,
    Hash,
    Malformed,
    Record,
    as_bytes,
    as_flag,
    as_hash,
    as_integer,
    as_list,
    encode_ballot,
    encode_certificate,
    parse_ballot,
    parse_certificate,
    parse_record,
)
from network.identity import KEY_BYTES, SIGNATURE_BYTES

LOG_ENTRIES_MAX = 128
LOG_BYTES_MAX = 128 * 1024
"""Of one LOG, about; a frame must take it beside the largest single entry."""
DIGESTS_MAX = 256
KNOWN_MAX = 64
PAUSE_MILLISECONDS_MAX = 600_000


@dataclass(frozen=True, slots=True)
class Head:
    """Where the sender stands; sent when a link opens and whenever a link has been silent for a heartbeat.

    `pause`: for so many milliseconds the sender may now say nothing on this link.
    """

    head: Hash
    round: int
    tokens: int
    nonce: int
    leaving: bool
    pause: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """A contribution, pushed to everyone; `encoded` is parsed (and its signature checked) by the receiver.

    `relay` asks the receiver to hand it on to the lead, which the owner has no link to. `merged` is an owner's own word
    on which share of the receiver is merged in it, empty if none is; None from anybody else.
    """

    encoded: bytes
    relay: bool = False
    merged: bytes | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Parts of a contribution, to the peer that owns them; `encoded` is parsed as a contribution is."""

    encoded: bytes


@dataclass(frozen=True, slots=True)
class Get:
    """Asks for contributions by digest."""

    digests: tuple[Hash, ...]


@dataclass(frozen=True, slots=True)
class Propose:
    """`record` as the child of `record.prev` at `ballot`, with the proposer's own acceptance."""

    ballot: Ballot
    record: Record
    carried: bool
    signature: bytes


@dataclass(frozen=True, slots=True)
class Accepted:
    prev: Hash
    ballot: Ballot
    record: Hash
    signature: bytes


@dataclass(frozen=True, slots=True)
class Prepare:
    prev: Hash
    ballot: Ballot


@dataclass(frozen=True, slots=True)
class Promise:
    """The sender will accept nothing below `ballot`; `accepted` is what it accepted so far, at `accepted_ballot`."""

    prev: Hash
    ballot: Ballot
    accepted_ballot: Ballot
    accepted: Record | None


@dataclass(frozen=True, slots=True)
class Nack:
    """Refuses a ballot: something higher was promised, or (`other_base`) the sender's fingerprint differs."""

    prev: Hash
    promised: Ballot
    other_base: bool


@dataclass(frozen=True, slots=True)
class GetLog:
    """Asks for the records after the first of `known` that the receiver has: the asker's newest ones, then sparser
    down to the first of all, so that chains which parted long ago find where.
    """

    known: tuple[Hash, ...]


@dataclass(frozen=True, slots=True)
class LogEntry:
    record: Record
    certificate: Certificate
    payload_bytes: int
    """Size of its contributions together; 0 if the sender no longer has them."""

    @property
    def bytes_about(self) -> int:
        """Its size in a message."""
        return len(self.record.encoded) + len(self.certificate.signatures) * (KEY_BYTES + SIGNATURE_BYTES + 8) + 64


@dataclass(frozen=True, slots=True)
class Log:
    """Records after `after`, oldest first; also sent unasked, with one entry, to whoever speaks of a decided round."""

    after: Hash
    round: int
    """Of the sender's head."""
    entries: tuple[LogEntry, ...]


Message = Head | Offer | Share | Get | Propose | Accepted | Prepare | Promise | Nack | GetLog | Log


def encode_message(message: Message) -> bytes:
    number, encode, _ = _CODECS[type(message)]
    packed: bytes = msgpack.packb([number, *encode(message)])
    return packed


def parse_message(data: bytes) -> Message:
    """Raises `Malformed`. The frame's own limit bounds `data`."""
    try:
        fields = msgpack.unpackb(data, raw=False, max_ext_len=0, max_map_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"message: not msgpack ({error})") from error
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int or fields[0] not in _PARSERS:
        raise Malformed("message: unknown kind")
    kind, length, parse = _PARSERS[fields[0]]
    message: Message = parse(*as_list(fields[1:], kind.__name__, length, exact=True))
    return message


def _encode_entry(entry: LogEntry) -> list[Any]:
    return [entry.record.encoded, encode_certificate(entry.certificate), entry.payload_bytes]


def _parse_entry(fields: Any) -> LogEntry:
    record, certificate, size = as_list(fields, "log entry", 3, exact=True)
    return LogEntry(_record(record), parse_certificate(certificate), as_integer(size, "log entry size"))


def _entries(fields: Any) -> tuple[LogEntry, ...]:
    return tuple(_parse_entry(entry) for entry in as_list(fields, "log entries", LOG_ENTRIES_MAX))


def _record(data: Any) -> Record:
    return parse_record(as_bytes(data, "record", RECORD_BYTES_MAX))


def _signature(data: Any) -> bytes:
    return as_bytes(data, "signature", SIGNATURE_BYTES, exact=True)


def _ballot(fields: Any) -> Ballot:
    ballot = parse_ballot(fields)
    if ballot == NO_BALLOT:
        raise Malformed("ballot: missing")
    return ballot


def _encode_accepted(promise: Promise) -> list[Any]:
    accepted = promise.accepted.encoded if promise.accepted is not None else None
    return [encode_ballot(promise.accepted_ballot), accepted]


def _parse_promise(prev: Any, ballot: Any, accepted_ballot: Any, accepted: Any) -> Promise:
    record = _record(accepted) if accepted is not None else None
    was = parse_ballot(accepted_ballot)
    if (record is None) != (was == NO_BALLOT):
        raise Malformed("promise: an accepted record needs a ballot, and a ballot a record")
    return Promise(as_hash(prev, "promise.prev"), _ballot(ballot), was, record)


_Codec = tuple[int, Callable[[Any], list[Any]], Callable[..., Any]]
_CODECS: dict[type, _Codec] = {
    Head: (
        1,
        lambda m: [m.head, m.round, m.tokens, m.nonce, m.leaving, m.pause],
        lambda h, r, t, n, f, p: Head(
            as_hash(h, "head"),
            as_integer(r, "round"),
            as_integer(t, "tokens"),
            as_integer(n, "nonce"),
            as_flag(f, "leaving"),
            as_integer(p, "pause", PAUSE_MILLISECONDS_MAX),
        ),
    ),
    Offer: (
        2,
        lambda m: [m.encoded, m.relay, m.merged],
        lambda e, r, m: Offer(
            as_bytes(e, "offer", 2**32), as_flag(r, "relay"), None if m is None else as_bytes(m, "merged", HASH_BYTES)
        ),
    ),
    Get: (
        3,
        lambda m: [list(m.digests)],
        lambda d: Get(tuple(as_hash(x, "digest") for x in as_list(d, "digests", DIGESTS_MAX))),
    ),
    Propose: (
        4,
        lambda m: [encode_ballot(m.ballot), m.record.encoded, m.carried, m.signature],
        lambda b, r, c, s: Propose(_ballot(b), _record(r), as_flag(c, "carried"), _signature(s)),
    ),
    Accepted: (
        5,
        lambda m: [m.prev, encode_ballot(m.ballot), m.record, m.signature],
        lambda p, b, r, s: Accepted(as_hash(p, "prev"), _ballot(b), as_hash(r, "record"), _signature(s)),
    ),
    Prepare: (
        6,
        lambda m: [m.prev, encode_ballot(m.ballot)],
        lambda p, b: Prepare(as_hash(p, "prev"), _ballot(b)),
    ),
    Promise: (
        7,
        lambda m: [m.prev, encode_ballot(m.ballot), *_encode_accepted(m)],
        _parse_promise,
    ),
    Nack: (
        8,
        lambda m: [m.prev, encode_ballot(m.promised), m.other_base],
        lambda p, b, f: Nack(as_hash(p, "prev"), parse_ballot(b), as_flag(f, "other_base")),
    ),
    GetLog: (
        9,
        lambda m: [list(m.known)],
        lambda k: GetLog(tuple(as_hash(x, "known") for x in as_list(k, "known", KNOWN_MAX))),
    ),
    Log: (
        10,
        lambda m: [m.after, m.round, [_encode_entry(e) for e in m.entries]],
        lambda a, r, e: Log(as_hash(a, "after"), as_integer(r, "round"), _entries(e)),
    ),
    Share: (
        11,
        lambda m: [m.encoded],
        lambda e: Share(as_bytes(e, "share", 2**32)),
    ),
}
_LENGTHS = {
    Head: 6,
    Offer: 3,
    Get: 1,
    Propose: 4,
    Accepted: 4,
    Prepare: 2,
    Promise: 4,
    Nack: 3,
    GetLog: 1,
    Log: 3,
    Share: 1,
}
_PARSERS = {number: (kind, _LENGTHS[kind], parse) for kind, (number, _, parse) in _CODECS.items()}
