"""Signed records, the values of the directory: whoever reads one knows that the peer named by its subkey wrote it.

A record is `version (1 byte) | Ed25519 signature (64 bytes) | payload`. The signature covers a domain string, the
hashed key, the expiry in milliseconds, and the payload; the subkey is the signer's peer id, hence its public key.
Only the *hash* of the key is covered, since that is all that a node which keeps the record for others ever sees.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import msgpack

from network.identity import SIGNATURE_BYTES, Identity, InvalidIdentity, Signer, peer_id_of, public_key_of
from network.seam import PeerID

Reason = Literal["format", "size", "expiry", "owner", "signature"]
Verify = Callable[[PeerID, bytes, bytes], bool]
"""`(peer, message, signature) -> valid`; a simulation may pass in a cheaper one than Ed25519."""

VERSION = 1
HEADER_BYTES = 1 + SIGNATURE_BYTES
KEY_ID_BYTES = 20
PEER_ID_CHARACTERS = 52
_DOMAIN = b"dht record 1:"
_MILLISECONDS_MAX = 2**53


class InvalidRecord(ValueError):
    """A record that is not to be believed; `reason` names the kind, for counting."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """What one record may take of those who keep it."""

    payload_bytes_max: int = 64 * 1024
    lifetime_seconds_max: float = 2 * 3600.0
    clock_seconds_slack: float = 10.0
    """How far ahead of ours the writer's clock may be."""


DEFAULT_LIMITS = RecordLimits()


def seal(signer: Signer, key: str, subkey: str, payload: bytes, expires: float) -> bytes:
    """The record in which `signer` says `payload` under `key` until the wall time `expires` (made by `expiry`)."""
    assert subkey == signer.peer_id, "a peer stores under its own id only"
    message = _message(key_id(key), _milliseconds(expires), payload)
    return bytes([VERSION]) + signer.sign(message) + payload


def open_record(
    key: str,
    subkey: str,
    value: bytes,
    expires: float,
    *,
    now: float | None = None,
    limits: RecordLimits = DEFAULT_LIMITS,
    verify: Verify = Identity.verify,
) -> bytes:
    """The payload of a record that the peer `subkey` signed for this key and expiry; raises `InvalidRecord`.

    Given `now`, it also refuses a record that has expired or claims to live longer than the limits allow.
    """
    return open_hashed(key_id(key), subkey, value, expires, now=now, limits=limits, verify=verify)


def open_hashed(
    hashed_key: bytes,
    subkey: object,
    value: object,
    expires: object,
    *,
    now: float | None = None,
    limits: RecordLimits = DEFAULT_LIMITS,
    verify: Verify = Identity.verify,
) -> bytes:
    """`open_record` for whoever knows only the key's hash, from arguments of any type; cheap checks come first."""
    if not isinstance(value, bytes) or len(hashed_key) != KEY_ID_BYTES:
        raise InvalidRecord("format", "no bytes, or no key hash")
    if not HEADER_BYTES <= len(value) <= HEADER_BYTES + limits.payload_bytes_max:
        raise InvalidRecord("size", f"{len(value)} bytes")
    if value[0] != VERSION:
        raise InvalidRecord("format", f"version {value[0]}")
    milliseconds = _milliseconds(expires)
    if now is not None:
        remaining = milliseconds / 1000 - now
        if not 0 <= remaining <= limits.lifetime_seconds_max + limits.clock_seconds_slack:
            raise InvalidRecord("expiry", f"in {remaining:.3f} s")
    owner = parse_peer_id(subkey)
    signature, payload = value[1:HEADER_BYTES], value[HEADER_BYTES:]
    if not _is_signed(verify, owner, _message(hashed_key, milliseconds, payload), signature):
        raise InvalidRecord("signature", f"not by {owner}")
    return payload


def parse_peer_id(text: object) -> PeerID:
    """`text` if it is an Ed25519 peer id in its one canonical spelling; raises `InvalidRecord`."""
    if not isinstance(text, str) or len(text) != PEER_ID_CHARACTERS:
        raise InvalidRecord("owner", "no Ed25519 peer id")
    try:
        public_key = public_key_of(PeerID(text))
    except InvalidIdentity as error:
        raise InvalidRecord("owner", str(error)) from error
    if peer_id_of(public_key) != text:
        raise InvalidRecord("owner", "a second spelling of a peer id")
    return PeerID(text)


def expiry(now: float, lifetime_seconds: float) -> float:
    """The wall time `lifetime_seconds` from now, in whole milliseconds, which is how the signature covers it."""
    return math.floor((now + lifetime_seconds) * 1000) / 1000


def just_after(expires: float) -> float:
    """The first expiry that replaces a record which expires at `expires`."""
    return (_milliseconds(expires) + 1) / 1000


def key_id(key: str) -> bytes:
    """The 20 bytes by which hivemind's DHT knows a key: SHA-1 of its msgpack form."""
    return hashlib.sha1(msgpack.packb(key, use_bin_type=True)).digest()


def _milliseconds(expires: object) -> int:
    if not isinstance(expires, float) or not 0 <= expires * 1000 < _MILLISECONDS_MAX:
        raise InvalidRecord("expiry", "no wall time")
    milliseconds = round(expires * 1000)
    # One expiry has one float: else a signed record could be made to look newer than it is.
    if milliseconds / 1000 != expires:
        raise InvalidRecord("expiry", "no whole milliseconds")
    return milliseconds


def _message(hashed_key: bytes, milliseconds: int, payload: bytes) -> bytes:
    # All parts but the last have a fixed length, so the concatenation can be read in one way only.
    # The digest keeps the cache of verified signatures small.
    return _DOMAIN + hashlib.sha256(hashed_key + milliseconds.to_bytes(8, "big") + payload).digest()


# Every replica of a key returns the same records at every heartbeat: a signature is worth checking once.
@lru_cache(maxsize=16384)
def _is_signed(verify: Verify, peer: PeerID, message: bytes, signature: bytes) -> bool:
    return verify(peer, message, signature)
