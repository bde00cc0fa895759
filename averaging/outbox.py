"""What a peer is about to do and to whom it can speak: the engine's output, and its view of the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import final

from averaging.chain import Left
from averaging.contribution import Contribution
from averaging.messages import Head, Message
from averaging.record import Hash, Record
from network.seam import PeerID

LATE_SECONDS = 3.0
"""Who says nothing for so much longer than it announced is taken for dead."""


@final
@dataclass(frozen=True, slots=True)
class Commit:
    """One committed round; `contributions` are in the order of the record's members. Where owners reduce: the numbers
    of this peer's parts that are in it, and of those of which that is not known; None if it shared nothing.
    """

    record: Record
    contributions: tuple[Contribution, ...]
    shared: tuple[frozenset[int], frozenset[int]] | None = None


@final
@dataclass(frozen=True, slots=True)
class Reduction:
    """What this peer, as an owner, is to merge and then to offer to the round after `head`; in peer-id order."""

    head: Record
    shares: tuple[Contribution, ...]


@final
@dataclass(frozen=True, slots=True)
class Fork:
    """The chain was left for a better one that follows `ancestor` (R9): the state is to go back there, and what this
    peer had said in the rounds `left` is to be said again. Commits of the better chain come next.
    """

    ancestor: Record
    left: tuple[Left, ...]


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """What a peer sent was refused, and why."""

    peer: PeerID
    reason: str


@final
@dataclass(slots=True)
class Actions:
    """What the caller must do, in this order: make durable, send, apply, report."""

    entries: list[bytes] = field(default_factory=list)
    lazy: list[bytes] = field(default_factory=list)
    """Entries that may be written with the next durable write."""
    log: list[bytes] = field(default_factory=list)
    """Committed records, written after all other entries of the same write, so that none outlives its contributions."""
    sends: list[tuple[PeerID, Message]] = field(default_factory=list)
    commits: list[Commit | Fork] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    reductions: list[Reduction] = field(default_factory=list)
    wants_snapshot: bool = False
    diverged: bool = False
    """A quorum's fingerprint differs from this peer's: its state must be fetched anew."""


@final
@dataclass(slots=True)
class Link:
    """What is known of one linked peer."""

    up: float
    """Since when."""
    heard: float
    sent: float
    pause: float = 0.0
    """In seconds: for so long, as it told the other, this peer may say nothing."""
    their_pause: float = 0.0
    """And the other, as it told this peer."""
    leaving: bool = False
    head: Hash | None = None
    """Where it stands, as far as it has said."""
    said: float = -inf
    """When it last said so by itself; what it offers or votes about says less often that it has gone on."""

    def stands(self, said: Head, pause_max: float, now: float) -> None:
        """The peer said where it stands, and for how long it may say nothing, which is believed up to `pause_max`."""
        self.leaving, self.head, self.said = said.leaving, said.head, now
        self.their_pause = min(said.pause / 1000, pause_max)


@final
class Outbox:
    """Collects actions; knows who is linked, when each was heard and spoken to, and who is leaving."""

    def __init__(self, me: PeerID, silence_seconds: float) -> None:
        self.me = me
        self.links: dict[PeerID, Link] = {}
        self.leaving = False
        """Whether this peer itself is about to leave."""
        self._heard_of: dict[PeerID, float] = {}
        self.actions = Actions()
        self._silence_seconds = silence_seconds

    def alive(self, peer: PeerID, now: float) -> bool:
        """Whether `peer` is not leaving, and was heard lately: over its link, or, without one, through another peer."""
        if peer == self.me:
            return not self.leaving
        link = self.links.get(peer)
        if link is not None:
            return not link.leaving and now - link.heard <= max(self._silence_seconds, link.their_pause + LATE_SECONDS)
        heard = self._heard_of.get(peer)
        return heard is not None and now - heard <= self._silence_seconds

    def heard_of(self, peer: PeerID, now: float) -> None:
        """Another peer handed on something new of `peer`, which has no link to this one."""
        recent = {p: at for p, at in self._heard_of.items() if now - at <= self._silence_seconds}
        self._heard_of = {**recent, peer: now}

    def lost(self, peer: PeerID) -> None:
        """The link to `peer` is gone."""
        self.links.pop(peer, None)
        self._heard_of.pop(peer, None)

    def send(self, peer: PeerID, message: Message, now: float) -> None:
        """To nobody, if `peer` is not linked."""
        link = self.links.get(peer)
        if link is not None:
            link.sent = now
            if isinstance(message, Head):
                link.pause = message.pause / 1000
            self.actions.sends.append((peer, message))

    def send_all(self, peer: PeerID, messages: Sequence[Message], now: float) -> None:
        for message in messages:
            self.send(peer, message, now)

    def broadcast(self, message: Message, now: float) -> None:
        for peer in sorted(self.links):
            self.send(peer, message, now)

    def refuse(self, peer: PeerID, reason: str) -> None:
        self.actions.refusals.append(Refused(peer, reason))

    def drain(self) -> Actions:
        actions, self.actions = self.actions, Actions()
        return actions
