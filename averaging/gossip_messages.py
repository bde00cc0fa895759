"""What two peers say to each other in a meeting, as values, and their bytes.

One frame is one message: a msgpack array whose first entry names its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from averaging.gossip import NONCE_BYTES
from averaging.record import (
    MEMBERS_MAX,
    Hash,
    Malformed,
    as_bytes,
    as_hash,
    as_integer,
    as_list,
    as_peer,
)
from network.identity import public_key_of
from network.seam import PeerID

OVERHEAD_BYTES_MAX = 64 * 1024
"""A frame may be so much longer than a payload."""
WAIT_MILLISECONDS_MAX = 60_000


@dataclass(frozen=True, slots=True)
class Invite:
    """Opens a meeting of the sender's round `round`. The organiser gives the others `wait_milliseconds` to come."""

    nonce: bytes
    round: int
    wait_milliseconds: int


@dataclass(frozen=True, slots=True)
class Later:
    """Not ready: the invitation is kept as long as its stream is open. To `Ask`: not decided yet."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Ready, at the sender's round; its `Payload` follows."""

    round: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """No meeting with this peer now."""


@dataclass(frozen=True, slots=True)
class Payload:
    """A contribution, one's own or, from the organiser, another member's; the receiver checks its signature."""

    encoded: bytes


@dataclass(frozen=True, slots=True)
class Prepare:
    """The organiser has sent all that `members` say."""

    members: tuple[PeerID, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """All of it is here and can be applied: from now on only the organiser decides."""


@dataclass(frozen=True, slots=True)
class Done:
    """The meeting took place between `members`, who are at `round` now. Also answers `Ask`."""

    round: int
    members: tuple[PeerID, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The meeting does not take place, for the receiver at least. Also answers `Ask`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """On a stream of its own: what became of this meeting of yours?"""

    meeting: Hash


GossipMessage = Invite | Later | Accept | Refuse | Payload | Prepare | Held | Done | Abort | Ask


def encode_gossip(message: GossipMessage) -> bytes:
    number, encode, _ = _CODECS[type(message)]
    packed: bytes = msgpack.packb([number, *encode(message)])
    return packed


def parse_gossip(data: bytes) -> GossipMessage:
    """Raises `Malformed`. The frame's own limit bounds `data`."""
    try:
        fields = msgpack.unpackb(data, raw=False, max_ext_len=0, max_map_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"gossip message: not msgpack ({error})") from error
    if not isinstance(fields, list) or not fields or type(fields[0]) is not int or fields[0] not in _PARSERS:
        raise Malformed("gossip message: unknown kind")
    kind, length, parse = _PARSERS[fields[0]]
    message: GossipMessage = parse(*as_list(fields[1:], kind.__name__, length, exact=True))
    return message


def encode_members(members: tuple[PeerID, ...]) -> list[bytes]:
    return [public_key_of(peer) for peer in members]


def parse_members(fields: Any) -> tuple[PeerID, ...]:
    """At least two, sorted, none twice."""
    members = tuple(as_peer(peer, "meeting.members") for peer in as_list(fields, "meeting.members", MEMBERS_MAX))
    if list(members) != sorted(set(members)) or len(members) < 2:
        raise Malformed("meeting.members: fewer than two, unsorted or repeated")
    return members


_Codec = tuple[int, Callable[[Any], list[Any]], Callable[..., Any]]
_CODECS: dict[type, _Codec] = {
    Invite: (
        1,
        lambda m: [m.nonce, m.round, m.wait_milliseconds],
        lambda n, r, w: Invite(
            as_bytes(n, "invite.nonce", NONCE_BYTES, exact=True),
            as_integer(r, "invite.round"),
            as_integer(w, "invite.wait", WAIT_MILLISECONDS_MAX),
        ),
    ),
    Later: (2, lambda m: [], lambda: Later()),
    Accept: (3, lambda m: [m.round], lambda r: Accept(as_integer(r, "accept.round"))),
    Refuse: (4, lambda m: [], lambda: Refuse()),
    Payload: (5, lambda m: [m.encoded], lambda e: Payload(as_bytes(e, "payload", 2**32))),
    Prepare: (6, lambda m: [encode_members(m.members)], lambda p: Prepare(parse_members(p))),
    Held: (7, lambda m: [], lambda: Held()),
    Done: (
        8,
        lambda m: [m.round, encode_members(m.members)],
        lambda r, p: Done(as_integer(r, "done.round"), parse_members(p)),
    ),
    Abort: (9, lambda m: [], lambda: Abort()),
    Ask: (10, lambda m: [m.meeting], lambda h: Ask(as_hash(h, "ask.meeting"))),
}
_LENGTHS = {Invite: 3, Accept: 1, Payload: 1, Prepare: 1, Done: 2, Ask: 1}
_PARSERS = {number: (kind, _LENGTHS.get(kind, 0), parse) for kind, (number, _, parse) in _CODECS.items()}
