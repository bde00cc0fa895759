"""A contribution: what one peer offers to one round, signed, so that nobody else can change or forge it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import msgpack

from averaging.record import (
    FINGERPRINT_BYTES,
    HASH_BYTES,
    Hash,
    Malformed,
    as_bytes,
    as_flag,
    as_hash,
    as_integer,
    as_peer,
    sha256,
    unpack_list,
)
from network.identity import SIGNATURE_BYTES, Signer, public_key_of
from network.seam import PeerID

HEADER_BYTES_MAX = 512
_DOMAIN = b"peer contribution 1\0"


@final
@dataclass(frozen=True)
class Contribution:
    """`prev`: the record whose child may commit it, and no other; `base`: the owner's fingerprint at `prev`;
    `weight`: the tokens in it; `willing`: whether the owner offers to vote on the next round; `payload`: its packets.
    """

    prev: Hash
    owner: PeerID
    weight: int
    base: bytes
    willing: bool
    payload: bytes
    signature: bytes = b""

    @cached_property
    def header(self) -> bytes:
        fields = [self.prev, public_key_of(self.owner), self.weight, self.base, self.willing, sha256(self.payload)]
        packed: bytes = msgpack.packb(fields)
        return packed

    @cached_property
    def digest(self) -> Hash:
        """The name of this contribution in records; covers the payload through its hash."""
        return sha256(self.header)

    @cached_property
    def encoded(self) -> bytes:
        packed: bytes = msgpack.packb([self.header, self.signature, self.payload])
        return packed


def sign_contribution(
    signer: Signer, prev: Hash, weight: int, base: bytes, willing: bool, payload: bytes
) -> Contribution:
    draft = Contribution(prev, signer.peer_id, weight, base, willing, payload)
    return Contribution(prev, signer.peer_id, weight, base, willing, payload, signer.sign(_DOMAIN + draft.digest))


def parse_contribution(data: bytes, signer: Signer, bytes_max: int) -> Contribution:
    """Raises `Malformed` unless the bytes are canonical, whole and signed by their owner."""
    header, signature, payload = unpack_list(data, "contribution", bytes_max, 3)
    header = as_bytes(header, "contribution.header", HEADER_BYTES_MAX)
    prev, owner, weight, base, willing, payload_hash = unpack_list(header, "contribution.header", HEADER_BYTES_MAX, 6)
    contribution = Contribution(
        prev=as_hash(prev, "contribution.prev"),
        owner=as_peer(owner, "contribution.owner"),
        weight=as_integer(weight, "contribution.weight"),
        base=as_bytes(base, "contribution.base", FINGERPRINT_BYTES, exact=True),
        willing=as_flag(willing, "contribution.willing"),
        payload=as_bytes(payload, "contribution.payload", bytes_max),
        signature=as_bytes(signature, "contribution.signature", SIGNATURE_BYTES, exact=True),
    )
    if as_bytes(payload_hash, "contribution.payload_hash", HASH_BYTES) != sha256(contribution.payload):
        raise Malformed(f"contribution of {contribution.owner}: its payload does not match its hash")
    if contribution.header != header:
        raise Malformed("contribution.header: not in canonical form")
    if not signer.verify(contribution.owner, _DOMAIN + contribution.digest, contribution.signature):
        raise Malformed(f"contribution of {contribution.owner}: wrong signature")
    return contribution
