"""What each peer is doing, from outside: read off the frames that it sends, its disk and its reports."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import msgpack

from averaging.messages import Accepted, Message, Offer, Prepare, Promise, Propose, parse_message
from averaging.record import Malformed
from network.framing import DIGEST_BYTES
from network.identity import public_key_of
from network.seam import PeerID
from simulator.faults import When

_FRAMES_REMEMBERED = 32
_VOTE = 1
_SENDING = {Propose: "proposed", Accepted: "accepted", Prepare: "prepared", Promise: "promised"}


@final
@dataclass(slots=True)
class _Waiting:
    when: When
    act: Callable[[], None]
    left: int


@final
class Phases:
    """Counts what happens, and calls back at what somebody waits for."""

    def __init__(self, round_of: Callable[[int], int]) -> None:
        """`round_of(peer)` is the round that is in the air at a peer."""
        self._round_of = round_of
        self._waiting: dict[str, list[_Waiting]] = defaultdict(list)

    def wait(self, when: When, act: Callable[[], None]) -> None:
        """Has `act` called at that moment, once; its `after` is the caller's affair."""
        self._waiting[when.phase].append(_Waiting(when, act, when.nth))

    def clear(self) -> None:
        self._waiting.clear()

    def happened(self, peer: int, phase: str, number: int | None = None) -> None:
        """`number` is the round, where it is not the one in the air."""
        waiting = self._waiting.get(phase)
        if not waiting:
            return
        number = self._round_of(peer) if number is None else number
        due = []
        for one in waiting:
            if one.when.peer in (None, peer) and one.when.round in (None, number):
                one.left -= 1
                if one.left == 0:
                    due.append(one)
        for one in due:
            waiting.remove(one)
        for one in due:
            one.act()

    def on_disk(self, peer: int, what: str, entries: Sequence[bytes]) -> None:
        """For the `watch` of a peer's storage."""
        if what != "written":
            self.happened(peer, what)
            return
        for entry in entries:
            fields: list[Any] = msgpack.unpackb(entry)
            if fields[0] == _VOTE:
                _, _, promised, accepted_ballot, accepted = fields
                is_vote = accepted is not None and accepted_ballot == promised
                self.happened(peer, "voted" if is_vote else "pledged")


@final
class FrameReader:
    """Reads what a peer sends, each message once however many it goes to."""

    def __init__(self) -> None:
        self._seen: dict[PeerID, deque[bytes]] = defaultdict(lambda: deque(maxlen=_FRAMES_REMEMBERED))

    def read(self, source: PeerID, data: bytes) -> tuple[str, Message] | None:
        """The phase and the message; None for what is neither new, nor part of a round, nor the peer's own."""
        start = 0
        while start < len(data) and data[start] >= 0x80:
            start += 1
        body = start + 1 + DIGEST_BYTES
        # A message is an array whose first entry is its kind: 2 is OFFER, 4 to 7 are the votes.
        if len(data) < body + 2 or data[body + 1] not in (2, 4, 5, 6, 7):
            return None
        digest, seen = data[start + 1 : body], self._seen[source]
        if digest in seen:
            return None
        seen.append(digest)
        try:
            message = parse_message(data[body:])
        except Malformed:
            return None  # Not a frame of this protocol.
        if isinstance(message, Offer):
            return ("offered", message) if owner_key(message) == public_key_of(source) else None
        return _SENDING[type(message)], message


def owner_key(offer: Offer) -> bytes:
    """The public key of whose contribution it is."""
    header, _, _ = msgpack.unpackb(offer.encoded)
    key: bytes = msgpack.unpackb(header)[1]
    return key


def is_frame(data: bytes) -> bool:
    """Whether what is sent at once is one whole frame, so that it can come twice without harm to the framing."""
    size, head = 0, 0
    for head, byte in enumerate(data[:5]):
        size |= (byte & 0x7F) << 7 * head
        if byte < 0x80:
            break
    return len(data) == head + 1 + DIGEST_BYTES + size
