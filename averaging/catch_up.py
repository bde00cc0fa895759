"""Following others: which peers are ahead, the verified records still to be applied, and when a snapshot is cheaper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from averaging.contribution import Contribution
from averaging.instance import verify_certificate
from averaging.messages import Log, LogEntry
from averaging.record import Certificate, Hash, Record, acceptance_message
from network.identity import Signer
from network.seam import PeerID

PENDING_MAX = 200_000
ASKED_IN_VAIN_MAX = 5
DOUBT_SECONDS = 10.0
"""Not for ever: where the network stood still for a while, all others were asked in vain."""
REPLAY_SECONDS_MAX = 30.0
"""Contributions that do not come for so long are not there, whatever a log says."""
REPLAY_ROUNDS_MAX = 48
"""A longer gap is jumped if a donor can be found: replaying costs a merge and a step for each round."""


@final
class CatchUp:
    """Pure; the engine feeds it and applies what it yields.

    A gap is replayed from the rounds' contributions (kilobytes each), or, when it is long, or those are gone or weigh
    more than the state itself, jumped by a snapshot that a record inside the verified gap attests.
    """

    def __init__(self, signer: Signer, snapshot_bytes: int) -> None:
        self._signer = signer
        self._snapshot_bytes = snapshot_bytes
        self.pending: list[LogEntry] = []
        self.held: dict[Hash, Contribution] = {}
        self.wants_snapshot = False
        self._no_donor = False
        self._ahead: dict[PeerID, tuple[float, int]] = {}
        self._asked: dict[PeerID, int] = {}
        self._doubted: dict[PeerID, int] = {}
        self._doubted_until = 0.0
        self._asked_at: float | None = None
        self._turn = 0
        self._waiting_for: Hash | None = None
        self._waiting_since = 0.0

    # Who is ahead, and whom to ask.

    def notice(self, peer: PeerID, number: int, now: float) -> None:
        """`peer` spoke of a record that this peer does not know, of round `number` at least."""
        if number <= self._doubted.get(peer, 0) and now < self._doubted_until:
            return
        since, known = self._ahead.get(peer, (now, 0))
        self._ahead[peer] = since, max(number, known)

    def lost(self, peer: PeerID) -> None:
        for known in (self._ahead, self._asked, self._doubted):
            known.pop(peer, None)

    @property
    def behind_since(self) -> float | None:
        return min((since for since, _ in self._ahead.values()), default=None)

    def ask_at(self, patience: float, retry: float) -> float | None:
        """When to ask for the log: the votes of the round in the air usually arrive first."""
        since = self.behind_since
        if since is None:
            return None
        return since + patience if self._asked_at is None else max(since + patience, self._asked_at + retry)

    def whom_to_ask(self, now: float) -> PeerID:
        """The next in turn of those ahead; who was asked often and never delivered is no longer believed."""
        assert self._ahead
        self._asked_at = now
        self._turn += 1
        peers = sorted(self._ahead)
        peer = peers[self._turn % len(peers)]
        self._asked[peer] = self._asked.get(peer, 0) + 1
        if self._asked[peer] > ASKED_IN_VAIN_MAX:
            del self._asked[peer]
            self._doubted[peer] = self._ahead.pop(peer)[1]
            self._doubted_until = now + DOUBT_SECONDS
        return peer

    # Records to be applied.

    def tip(self, head: Record) -> Record:
        return self.pending[-1].record if self.pending else head

    def receive(self, peer: PeerID, log: Log, head: Record) -> str | None:
        """Takes the part of `log` that extends what is known; returns what is wrong with it, or None."""
        self._asked_at = None
        tip = self.tip(head)
        if log.after not in {tip.hash, head.hash}:
            return None  # An answer to an older question.
        if log.after == head.hash and self.pending:
            known = len(self.pending)
            overlap = [e.record.hash for e in log.entries[:known]]
            if overlap != [e.record.hash for e in self.pending[: len(overlap)]]:
                return "its log differs from what others certified"
            for at, entry in enumerate(log.entries[:known]):
                if self.pending[at].payload_bytes == 0:  # This peer holds contributions that others lack.
                    self.pending[at] = replace(self.pending[at], payload_bytes=entry.payload_bytes)
            fresh: Sequence[LogEntry] = log.entries[known:]
        else:
            fresh = log.entries
        for entry in fresh[: PENDING_MAX - len(self.pending)]:
            if not self._follows(tip, entry.record, entry.certificate):
                return f"round {entry.record.round} has no valid certificate"
            self.pending.append(entry)
            self._asked.pop(peer, None)
            tip = entry.record
        if tip.round >= log.round:
            self._ahead.pop(peer, None)
        self._judge()
        return None

    def _follows(self, previous: Record, record: Record, certificate: Certificate) -> bool:
        message = acceptance_message(previous.hash, certificate.ballot, record.hash)
        return record.round == previous.round + 1 and verify_certificate(
            previous, record, certificate, lambda peer, signature: self._signer.verify(peer, message, signature)
        )

    def snapshot_failed(self) -> None:
        """No donor had a state that the gap certifies: replay if at all possible, else ask others for the log."""
        self._no_donor = True
        if any(e.payload_bytes == 0 for e in self.pending):
            self.pending = []
        self._judge()

    def _judge(self) -> None:
        gone = any(e.payload_bytes == 0 for e in self.pending)
        heavy = sum(e.payload_bytes for e in self.pending) > self._snapshot_bytes
        long = heavy or len(self.pending) > REPLAY_ROUNDS_MAX
        self.wants_snapshot = len(self.pending) > 1 and (gone or (long and not self._no_donor))

    def next(self, now: float) -> LogEntry | None:
        """The next record to replay, unless a snapshot is wanted instead."""
        if not self.pending or self.wants_snapshot:
            return None
        entry = self.pending[0]
        if self._waiting_for != entry.record.hash:
            self._waiting_for, self._waiting_since = entry.record.hash, now
        elif now - self._waiting_since > REPLAY_SECONDS_MAX:
            self.pending[0] = replace(entry, payload_bytes=0)
            self._judge()
        return entry

    def contributions(self, record: Record) -> list[Contribution] | None:
        found = [self.held.get(m.digest) for m in record.members]
        return [c for c in found if c is not None] if all(found) else None

    def applied(self, head: Record) -> None:
        """`head` was committed: what is pending up to it is done, or void if it belongs to another chain."""
        self._no_donor = False
        rounds = [e.record.hash for e in self.pending]
        if head.hash in rounds:
            done = self.pending[: rounds.index(head.hash) + 1]
            self.pending = self.pending[len(done) :]
            for entry in done:
                for member in entry.record.members:
                    self.held.pop(member.digest, None)
        elif self.pending and self.pending[0].record.prev != head.hash:
            self.pending = []
            self.held.clear()
        self._ahead = {p: (since, n) for p, (since, n) in self._ahead.items() if n > self.tip(head).round}
        self._judge()

    def child_of(self, head: Hash) -> Record | None:
        """The certified record that follows `head` in the gap: its `base` attests the state at `head`."""
        return next((e.record for e in self.pending if e.record.prev == head), None)

    def up_to(self, head: Hash) -> list[LogEntry]:
        rounds = [e.record.hash for e in self.pending]
        return self.pending[: rounds.index(head) + 1] if head in rounds else []
