"""The log in memory: the records of one chain with their certificates, and the newest rounds' contributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from averaging.contribution import Contribution
from averaging.messages import KNOWN_MAX, LOG_BYTES_MAX, LOG_ENTRIES_MAX, LogEntry
from averaging.record import NORMAL, Certificate, Hash, Record
from network.seam import PeerID


@final
@dataclass(frozen=True, slots=True)
class Left:
    """A round that this peer moved away from (R9), and what it had said there; None if it said nothing, or no longer
    has it.
    """

    record: Record
    mine: Contribution | None


@final
class Chain:
    """Records from genesis to the head. Contributions are kept from `oldest` on, for whoever replays the log; one's own
    longer, for a move to another chain needs them.
    """

    def __init__(self, first: Record) -> None:
        self.records: list[Record] = [first]
        self.certificates: list[Certificate | None] = [None]
        self._round_of: dict[Hash, int] = {first.hash: 0}
        self._contributions: dict[Hash, Contribution] = {}
        self.oldest = 1
        """The first round from which on all contributions are here, and for which a snapshot stands in."""
        self._oldest_held = 1
        """Less than `oldest` while the head's contributions are still here."""
        self._me: PeerID | None = None
        self._own_bytes_max: int | None = None
        self._older_own: dict[Hash, Contribution] = {}
        """Of rounds before `oldest`, in their order."""

    @property
    def head(self) -> Record:
        return self.records[-1]

    def __contains__(self, record: object) -> bool:
        return record in self._round_of

    def round_of(self, record: Hash) -> int:
        return self._round_of[record]

    def keep_own(self, me: PeerID, bytes_max: int) -> None:
        """From now on keeps what `me` contributed, beyond `oldest` as much as fits into `bytes_max`."""
        self._me, self._own_bytes_max = me, bytes_max

    def own(self, record: Record) -> Contribution | None:
        """What this peer contributed to `record`, if it is still here."""
        member = None if self._me is None else record.member(self._me)
        if member is None:
            return None
        return self._contributions.get(member.digest) or self._older_own.get(member.digest)

    def remember_own(self, contribution: Contribution) -> None:
        """An own contribution to a round of which the others are no longer here."""
        self._older_own[contribution.digest] = contribution
        total = sum(len(c.encoded) for c in self._older_own.values())
        for digest, oldest in list(self._older_own.items()):
            if self._own_bytes_max is None or total <= self._own_bytes_max:
                break
            total -= len(oldest.encoded)
            del self._older_own[digest]

    def append(self, record: Record, certificate: Certificate, contributions: list[Contribution] | None) -> None:
        """`contributions` is None when the state after `record` came from a snapshot."""
        assert record.prev == self.head.hash
        assert record.round == self.head.round + 1
        self.records.append(record)
        self.certificates.append(certificate)
        self._round_of[record.hash] = record.round
        if contributions is None:
            self.forget_before(record.round + 1)
        else:
            self._contributions.update((c.digest, c) for c in contributions)

    def back_to(self, number: int) -> list[Left]:
        """Forgets the records after round `number`; returns them, oldest first."""
        gone = [Left(record, self.own(record)) for record in self.records[number + 1 :]]
        for record in self.records[number + 1 :]:
            del self._round_of[record.hash]
            for member in record.members:
                self._contributions.pop(member.digest, None)
                self._older_own.pop(member.digest, None)
        del self.records[number + 1 :], self.certificates[number + 1 :]
        self.oldest = min(self.oldest, number + 1)
        self._oldest_held = min(self._oldest_held, number + 1)
        return gone

    def is_decided(self, record: Hash) -> bool:
        """Whether the round after `record` was decided in this chain: nothing said about it matters any more."""
        number = self._round_of.get(record, len(self.records)) + 1
        return number < len(self.records) and self.records[number].kind == NORMAL

    def known(self) -> tuple[Hash, ...]:
        """The newest records' hashes, then sparser ones down to the first (at most `KNOWN_MAX`)."""
        hashes: list[Hash] = []
        number, step = len(self.records) - 1, 1
        while number > 0 and len(hashes) < KNOWN_MAX - 1:
            hashes.append(self.records[number].hash)
            step = step if len(hashes) < 8 else 2 * step
            number -= step
        return (*hashes, self.records[0].hash)

    def first_known(self, hashes: Sequence[Hash]) -> Hash | None:
        return next((h for h in hashes if h in self._round_of), None)

    def contribution(self, digest: Hash) -> Contribution | None:
        return self._contributions.get(digest) or self._older_own.get(digest)

    def contributions_of(self, record: Record) -> list[Contribution] | None:
        found = [self._contributions.get(m.digest) for m in record.members]
        return [c for c in found if c is not None] if all(found) else None

    def after(self, record: Hash, limit: int = LOG_ENTRIES_MAX) -> list[LogEntry] | None:
        """The entries that follow `record`, oldest first, as many as one message may hold; None if it is not in this
        chain.
        """
        start = self._round_of.get(record)
        if start is None:
            return None
        entries: list[LogEntry] = []
        size = 0
        for number in range(start + 1, min(start + 1 + limit, len(self.records))):
            entry = self._entry(number)
            size += entry.bytes_about
            if entries and size > LOG_BYTES_MAX:
                break
            entries.append(entry)
        return entries

    def entries_after(self, number: int) -> list[LogEntry]:
        return [self._entry(n) for n in range(number + 1, len(self.records))]

    def rounds_after(self, record: Hash) -> list[Record]:
        """All records that follow `record`, which is in this chain."""
        return self.records[self._round_of[record] + 1 :]

    def _entry(self, number: int) -> LogEntry:
        record, certificate = self.records[number], self.certificates[number]
        assert certificate is not None
        held = self.contributions_of(record) if number >= self._oldest_held else None
        return LogEntry(record, certificate, sum(len(c.encoded) for c in held) if held else 0)

    def forget_before(self, number: int) -> None:
        """Drops the contributions of rounds before `number`; a snapshot at `number - 1` or later stands in for them.
        The head's stay: until a later record certifies a snapshot of it, who lacks that round can only replay it.
        """
        until = min(number, self.head.round)
        for record in self.records[self._oldest_held : until]:
            for member in record.members:
                dropped = self._contributions.pop(member.digest, None)
                if dropped is not None and member.peer == self._me:
                    self.remember_own(dropped)
        self._oldest_held = max(self._oldest_held, until)
        self.oldest = max(self.oldest, number)

    def retained(self) -> list[Contribution]:
        members = [m.digest for record in self.records[self._oldest_held :] for m in record.members]
        return [*self._older_own.values(), *(self._contributions[d] for d in members if d in self._contributions)]
