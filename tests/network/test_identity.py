"""Identities are libp2p's: same ids, same key files; signatures bind; damage is named."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hivemind.p2p import PeerID as LibraryPeerID
from hivemind.proto.crypto_pb2 import KeyType, PrivateKey, PublicKey
from hypothesis import given
from hypothesis import strategies as st

from network.identity import Identity, InvalidIdentity, load_or_create, peer_id_of, public_key_of, verify
from network.seam import PeerID

seeds = st.binary(min_size=32, max_size=32)


def test_the_key_file_is_libp2ps(tmp_path: Path) -> None:
    identity = load_or_create(tmp_path / "a" / "b" / "key")
    private: Any = PrivateKey.FromString((tmp_path / "a" / "b" / "key").read_bytes())
    assert private.key_type == KeyType.Ed25519
    assert private.data == identity.seed + identity.public_key


def test_the_peer_id_is_the_identity_multihash_of_libp2ps_public_key() -> None:
    identity = Identity(bytes(range(32)))
    encoded = PublicKey(key_type=KeyType.Ed25519, data=identity.public_key).SerializeToString()
    assert LibraryPeerID(b"\x00" + bytes([len(encoded)]) + encoded).to_base58() == identity.peer_id


def test_known_vectors() -> None:
    # RFC 8032, section 7.1, test 1; its peer id is the identity multihash of the protobuf public key, in base58.
    seed = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    identity = Identity(seed)
    assert identity.public_key.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert identity.sign(b"").hex() == (
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b"
    )
    # The specification's Ed25519 example of a peer id: its key is the one that is inside.
    known = PeerID("12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA")
    assert peer_id_of(public_key_of(known)) == known


def test_a_second_load_gives_the_same_identity_from_a_private_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert load_or_create(key).seed == load_or_create(key).seed
    assert stat.S_IMODE(os.stat(key).st_mode) == 0o400
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@given(seeds)
def test_ids_and_keys_convert_both_ways(seed: bytes) -> None:
    identity = Identity(seed)
    assert public_key_of(identity.peer_id) == identity.public_key
    assert peer_id_of(identity.public_key) == identity.peer_id
    assert identity.peer_id.startswith("12D3Koo")


@given(seeds, st.binary(max_size=200), st.integers(0, 511), st.binary(min_size=1, max_size=1))
def test_a_signature_binds_signer_and_message(seed: bytes, message: bytes, bit: int, extra: bytes) -> None:
    identity = Identity(seed)
    signature = identity.sign(message)
    assert identity.verify(identity.peer_id, message, signature)
    assert not verify(identity.peer_id, message + extra, signature)
    flipped = bytearray(signature)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not verify(identity.peer_id, message, bytes(flipped))
    other = Identity(bytes([seed[0] ^ 1]) + seed[1:])
    assert not verify(other.peer_id, message, signature)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.hex()))
def test_what_is_no_peer_id_is_rejected_and_verifies_nothing(text: str) -> None:
    with pytest.raises(InvalidIdentity):
        public_key_of(PeerID(text))
    assert not verify(PeerID(text), b"message", bytes(64))


@pytest.mark.parametrize("damage", ["cut", "flip", "other", "empty"])
def test_a_damaged_key_file_is_named(tmp_path: Path, damage: str) -> None:
    key = tmp_path / "key"
    load_or_create(key)
    raw = key.read_bytes()
    flipped = raw[:10] + bytes([raw[10] ^ 1]) + raw[11:]
    key.chmod(0o600)
    key.write_bytes({"cut": raw[:-1], "flip": flipped, "other": b"PEM" * 20, "empty": b""}[damage])
    with pytest.raises(InvalidIdentity, match="restore"):
        load_or_create(key)


def test_a_seed_of_another_length_is_rejected() -> None:
    with pytest.raises(InvalidIdentity):
        Identity(bytes(31))
