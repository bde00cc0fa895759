"""Reduce by owners: in a large group everybody's packets would be too much for each, so they meet at one peer a part.

A peer cuts what it says into parts and sends each to the part's owner, a voter, as a *share*. An owner merges the
shares that came in time and offers the result as its contribution to the round: so a round commits what the owners
merged, and what a peer receives does not grow with the group. With its offer an owner tells each peer whether that
one's share is in it; who has the offer from others only does not know, and must take its share for lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import final

import msgpack

from averaging.config import EngineConfig
from averaging.contribution import Contribution, sign_contribution
from averaging.instance import Assembly
from averaging.messages import Share
from averaging.outbox import Outbox, Reduction
from averaging.record import Hash, Malformed, Record, as_bytes, as_integer, as_list, sha256
from averaging.round_clock import RoundClock
from averaging.timing import Timing, start_patience
from network.identity import Signer
from network.seam import PeerID

PARTS_MAX = 256
DUE_SECONDS = 0.05
DUE_SECONDS_EACH = 0.002
"""For so long, and so much longer for each who is expected, what was worked out holds: in a large group it is no little
work, and one share changes little."""
PEERS_PER_OWNER = 8
"""At least so many that share, before a further one owns parts."""
MANY_SHARES = 16
"""When there are more, one that comes changes nothing at once either."""
RECENT_ROUNDS = 4
"""Who shared in none of so many rounds is no longer waited for."""


def owner_of(head: Record, part: int, parts: int) -> PeerID:
    """The same everywhere, and when somebody goes few parts move but its own."""
    return _owners(head.owners or head.voters, parts)[part]


def owned_parts(head: Record, owner: PeerID, parts: int) -> list[int]:
    return [part for part, whose in enumerate(_owners(head.owners or head.voters, parts)) if whose == owner]


# All peers ask for the same.
@lru_cache(maxsize=64)
def _owners(peers: tuple[PeerID, ...], parts: int) -> list[PeerID]:
    """By rendezvous hashing with bounded loads: each part in turn goes to the peer with the lowest hash of those who
    do not own their share of all parts yet.
    """
    owners: list[PeerID] = []
    least, larger = divmod(parts, len(peers))
    loads = dict.fromkeys(peers, 0)
    for part in range(parts):
        name = b"owner" + part.to_bytes(4, "big")
        owner = min(loads, key=lambda peer: sha256(name + peer.encode()))
        owners.append(owner)
        loads[owner] += 1
        larger -= loads[owner] > least
        if loads[owner] > least or (loads[owner] == least and not larger):
            del loads[owner]
        if not larger:
            loads = {peer: load for peer, load in loads.items() if load < least}
    return owners


def encode_parts(packets: Mapping[int, bytes]) -> bytes:
    """The payload of a share, and of an owner's contribution."""
    packed: bytes = msgpack.packb([[part, packets[part]] for part in sorted(packets)])
    return packed


def parse_parts(payload: bytes) -> dict[int, bytes]:
    """Raises `Malformed`."""
    try:
        entries = as_list(msgpack.unpackb(payload, max_ext_len=0, max_map_len=0), "parts", PARTS_MAX)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"parts: not msgpack ({error})") from error
    packets = {}
    for entry in entries:
        part, packet = as_list(entry, "part", 2, exact=True)
        packets[as_integer(part, "part.number", PARTS_MAX - 1)] = as_bytes(packet, "part.packet", len(payload))
    if len(packets) < len(entries) or list(packets) != sorted(packets):
        raise Malformed("parts: unsorted or repeated")
    return packets


@final
@dataclass(slots=True)
class Collector:
    """The shares for the parts that this peer owns, as `RoundClock` looks at the offers of a round."""

    clock: RoundClock
    members_max: int
    base: bytes | None = None
    shares: dict[PeerID, Contribution] = field(default_factory=dict)
    is_closed: bool = False

    def usable_owners(self) -> set[PeerID]:
        return {peer for peer, share in self.shares.items() if share.base == self.base}

    def usable(self) -> list[Contribution]:
        """In peer-id order."""
        return [self.shares[peer] for peer in sorted(self.usable_owners())[: self.members_max]]


@final
class Owners:
    """One peer's shares in the round after `head`, and those that it merges for others."""

    def __init__(self, signer: Signer, outbox: Outbox, config: EngineConfig, head: Record) -> None:
        self.parts = config.parts
        self.head = head
        self.owned: list[int] = []
        self.collector = Collector(RoundClock(0.0, frozenset()), config.max_peers)
        self._signer = signer
        self._me = signer.peer_id
        self._outbox = outbox
        self._config = config
        self._mine: dict[PeerID, Contribution] = {}
        """This peer's shares, by the owner for whom they are."""
        self._sent: dict[PeerID, Contribution] = {}
        """Those that went out."""
        self._told: dict[Hash, bytes] = {}
        """Which share of this peer is in an owner's contribution, by its own word."""
        self.merged: dict[PeerID, Hash] = {}
        """Whose shares are in this peer's own contribution."""
        self._recent: dict[PeerID, int] = {}
        """Who shared with this owner, and in which round last."""
        self._owning_since = 0
        self._due: float | None = None
        self._due_from = -1.0
        self._due_shares = 0
        self._due_for: tuple[bytes | None, int, bool] | None = None

    def begin(self, head: Record, now: float) -> None:
        """The round after `head`."""
        before = self.collector
        freed = {**before.clock.freed, **dict.fromkeys(before.shares, now)}
        self._recent = {p: n for p, n in self._recent.items() if n > head.round - RECENT_ROUNDS}
        self._recent |= dict.fromkeys(before.shares, head.round)
        self._owning_since = self._owning_since if self.owned else head.round
        self.head = head
        self.owned = owned_parts(head, self._me, self.parts)
        self.collector = Collector(RoundClock(now, frozenset(self._recent), freed=freed), self._config.max_peers)
        self._mine, self._sent, self._told, self.merged = {}, {}, {}, {}
        self._due_for = None

    # A peer's own shares.

    def share(self, packets: Sequence[bytes], weight: int, base: bytes, willing: bool, now: float) -> None:
        """R1 in parts: to each owner its own; the parts of an owner that is not linked miss the round."""
        assert len(packets) == self.parts
        self._mine = {}
        for owner in self.head.owners or self.head.voters:
            mine = {part: packets[part] for part in owned_parts(self.head, owner, self.parts)}
            if mine:
                payload = encode_parts(mine)
                self._mine[owner] = sign_contribution(self._signer, self.head.hash, weight, base, willing, payload)
        for owner in sorted(self._mine):
            self.send_to(owner, now)

    def send_to(self, owner: PeerID, now: float) -> None:
        """Sends the share for this owner, if there is one and it can hear it; again after its link was broken."""
        share = self._mine.get(owner)
        if share is not None and (owner == self._me or owner in self._outbox.links):
            self._sent[owner] = share
            if owner == self._me:
                self.on_share(share)
            self._outbox.send(owner, Share(share.encoded), now)

    def shared(self, record: Record) -> tuple[frozenset[int], frozenset[int]] | None:
        """Of this peer's parts: which are in `record`, and of which that is not known. None if it shared nothing."""
        if not self._mine:
            return None
        heard: set[int] = set()
        unknown: set[int] = set()
        for member in record.members:
            if member.peer in self._sent:
                parts = owned_parts(self.head, member.peer, self.parts)
                told = self._told.get(member.digest)
                if told == self._sent[member.peer].digest:
                    heard.update(parts)
                elif told != b"":  # Nothing is known, or it is what an earlier process shared.
                    unknown.update(parts)
        return frozenset(heard), frozenset(unknown)

    def told(self, contribution: Contribution, merged: bytes) -> None:
        """The owner's word on this peer's share."""
        if len(self._told) < PARTS_MAX:
            self._told[contribution.digest] = merged

    # What this peer owns.

    def on_share(self, share: Contribution) -> bool:
        """Takes a share that is whole and signed; raises `Malformed` if it is not for this owner."""
        if list(parse_parts(share.payload)) != self.owned:
            raise Malformed(f"share of {share.owner}: not the parts that this peer owns")
        if self.collector.is_closed:
            return False
        self.collector.shares[share.owner] = share
        return True

    def due_at(self, timing: Timing, needed: int, now: float) -> float | None:
        """When this owner merges what it has; None while too few have shared."""
        collector = self.collector
        if collector.is_closed or not self.owned:
            return None

        known = collector.base, needed, self._outbox.leaving
        expected = len(collector.clock.contributors)
        look_at = self._due_from + DUE_SECONDS + DUE_SECONDS_EACH * expected
        holds = known == self._due_for and self._due_from <= now < look_at and (self._due is None or now < self._due)
        news = len(collector.shares) - self._due_shares
        if holds and news and MANY_SHARES < len(collector.shares) < expected:
            return look_at if self._due is None else min(self._due, look_at)
        if not holds or news:
            self._due_for, self._due_shares, self._due_from = known, len(collector.shares), now
            self._due = self._due_now(timing, needed, now)
        return self._due

    def _due_now(self, timing: Timing, needed: int, now: float) -> float | None:
        collector = self.collector

        def alive(peer: PeerID) -> bool:
            return self._outbox.alive(peer, now)

        if self.head.round < self._owning_since + RECENT_ROUNDS:
            collector.clock.contributors |= self._likely()
        patience = start_patience(timing, self._config.timing)
        collector.clock.start_if_enough(now, collector, needed, alive, patience)
        if len(collector.usable_owners()) < needed:
            return None
        if self._outbox.leaving:
            return now
        starts = collector.clock.start_at(patience)
        return starts if starts is not None else collector.clock.close_at(collector, timing, self._config.timing, alive)

    def look_again(self) -> None:
        """Who lives has changed."""
        self._due_for = None

    def _likely(self) -> frozenset[PeerID]:
        """Whose shares a new owner expects: of those linked with it, who stand where it stands or did a round ago."""
        here = (self.head.hash, self.head.prev)
        return frozenset({self._me, *(p for p, link in self._outbox.links.items() if link.head in here)})

    def close(self) -> Reduction:
        """No share is taken any more."""
        self.collector.is_closed = True
        return Reduction(self.head, tuple(self.collector.usable()))

    def offered(self, contribution: Contribution) -> None:
        """This peer's contribution merges the shares that it closed with."""
        self.merged = {share.owner: share.digest for share in self.collector.usable()}
        self._told[contribution.digest] = self.merged.get(self._me, b"")

    def assemble(self, likely: Sequence[PeerID], now: float) -> Assembly:
        """Who votes and who owns parts in the next round: of the `likely`, and of those who shared with this owner, are
        willing and alive. Who does so already comes first, for everybody is linked with whom the log names.

        A few voters are enough for any group, and votes go to everybody; but an owner sends and receives as much as the
        others' number over the owners', so with the group their number grows.
        """
        shares, head, room = self.collector.shares, self.head, self._config.voters_max
        willing = {*likely, *(p for p, s in shares.items() if s.willing and self._outbox.alive(p, now))}
        order = {peer: sha256(head.hash + peer.encode()) for peer in willing}
        voters = sorted(willing, key=lambda peer: (peer not in head.voters, order[peer]))[:room]
        owning = min(self.parts, -(-len(shares) // PEERS_PER_OWNER))
        if owning <= room:
            return voters, ()
        return voters, sorted(willing, key=lambda p: (p not in voters, p not in head.owners, order[p]))[:owning]
