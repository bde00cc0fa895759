"""What the round protocol writes to disk, and how a restarted peer reads it back.

Two append-only files: the *log* of committed records, which only grows, and the *journal* of votes and contributions,
which is begun anew with every snapshot. A vote is in the journal before anybody hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import msgpack

from averaging.chain import Chain
from averaging.contribution import HEADER_BYTES_MAX, Contribution, parse_contribution
from averaging.instance import Vote, settled_votes
from averaging.record import (
    RECORD_BYTES_MAX,
    Certificate,
    Hash,
    Malformed,
    Record,
    as_bytes,
    as_hash,
    as_list,
    encode_ballot,
    encode_certificate,
    parse_ballot,
    parse_certificate,
    parse_record,
    unpack_list,
)
from network.identity import Signer

_VOTE, _PACKET = 1, 2
_ENTRY_BYTES_MAX = 2**32


class DamagedJournal(Exception):
    """The files of a peer contradict each other or its run: it must not vote from them."""


@final
@dataclass(frozen=True, slots=True)
class Restored:
    """What a peer's files say: its chain, its votes by the record that they follow, and what may still be decided."""

    chain: Chain
    votes: Mapping[Hash, Vote]
    undecided: tuple[Contribution, ...]

    def back_to(self, number: int) -> Restored:
        """With the chain as it was after round `number`: later records must be fetched again, what was said stays."""
        records, certificates = self.chain.records[number + 1 :], self.chain.certificates[number + 1 :]
        votes = {**self.votes, **settled_votes(records, certificates, self.votes)}
        self.chain.back_to(number)
        return replace(self, votes=votes)


def encode_commit(record: Record, certificate: Certificate) -> bytes:
    packed: bytes = msgpack.packb([record.encoded, encode_certificate(certificate)])
    return packed


def encode_bridge(chain: Chain, number: int) -> bytes:
    """The records after round `number`, as `read_list` reads them for `restore`. All of them: votes on what they
    decided are not in a journal that is begun now.
    """
    entries = []
    for record, certificate in zip(chain.records[number + 1 :], chain.certificates[number + 1 :], strict=True):
        assert certificate is not None
        entries.append(encode_commit(record, certificate))
    packed: bytes = msgpack.packb(entries)
    return packed


def read_list(data: bytes) -> list[bytes]:
    """The entries in a file of a snapshot; raises `DamagedJournal`."""
    try:
        return [
            as_bytes(entry, "entry", _ENTRY_BYTES_MAX) for entry in as_list(msgpack.unpackb(data), "entries", 2**32)
        ]
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedJournal(f"snapshot: damaged ({error})") from error


def encode_vote(head: Hash, vote: Vote) -> bytes:
    accepted = vote.accepted.encoded if vote.accepted is not None else None
    fields = [_VOTE, head, encode_ballot(vote.promised), encode_ballot(vote.accepted_ballot), accepted]
    packed: bytes = msgpack.packb(fields)
    return packed


def encode_packet(contribution: Contribution) -> bytes:
    packed: bytes = msgpack.packb([_PACKET, contribution.encoded])
    return packed


def restore(
    first: Record, log: Sequence[bytes], journal: Sequence[bytes], signer: Signer, payload_bytes_max: int
) -> Restored:
    """Rebuilds the protocol's durable state; raises `DamagedJournal`."""
    votes: dict[Hash, Vote] = {}
    packets: dict[Hash, Contribution] = {}
    try:
        for entry in journal:
            _read_entry(entry, votes, packets, signer, payload_bytes_max)
        chain = Chain(first)
        chain.keep_own(signer.peer_id, _ENTRY_BYTES_MAX)
        for entry in log:
            data, fields = unpack_list(entry, "log entry", _ENTRY_BYTES_MAX, 2)
            record = parse_record(as_bytes(data, "log record", RECORD_BYTES_MAX))
            if record.hash in chain:
                continue  # It was fetched again, after the state behind it had been lost.
            if record.prev in chain and record.prev != chain.head.hash:  # The chain was left for a better one.
                number = chain.round_of(record.prev)
                votes |= settled_votes(chain.records[number + 1 :], chain.certificates[number + 1 :], votes)
                chain.back_to(number)
            if record.prev != chain.head.hash or record.round != chain.head.round + 1:
                raise Malformed(f"log: round {record.round} does not follow round {chain.head.round}")
            found = [packets.get(m.digest) for m in record.members]
            held = [c for c in found if c is not None] if all(found) else None
            chain.append(record, parse_certificate(fields), held)
            if held is None:
                for own in (c for c in found if c is not None and c.owner == signer.peer_id):
                    chain.remember_own(own)
    except Malformed as error:
        raise DamagedJournal(str(error)) from error
    undecided = tuple(c for c in packets.values() if not chain.is_decided(c.prev))
    return Restored(chain, {head: vote for head, vote in votes.items() if not chain.is_decided(head)}, undecided)


def _read_entry(
    entry: bytes, votes: dict[Hash, Vote], packets: dict[Hash, Contribution], signer: Signer, payload_bytes_max: int
) -> None:
    try:
        kind, *fields = as_list(msgpack.unpackb(entry, raw=False), "journal entry", 5)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"journal: not an entry ({error})") from error
    if kind == _PACKET and len(fields) == 1:
        data = as_bytes(fields[0], "journal packet", _ENTRY_BYTES_MAX)
        contribution = parse_contribution(data, signer, payload_bytes_max + HEADER_BYTES_MAX)
        packets[contribution.digest] = contribution
    elif kind == _VOTE and len(fields) == 4:
        head, promised, accepted_ballot, accepted = fields
        record = parse_record(as_bytes(accepted, "vote", RECORD_BYTES_MAX)) if accepted is not None else None
        votes[as_hash(head, "vote.head")] = Vote(parse_ballot(promised), parse_ballot(accepted_ballot), record)
    else:
        raise Malformed(f"journal: unknown entry {kind!r}")


def compacted(chain: Chain, votes: Mapping[Hash, Vote], held: Mapping[Hash, Contribution]) -> list[bytes]:
    """The journal begun anew: the contributions that others may want, and all that was said of rounds that may still be
    decided, with their contributions.
    """
    packets = {c.digest: c for c in chain.retained()} | {d: c for d, c in held.items() if not chain.is_decided(c.prev)}
    said = {head: vote for head, vote in votes.items() if vote != Vote() and not chain.is_decided(head)}
    return [*map(encode_packet, packets.values()), *(encode_vote(head, vote) for head, vote in said.items())]
