"""Following others: which peers are ahead, the verified records still to be applied, and when a snapshot is cheaper."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import final

from averaging.chain import Chain
from averaging.contribution import Contribution
from averaging.instance import is_certified
from averaging.messages import Log, LogEntry
from averaging.record import Hash, Record
from network.identity import Signer
from network.seam import PeerID

PENDING_MAX = 200_000
ASKED_IN_VAIN_MAX = 5
DOUBT_SECONDS = 10.0
"""Not for ever: where the network stood still for a while, all others were asked in vain; and who was on a worse chain
may have a better one by now, and speak of it without saying of which round it is.
"""
REPLAY_SECONDS_MAX = 30.0
"""Contributions that do not come for so long are not there, whatever a log says."""
REPLAY_ROUNDS_MAX = 48
"""A longer gap is jumped if a donor can be found: replaying costs a merge and a step for each round."""


@final
class CatchUp:
    """Pure; the engine feeds it and applies what it yields.

    `pending` are verified records that follow `base`, a record of this peer's chain: its head, or, when the chains have
    parted, an older one. A gap is replayed from the rounds' contributions (kilobytes each), or, when it is long, or
    those are gone or weigh more than the state itself, jumped by a snapshot that a record inside the gap attests.
    """

    def __init__(self, signer: Signer, snapshot_bytes: int) -> None:
        self._signer = signer
        self._snapshot_bytes = snapshot_bytes
        self.base: Hash | None = None
        self.source: PeerID | None = None
        """Who gave the newest of what is pending."""
        self._common: Hash | None = None
        """Up to here another chain is known to be the same as this peer's own: the parting is sought from here on."""
        self.pending: list[LogEntry] = []
        self.held: dict[Hash, Contribution] = {}
        self.is_lost = False
        """This peer's own state is not what its log certifies: it must be fetched, wherever the log stands."""
        self._no_donor = False
        self._ahead: dict[PeerID, tuple[float, int]] = {}
        self._asked: dict[PeerID, int] = {}
        self._doubted: dict[PeerID, tuple[int, float]] = {}
        """Up to which round, and until when."""
        self._unsaid_since: dict[PeerID, float] = {}
        """When whoever is doubted first spoke of a record without saying of which round."""
        self._resumed: Hash | None = None
        """The last of the records that this peer had applied and must apply again: it leaves them only in order."""
        self._asked_at: float | None = None
        self._turn = 0
        self._waiting_for: Hash | None = None
        self._waiting_since = 0.0

    # Who is ahead, and whom to ask.

    def notice(self, peer: PeerID, number: int, now: float) -> None:
        """`peer` spoke of a record that this peer does not know, of round `number` (0 if it did not say)."""
        doubted, until = self._doubted.get(peer, (-1, 0.0))
        is_doubted = number <= doubted and now < until
        if is_doubted and (number > 0 or now < self._unsaid_since.setdefault(peer, now) + DOUBT_SECONDS):
            return
        since, known = self._ahead.get(peer, (now, 0))
        self._ahead[peer] = since, max(number, known)

    def lost(self, peer: PeerID, head: Record) -> None:
        for known in (self._ahead, self._asked, self._doubted, self._unsaid_since):
            known.pop(peer, None)
        self._give_up(peer, head)

    def _give_up(self, peer: PeerID, head: Record) -> None:
        """Nothing more comes of `peer`: a parted chain that is not all here must not keep out others."""
        if peer == self.source and self.pending and not self.follows(head) and not self.leads_away(head):
            self._drop()

    @property
    def behind_since(self) -> float | None:
        return min((since for since, _ in self._ahead.values()), default=None)

    def ask_at(self, patience: float, retry: float) -> float | None:
        """When to ask for the log: the votes of the round in the air usually arrive first."""
        since = self.behind_since
        if since is None:
            return None
        return since + patience if self._asked_at is None else max(since + patience, self._asked_at + retry)

    def whom_to_ask(self, head: Record, now: float) -> PeerID:
        """The next in turn of those ahead; who was asked often and never delivered is no longer believed."""
        assert self._ahead
        self._asked_at = now
        self._turn += 1
        peers = sorted(self._ahead)
        peer = peers[self._turn % len(peers)]
        self._asked[peer] = self._asked.get(peer, 0) + 1
        if self._asked[peer] > ASKED_IN_VAIN_MAX:
            self._doubt(peer, self._ahead[peer][1], now + DOUBT_SECONDS)
            self._give_up(peer, head)
        return peer

    def _doubt(self, peer: PeerID, number: int, until: float) -> None:
        """What `peer` says about rounds up to `number` is of no use here."""
        self._asked.pop(peer, None)
        self._ahead.pop(peer, None)
        self._unsaid_since.pop(peer, None)
        self._doubted[peer] = number, until

    # Records to be applied.

    def tip(self, head: Record) -> Record:
        return self.pending[-1].record if self.pending else head

    def known(self, chain: Chain) -> tuple[Hash, ...]:
        """What to tell whoever is asked for the log."""
        known = chain.known()
        first = self.pending[-1].record.hash if self.pending else self._common
        return known if first is None else (first, *known[:7], *known[8:])

    def follows(self, head: Record) -> bool:
        """Whether what is pending follows the head: else it is a chain that parted from this peer's."""
        return self.base == head.hash

    def receive(self, peer: PeerID, log: Log, chain: Chain) -> str | None:
        """Takes what `log` has beyond `chain` and what is pending; returns what is wrong with it, or None."""
        entries = list(log.entries)
        if self.pending and log.after == self.pending[-1].record.hash:
            previous = self.pending[-1].record
        elif log.after in chain:
            previous = chain.records[chain.round_of(log.after)]
            while entries and entries[0].record.hash in chain:
                previous = entries.pop(0).record
            if not entries and previous.round < log.round and previous.hash != self._common:
                self._common, self._asked_at = previous.hash, None
        else:
            return None  # An answer to an older question.
        if self.pending and previous.hash == self.base:
            previous, entries = self._overlap(previous, entries)
        for at, entry in enumerate(entries):
            if not is_certified(previous, entry.record, entry.certificate, self._signer):
                return f"round {entry.record.round} has no valid certificate"
            if at == 0 and not self._extends(previous.hash):
                if self._resumed is not None or (
                    self.pending and not entries[-1].record.is_better(self.pending[-1].record)
                ):
                    return None  # First the better one.
                self.base, self.pending = previous.hash, []
            if len(self.pending) >= PENDING_MAX:
                break
            self.pending.append(entry)
            self.source = peer
            self._asked.pop(peer, None)
            self._asked_at = None  # There may be more at once.
            previous = entry.record
        if previous.round >= log.round:
            self._ahead.pop(peer, None)
            self._judge_side(peer, log.round, chain.head)
        return None

    def _extends(self, previous: Hash) -> bool:
        return bool(self.pending) and self.pending[-1].record.hash == previous

    def _overlap(self, previous: Record, entries: list[LogEntry]) -> tuple[Record, list[LogEntry]]:
        """What of `entries` goes beyond what is pending; nothing, if they are of a chain that parts from that and is
        not better (a better one takes its place).
        """
        same = 0
        while same < min(len(entries), len(self.pending)) and entries[same].record == self.pending[same].record:
            if self.pending[same].payload_bytes == 0:  # This peer holds contributions that others lack.
                self.pending[same] = replace(self.pending[same], payload_bytes=entries[same].payload_bytes)
            same += 1
        if same == len(self.pending):
            return self.pending[-1].record, entries[same:]
        if entries and entries[-1].record.is_better(self.pending[-1].record) and self._resumed is None:
            return previous, entries
        return (entries[-1].record if entries else previous), []

    def _judge_side(self, peer: PeerID, number: int, head: Record) -> None:
        """A whole chain that parted from this peer's and is not better is dropped: its members will come over (R9)."""
        if self.pending and not self.follows(head) and not self.tip(head).is_better(head):
            self._drop()
            self._doubt(peer, number, inf)

    def _drop(self) -> None:
        self.base, self._common, self._resumed, self.pending = None, None, None, []
        self.held.clear()

    def leads_away(self, head: Record) -> bool:
        """Whether the chain that parted is known to be better than this peer's own."""
        return bool(self.pending) and not self.follows(head) and self.tip(head).is_better(head)

    def wants_snapshot(self, chain: Chain) -> bool:
        """Whether the state must, or should rather, be fetched than worked out."""
        if self.is_lost:
            return True
        # Not before most of the log is here: what a donor has may be newer than its beginning.
        growing = any(number > self.tip(chain.head).round + REPLAY_ROUNDS_MAX for _, number in self._ahead.values())
        if not self.pending or growing:
            return False
        gone = any(e.payload_bytes == 0 and e.record.members for e in self.pending)
        heavy = sum(e.payload_bytes for e in self.pending) > self._snapshot_bytes
        long = (heavy or len(self.pending) > REPLAY_ROUNDS_MAX) and not self._no_donor
        if self.follows(chain.head):
            return len(self.pending) > 1 and (gone or long)
        assert self.base is not None
        # The state where the chains parted can be worked out from a snapshot that is not younger.
        is_old = chain.round_of(self.base) < chain.oldest - 1
        return self.leads_away(chain.head) and (gone or long or is_old)

    def snapshot_failed(self) -> None:
        """No donor had a state that the gap certifies: replay if at all possible, else ask others for the log."""
        self._no_donor = True
        if any(e.payload_bytes == 0 and e.record.members for e in self.pending):
            self._drop()

    def next(self, chain: Chain, now: float) -> LogEntry | None:
        """The next record to replay, unless a snapshot is wanted instead."""
        if not self.pending or self.wants_snapshot(chain):
            return None
        entry = self.pending[0]
        if self._waiting_for != entry.record.hash:
            self._waiting_for, self._waiting_since = entry.record.hash, now
        elif now - self._waiting_since > REPLAY_SECONDS_MAX and entry.record.members:
            self.pending[0] = replace(entry, payload_bytes=0)
        return entry

    def lacking(self, count: int) -> list[Hash]:
        """The contributions that are not here of the next `count` rounds."""
        return [m.digest for e in self.pending[:count] for m in e.record.members if m.digest not in self.held]

    def applied(self, head: Record) -> None:
        """`head` was committed: what is pending up to it is done; what parts from the chain before it stays."""
        self._no_donor = False
        rounds = [e.record.hash for e in self.pending]
        if head.hash in rounds:
            done = self.pending[: rounds.index(head.hash) + 1]
            self.pending = self.pending[len(done) :]
            self.base = head.hash if self.pending else None
            self._resumed = None if self._resumed in rounds[: len(done)] else self._resumed
            for entry in done:
                for member in entry.record.members:
                    self.held.pop(member.digest, None)
        if not self.pending:
            self._drop()
        self._ahead = {p: (since, n) for p, (since, n) in self._ahead.items() if n > self.tip(head).round}

    def resume(self, base: Hash, entries: list[LogEntry]) -> None:
        """`entries` that this peer had applied are to be applied again, after `base`, before what is pending."""
        self.base, self.pending = base, [*entries, *self.pending]
        self._resumed = entries[-1].record.hash if entries else self._resumed

    def have_donor(self) -> None:
        """Whoever gave the state has the contributions since, whatever others said of them."""
        self.pending = [e if e.payload_bytes else replace(e, payload_bytes=1) for e in self.pending]

    def child_of(self, head: Hash, chain: Chain) -> Record | None:
        """The certified record that follows `head` in the gap, or, if the chain is to be left or its state is lost, in
        this peer's own chain as far as that stays: its `base` attests the state at `head`.
        """
        leads_away = self.leads_away(chain.head)
        if head == chain.head.hash and not self.is_lost:
            return None  # That state is here.
        if leads_away or self.follows(chain.head):
            inside = next((e.record for e in self.pending if e.record.prev == head), None)
            if inside is not None:
                return inside
        if head not in chain or not (leads_away or self.is_lost):
            return None
        last = chain.round_of(self.base) if leads_away and self.base is not None else len(chain.records) - 1
        number = chain.round_of(head) + 1
        return chain.records[number] if number <= last else None

    def up_to(self, head: Hash) -> list[LogEntry]:
        rounds = [e.record.hash for e in self.pending]
        return self.pending[: rounds.index(head) + 1] if head in rounds else []
