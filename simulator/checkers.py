"""What must hold in a swarm whatever goes wrong, checked at every report, every message and every commit."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import final

import anyio

from averaging.instance import OFFERS_PER_PEER_MAX, PROPOSALS_MAX
from averaging.messages import Accepted, Message, Propose
from averaging.record import NORMAL, RECOVERY, Ballot, Hash, Record
from network.seam import PeerID
from peer.member import Member
from peer.reports import Left, Note, Report, RoundDone, Trained, Validated

ROUNDS_KEPT_MAX = 256
"""Of contributions, for whoever replays: two snapshots' distance and some."""
NOTES_MAX = 1000


class Disagreement(AssertionError):
    """Two peers committed different things: the one failure that must never be."""


class NoProgress(AssertionError):
    """The swarm, or somebody in it, committed nothing for longer than anything explains."""


class Unbounded(AssertionError):
    """A queue or a table grew beyond what it may hold."""


@final
class Checks:
    """Looks at every report of every peer. Records form a tree: everything is keyed by them, not by the round."""

    def __init__(self, *, by_owners: bool = False) -> None:
        """`by_owners`: who contributes speaks for all who shared with it, so that tokens are counted in total only."""
        self._by_owners = by_owners
        self.records: dict[Hash, Record] = {}
        self.newest = 0
        self.tip: Record | None = None
        """The first to be seen of the newest round."""
        self.recovery_records = 0
        self.validation: dict[int, float] = {}
        self.left: dict[int, int] = {}
        self.last: dict[int, Record] = {}
        """Where each peer, by number, stood when it left."""
        self.committed_at: dict[int, tuple[float, int]] = {}
        """When each peer, by number, committed last, and which round."""
        self.notes: list[str] = []
        self.trace = hashlib.sha256()
        self.processed: dict[PeerID, int] = defaultdict(int)
        """Tokens, through all lives."""
        self.found: list[AssertionError] = []
        """What was seen where nobody may be interrupted."""
        self._children: dict[Hash, Hash] = {}
        self._fingerprints: dict[Hash, bytes] = {}
        self._losses: dict[bytes, float] = {}
        self._merged: dict[Hash, dict[PeerID, int]] = {}
        """For each record the tokens of every peer in the chain up to it."""
        self._life_tokens: dict[int, int] = {}
        self._proposed: dict[tuple[Hash, Ballot], Hash] = {}

    # Reports.

    def begins(self, number: int) -> None:
        """A life of this peer: it counts its tokens from zero again."""
        self._life_tokens[number] = 0

    def observe(self, number: int, peer: PeerID, report: Report, record: Record) -> None:
        """`record` is the newest that is applied at the peer; raises `Disagreement` and `BooksWrong`."""
        self.note(f"{number} {report!r}")
        if isinstance(report, RoundDone):
            self._on_round(number, report, record)
        elif isinstance(report, Trained):
            self.processed[peer] += report.tokens_processed - self._life_tokens.get(number, 0)
            self._life_tokens[number] = report.tokens_processed
        elif isinstance(report, Validated):
            self.validation[report.round] = report.loss
            if self._losses.setdefault(record.hash, report.loss) != report.loss:
                raise Disagreement(f"peer {number} measures another loss after round {report.round}")
        elif isinstance(report, Left):
            self.left[number] = report.round
            self.last[number] = record
        elif isinstance(report, Note) and len(self.notes) < NOTES_MAX:
            self.notes.append(f"{number}: {report.text}")

    def _on_round(self, number: int, report: RoundDone, record: Record) -> None:
        head = Hash(report.head)
        assert record.hash == head and record.prev == report.prev and record.round == report.round
        if record.kind == NORMAL and self._children.setdefault(record.prev, head) != head:
            raise Disagreement(f"peer {number} committed a second record as round {record.round}, after the same one")
        if self._fingerprints.setdefault(head, report.fingerprint) != report.fingerprint:
            raise Disagreement(f"peer {number} has another state after round {record.round}")
        if head not in self.records:
            self._count(record)
            self.recovery_records += record.kind == RECOVERY
        self.committed_at[number] = anyio.current_time(), record.round

    def _count(self, record: Record) -> None:
        self.records[record.hash] = record
        merged = dict(self._merged.get(record.prev, {}))
        for member in record.members:
            merged[member.peer] = merged.get(member.peer, 0) + member.weight
            if not self._by_owners and merged[member.peer] > self.processed[member.peer]:
                raise Disagreement(
                    f"round {record.round} brings the tokens merged of {member.peer} to {merged[member.peer]}; "
                    f"it processed {self.processed[member.peer]}"
                )
        if sum(merged.values()) > sum(self.processed.values()):
            raise Disagreement(f"round {record.round}: more tokens are merged than anybody processed")
        self._merged[record.hash] = merged
        if self.tip is None or record.round > self.newest:
            self.newest, self.tip = record.round, record

    @property
    def final(self) -> Record | None:
        """Where the run stands: of those who left the newest, else the newest of all; a chain that was left is none."""
        known = [record for record in self.last.values() if record.hash in self.records]
        return max(known, key=lambda record: record.round, default=self.tip)

    def merged(self) -> dict[PeerID, int]:
        """Tokens merged in the final chain, by peer."""
        return {} if self.final is None else self._merged[self.final.hash]

    def chain(self) -> list[Record]:
        """From the first round to the final record."""
        records = []
        record = self.final
        while record is not None:
            records.append(record)
            record = self.records.get(record.prev)
        return records[::-1]

    def note(self, text: str) -> None:
        self.trace.update(f"{anyio.current_time():.6f} {text}\n".encode())

    # Messages.

    def sent(self, peer: PeerID, message: Message) -> None:
        """Two values at one ballot would undo everything, committed or not. Never raises: see `found`."""
        if isinstance(message, Propose):
            key, record = (message.record.prev, message.ballot), message.record.hash
        elif isinstance(message, Accepted):
            key, record = (message.prev, message.ballot), message.record
        else:
            return
        if self._proposed.setdefault(key, record) != record:
            self.found.append(Disagreement(f"{peer} votes for a second record at attempt {message.ballot.attempt}"))

    def raise_found(self) -> None:
        if self.found:
            raise self.found[0]


@final
class Bounds:
    """Samples the queues and tables of peers; `peaks` are the largest sizes that were seen."""

    def __init__(self, peers: int) -> None:
        offers = OFFERS_PER_PEER_MAX * 2 * peers  # Twice: a peer whose disk was lost is another one.
        self.limits = {
            "messages unread": 64 * peers + 256,
            "messages to one peer": 256,
            "commits to apply": 256,
            "offers": offers,
            "proposals": PROPOSALS_MAX,
            "ballots": PROPOSALS_MAX,
            "records to follow": 100_000,
            "contributions to follow": 16 * 2 * peers,
            "contributions to fetch": offers,
            "early offers": max(64, peers),
            "rounds kept": ROUNDS_KEPT_MAX,
        }
        self.peaks = dict.fromkeys(self.limits, 0)

    def sample(self, number: int, member: Member) -> None:
        """Raises `Unbounded`."""
        for what, size in _sizes(member).items():
            self.peaks[what] = max(self.peaks[what], size)
            if size > self.limits[what]:
                raise Unbounded(f"peer {number} holds {size} {what}, more than {self.limits[what]}")


def _sizes(member: Member) -> dict[str, int]:
    node, engine = member.node, member.node.engine
    instance, follow = engine.instance, engine.catch_up
    return {
        "messages unread": len(node._inbox),
        "messages to one peer": max((len(peer.queue) for peer in node.links._peers.values()), default=0),
        "commits to apply": len(node._commits),
        "offers": len(instance.held),
        "proposals": len(instance.records),
        "ballots": len(instance.acceptances),
        "records to follow": len(follow.pending),
        "contributions to follow": len(follow.held),
        "contributions to fetch": len(engine._fetcher._wanted),
        "early offers": len(engine.offering.early) + len(engine.offering.early_shares),
        "rounds kept": len(engine.chain.records) - engine.chain.oldest,
    }


def check_members(number: int, member: Member, now: float) -> None:
    """No peer believes a record of the directory that has expired by the peer's own clock `now`."""
    membership = member.membership
    if membership is not None:
        for peer in membership.members:
            if membership._known[peer].expires < now:
                raise Unbounded(f"peer {number} believes a record of {peer} that has expired")
