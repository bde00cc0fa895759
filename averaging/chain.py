"""The log in memory: the records of one chain with their certificates, and the newest rounds' contributions."""

from __future__ import annotations

from typing import final

from averaging.contribution import Contribution
from averaging.messages import LOG_BYTES_MAX, LOG_ENTRIES_MAX, LogEntry
from averaging.record import Certificate, Hash, Record


@final
class Chain:
    """Records from genesis to the head. Contributions are kept from `oldest` on, for whoever replays the log."""

    def __init__(self, first: Record) -> None:
        self.records: list[Record] = [first]
        self.certificates: list[Certificate | None] = [None]
        self._round_of: dict[Hash, int] = {first.hash: 0}
        self._contributions: dict[Hash, Contribution] = {}
        self.oldest = 1
        """The first round from which on all contributions are here."""

    @property
    def head(self) -> Record:
        return self.records[-1]

    def __contains__(self, record: Hash) -> bool:
        return record in self._round_of

    def round_of(self, record: Hash) -> int:
        return self._round_of[record]

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

    def contribution(self, digest: Hash) -> Contribution | None:
        return self._contributions.get(digest)

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

    def rounds_after(self, record: Hash) -> list[Record]:
        """All records that follow `record`, which is in this chain."""
        return self.records[self._round_of[record] + 1 :]

    def _entry(self, number: int) -> LogEntry:
        record, certificate = self.records[number], self.certificates[number]
        assert certificate is not None
        held = self.contributions_of(record) if number >= self.oldest else None
        return LogEntry(record, certificate, sum(len(c.encoded) for c in held) if held else 0)

    def forget_before(self, number: int) -> None:
        """Drops the contributions of rounds before `number`; a snapshot at `number - 1` or later stands in for them."""
        for record in self.records[self.oldest : number]:
            for member in record.members:
                self._contributions.pop(member.digest, None)
        self.oldest = max(self.oldest, number)

    def retained(self) -> list[Contribution]:
        return [self._contributions[m.digest] for r in self.records[self.oldest :] for m in r.members]
