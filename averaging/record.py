"""The log's records: what a round committed, who decides the next, and the certificate that proves it.

A record names the previous one by hash, so its bytes fix the whole chain behind it. It is never re-stamped: when a
later ballot carries it on, the same bytes travel and the ballot is in the message only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NewType, final

import msgpack

from network.identity import KEY_BYTES, SIGNATURE_BYTES, peer_id_of, public_key_of
from network.seam import PeerID

Hash = NewType("Hash", bytes)
"""SHA-256 of a record's or contribution's bytes, 32 bytes."""

HASH_BYTES = 32
FINGERPRINT_BYTES = 16
MEMBERS_MAX = 256
RECORD_BYTES_MAX = 64 * 1024
INTEGER_MAX = 2**62
_FORMAT = 1

GENESIS, NORMAL, RECOVERY = 0, 1, 2


class Malformed(ValueError):
    """A stranger's bytes that are not a record, contribution, certificate or message; the text names the field."""


@dataclass(frozen=True, slots=True, order=True)
class Ballot:
    """An attempt at a round and the voter that owns it; attempt 0 belongs to the lead that the record names."""

    attempt: int
    owner: PeerID


NO_BALLOT = Ballot(-1, PeerID(""))


@dataclass(frozen=True, slots=True)
class Member:
    """One contribution that a record commits: whose, its weight in tokens, the hash of its bytes."""

    peer: PeerID
    weight: int
    digest: Hash


@final
@dataclass(frozen=True)
class Record:
    """One committed round. `members` and `voters` are sorted by peer id; `base` is the fingerprint before this round;
    `tokens` counts all tokens merged in the chain up to and with this record. A recovery commits nothing: it names
    those who go on without a quorum of the previous record's voters (R8). `owners`, sorted too: who merges parts in the
    next round, where those are more than the voters; empty if the voters do.
    """

    kind: int
    prev: Hash
    round: int
    origin: PeerID
    attempt: int
    members: tuple[Member, ...]
    voters: tuple[PeerID, ...]
    base: bytes
    tokens: int
    owners: tuple[PeerID, ...] = ()

    @cached_property
    def encoded(self) -> bytes:
        members = [[public_key_of(m.peer), m.weight, m.digest] for m in self.members]
        voters = [public_key_of(peer) for peer in self.voters]
        fields = [_FORMAT, self.kind, self.prev, self.round, public_key_of(self.origin), self.attempt]
        owners = [[public_key_of(peer) for peer in self.owners]] if self.owners else []
        packed: bytes = msgpack.packb([*fields, members, voters, self.base, self.tokens, *owners])
        return packed

    @cached_property
    def hash(self) -> Hash:
        return sha256(self.encoded)

    @cached_property
    def lead(self) -> PeerID:
        """Who owns ballot 0 of the next round; a function of these bytes only, so all agree on it."""
        if self.origin in self.voters:
            return self.origin
        return min(self.voters, key=lambda voter: sha256(self.hash + voter.encode()))

    def member(self, peer: PeerID) -> Member | None:
        return next((m for m in self.members if m.peer == peer), None)

    @cached_property
    def peers(self) -> frozenset[PeerID]:
        """Everyone whom it names."""
        return frozenset((*(m.peer for m in self.members), *self.voters, *self.owners))

    def is_better(self, other: Record) -> bool:
        """Whether the chain that ends here goes before the one that ends at `other` (R9): a total order."""
        return (self.tokens, other.hash) > (other.tokens, self.hash)

    def is_quorum(self, peers: set[PeerID] | Mapping[PeerID, object]) -> bool:
        """Whether `peers` may decide the next round: a voter weighs 2, the lead 3, and more than half is needed.

        So of two the lead alone goes on, and of every even split one side does (dynamic linear voting).
        """
        present = sum(3 if voter == self.lead else 2 for voter in self.voters if voter in peers)
        return 2 * present > 2 * len(self.voters) + 1


@final
@dataclass(frozen=True, slots=True)
class Certificate:
    """Signed acceptances of one record by a quorum of the previous record's voters, all at one ballot; of a recovery
    its origin's signature.
    """

    ballot: Ballot
    signatures: Mapping[PeerID, bytes]


def genesis(run_hash: Hash, creator: PeerID, base: bytes) -> Record:
    """The first record of a run: a function of its specification, so that everyone can make it."""
    return Record(GENESIS, run_hash, 0, creator, 0, (), (creator,), base, 0)


def acceptance_message(prev: Hash, ballot: Ballot, record: Hash) -> bytes:
    """What a voter signs when it accepts `record` as the child of `prev` at `ballot`."""
    return b"peer accepted 1\0" + prev + record + ballot.attempt.to_bytes(8, "big") + ballot.owner.encode()


def recovery_message(record: Record) -> bytes:
    """What the origin of a recovery signs."""
    return b"peer recovery 1\0" + record.hash


def sha256(data: bytes) -> Hash:
    return Hash(hashlib.sha256(data).digest())


# Parsing: the only place where strangers' records become values.


# The same record comes from many peers and in many messages.
@lru_cache(maxsize=256)
def parse_record(data: bytes) -> Record:
    """Raises `Malformed`; the record is well-formed, not yet valid (see `Instance.flaw`)."""
    fields = unpack_list(data, "record", RECORD_BYTES_MAX, 10, 11)
    form, kind, prev, number, origin, attempt, members, voters, base, tokens, *owners = fields
    if form != _FORMAT or kind not in (GENESIS, NORMAL, RECOVERY):
        raise Malformed(f"record: unknown format {form!r} or kind {kind!r}")
    record = Record(
        kind=kind,
        prev=as_hash(prev, "record.prev"),
        round=as_integer(number, "record.round"),
        origin=as_peer(origin, "record.origin"),
        attempt=as_integer(attempt, "record.attempt"),
        members=tuple(_parse_member(m) for m in as_list(members, "record.members", MEMBERS_MAX)),
        voters=tuple(as_peer(v, "record.voters") for v in as_list(voters, "record.voters", MEMBERS_MAX)),
        base=as_bytes(base, "record.base", FINGERPRINT_BYTES, exact=True),
        tokens=as_integer(tokens, "record.tokens"),
        owners=tuple(as_peer(o, "record.owners") for o in as_list(owners[0], "record.owners", MEMBERS_MAX))
        if owners
        else (),
    )
    if record.encoded != data:
        raise Malformed("record: not in canonical form")
    if list(record.voters) != sorted(set(record.voters)) or not record.voters:
        raise Malformed("record.voters: empty, unsorted or repeated")
    if list(record.owners) != sorted(set(record.owners)) or (record.owners and kind != NORMAL):
        raise Malformed("record.owners: unsorted, repeated, or not of a round")
    peers = [m.peer for m in record.members]
    if peers != sorted(set(peers)) or bool(peers) != (kind == NORMAL):
        raise Malformed("record.members: unsorted, repeated, or missing")
    return record


def _parse_member(fields: Any) -> Member:
    peer, weight, digest = as_list(fields, "record.members", 3, exact=True)
    return Member(as_peer(peer, "member.peer"), as_integer(weight, "member.weight"), as_hash(digest, "member.digest"))


def encode_ballot(ballot: Ballot) -> list[Any]:
    return [] if ballot == NO_BALLOT else [ballot.attempt, public_key_of(ballot.owner)]


def parse_ballot(fields: Any) -> Ballot:
    if fields == []:
        return NO_BALLOT
    attempt, owner = as_list(fields, "ballot", 2, exact=True)
    return Ballot(as_integer(attempt, "ballot.attempt"), as_peer(owner, "ballot.owner"))


def encode_certificate(certificate: Certificate) -> list[Any]:
    pairs = [[public_key_of(peer), signature] for peer, signature in sorted(certificate.signatures.items())]
    return [encode_ballot(certificate.ballot), pairs]


def parse_certificate(fields: Any) -> Certificate:
    ballot, pairs = as_list(fields, "certificate", 2, exact=True)
    signatures = {}
    for pair in as_list(pairs, "certificate.signatures", MEMBERS_MAX):
        peer, signature = as_list(pair, "certificate.signature", 2, exact=True)
        signatures[as_peer(peer, "certificate.peer")] = as_bytes(signature, "signature", SIGNATURE_BYTES, exact=True)
    parsed = parse_ballot(ballot)
    if parsed == NO_BALLOT:
        raise Malformed("certificate.ballot: missing")
    return Certificate(parsed, signatures)


def unpack_list(data: bytes, what: str, bytes_max: int, length: int, length_max: int | None = None) -> list[Any]:
    """A msgpack array of exactly `length` entries, or up to `length_max`, from a stranger's bytes."""
    if len(data) > bytes_max:
        raise Malformed(f"{what}: {len(data)} bytes, at most {bytes_max} are allowed")
    try:
        # The buffer's own size bounds every array and string that msgpack will allocate.
        fields = msgpack.unpackb(data, raw=False, max_ext_len=0, max_map_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise Malformed(f"{what}: not msgpack ({error})") from error
    if length_max is not None and isinstance(fields, list) and length < len(fields) <= length_max:
        return fields
    return as_list(fields, what, length, exact=True)


def as_list(value: Any, what: str, length_max: int, *, exact: bool = False) -> list[Any]:
    if not isinstance(value, list) or len(value) > length_max or (exact and len(value) != length_max):
        raise Malformed(f"{what}: not a list of {'' if exact else 'at most '}{length_max} entries")
    return value


def as_integer(value: Any, what: str, maximum: int = INTEGER_MAX) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        raise Malformed(f"{what}: {value!r} is not an integer between 0 and {maximum}")
    return value


def as_flag(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise Malformed(f"{what}: {value!r} is not true or false")
    return value


def as_bytes(value: Any, what: str, bytes_max: int, *, exact: bool = False) -> bytes:
    if not isinstance(value, bytes) or len(value) > bytes_max or (exact and len(value) != bytes_max):
        raise Malformed(f"{what}: not {'' if exact else 'at most '}{bytes_max} bytes")
    return value


def as_hash(value: Any, what: str) -> Hash:
    return Hash(as_bytes(value, what, HASH_BYTES, exact=True))


def as_peer(value: Any, what: str) -> PeerID:
    return peer_id_of(as_bytes(value, what, KEY_BYTES, exact=True))
