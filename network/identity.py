"""Who a peer is: an Ed25519 key, the libp2p peer id made from it, signatures, and the key file on disk."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import final

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from network.seam import PeerID

SIGNATURE_BYTES = 64
KEY_BYTES = 32
# A libp2p peer id of an Ed25519 key is the identity multihash (00 24) of the protobuf PublicKey{type 1, 32 bytes}.
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# p2pd's key file is the protobuf PrivateKey{type 1, data = 32-byte seed + 32-byte public key}.
_KEY_FILE_PREFIX = bytes.fromhex("08011240")


class InvalidIdentity(ValueError):
    """A peer id or a key file that is not Ed25519 in libp2p's form."""


class Signer(ABC):
    """Signs as one peer and checks the signatures of all."""

    peer_id: PeerID

    @abstractmethod
    def sign(self, message: bytes) -> bytes: ...

    @abstractmethod
    def verify(self, peer: PeerID, message: bytes, signature: bytes) -> bool: ...


@final
class Identity(Signer):
    """An Ed25519 key pair."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise InvalidIdentity(f"an Ed25519 seed has {KEY_BYTES} bytes, not {len(seed)}")
        self.seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    # The same function for every identity: who caches by it, caches for all.
    @staticmethod
    def verify(peer: PeerID, message: bytes, signature: bytes) -> bool:
        return verify(peer, message, signature)


def verify(peer: PeerID, message: bytes, signature: bytes) -> bool:
    """Whether `peer` signed `message`; False too for an id that holds no Ed25519 key."""
    try:
        _public_key(peer).verify(signature, message)
    except (InvalidSignature, InvalidIdentity):
        return False
    return True


@lru_cache(maxsize=4096)
def _public_key(peer: PeerID) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer))


@lru_cache(maxsize=4096)
def peer_id_of(public_key: bytes) -> PeerID:
    return PeerID(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


@lru_cache(maxsize=4096)
def public_key_of(peer: PeerID) -> bytes:
    """The 32-byte public key inside a peer id; raises `InvalidIdentity`."""
    try:
        raw = base58.b58decode(peer)
    except ValueError as error:
        raise InvalidIdentity(f"peer id {peer!r} is not base58") from error
    if len(raw) != len(_PEER_ID_PREFIX) + KEY_BYTES or not raw.startswith(_PEER_ID_PREFIX):
        raise InvalidIdentity(f"peer id {peer!r} is not that of an Ed25519 key (they begin with 12D3Koo)")
    return raw[len(_PEER_ID_PREFIX) :]


def load_or_create(path: Path) -> Identity:
    """The identity in the key file at `path`, made on first use (mode 0400, directory created, atomically)."""
    try:
        return load(path)
    except FileNotFoundError:
        pass
    identity = Identity(os.urandom(KEY_BYTES))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as file:
        file.write(_KEY_FILE_PREFIX + identity.seed + identity.public_key)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # Fails if another process was faster; its key then counts.
    except FileExistsError:
        return load(path)
    finally:
        draft.unlink()
    return identity


def load(path: Path) -> Identity:
    """The identity in the key file at `path`; raises `InvalidIdentity`, and `FileNotFoundError` if there is none."""
    raw = path.read_bytes()
    size = len(_KEY_FILE_PREFIX) + 2 * KEY_BYTES
    if len(raw) != size or not raw.startswith(_KEY_FILE_PREFIX):
        raise InvalidIdentity(
            f"{path} is not an Ed25519 key file in libp2p's form; restore it from a backup or move it away"
        )
    identity = Identity(raw[len(_KEY_FILE_PREFIX) :][:KEY_BYTES])
    if identity.public_key != raw[-KEY_BYTES:]:
        raise InvalidIdentity(f"{path} is damaged: its two halves do not belong together; restore it from a backup")
    return identity
