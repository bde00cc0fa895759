"""What peers say in the directory: which runs there are, what a run is, and who takes part and how far they are.

A fact's bytes are a msgpack map. Reading is strict about the fields it knows, under the limits below, and ignores
those it does not know, so that a newer peer may say more.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgpack

from dht.record import InvalidRecord, parse_peer_id
from network import identity
from network.identity import SIGNATURE_BYTES, Signer
from network.seam import PeerID

SCHEMA = 1
FACT_BYTES_MAX = 2048
SPEC_BYTES_MAX = 60 * 1024
SPEC_FACT_BYTES_MAX = 64 * 1024
NAME_CHARACTERS_MAX = 64
ADDRESSES_MAX = 8
ADDRESS_CHARACTERS_MAX = 160
WORD_CHARACTERS_MAX = 32
OFFERS_MAX = 8
HEAD_BYTES_MAX = 64
COUNT_MAX = 2**63
_RUN_ID = re.compile(r"[0-9a-f]{64}\Z")
_SPEC_DOMAIN = b"run specification 1:"


def runs_key() -> str:
    return "runs"


def spec_key(run_id: str) -> str:
    return f"spec/{run_id}"


def members_key(run_id: str) -> str:
    return f"members/{run_id}"


def run_id_of(spec: bytes) -> str:
    """A run is named by the SHA-256 of its specification, in hexadecimal."""
    return hashlib.sha256(spec).hexdigest()


@dataclass(frozen=True, slots=True)
class RunFact:
    """Under `runs_key()`: "there is this run". Its creator is hearsay until the `SpecFact` has been read."""

    run_id: str
    name: str
    creator: PeerID

    def encode(self) -> bytes:
        """Raises `InvalidRecord`, a ValueError, for a fact that no reader would accept."""
        payload = _pack({"run": self.run_id, "name": self.name, "creator": self.creator})
        RunFact.decode(payload)
        return payload

    @staticmethod
    def decode(payload: bytes) -> RunFact:
        """Raises `InvalidRecord`."""
        fields = _unpack(payload, FACT_BYTES_MAX)
        return RunFact(
            run_id=_run_id(fields),
            name=_text(fields, "name", NAME_CHARACTERS_MAX),
            creator=parse_peer_id(fields.get("creator")),
        )


@dataclass(frozen=True, slots=True)
class SpecFact:
    """Under `spec_key(run_id)`: the whole specification, signed by the run's creator, repeated by members."""

    spec: bytes
    creator: PeerID
    signature: bytes

    @staticmethod
    def by(signer: Signer, spec: bytes) -> SpecFact:
        if not 0 < len(spec) <= SPEC_BYTES_MAX:
            raise ValueError(f"the run specification has {len(spec)} bytes; it may have 1 to {SPEC_BYTES_MAX}")
        return SpecFact(spec, signer.peer_id, signer.sign(_SPEC_DOMAIN + hashlib.sha256(spec).digest()))

    @property
    def run_id(self) -> str:
        return run_id_of(self.spec)

    def encode(self) -> bytes:
        return _pack({"spec": self.spec, "creator": self.creator, "signature": self.signature})

    @staticmethod
    def decode(payload: bytes, run_id: str) -> SpecFact:
        """Raises `InvalidRecord` also where the bytes are not those that `run_id` names, or not signed."""
        fields = _unpack(payload, SPEC_FACT_BYTES_MAX)
        fact = SpecFact(
            spec=_bytes(fields, "spec", 1, SPEC_BYTES_MAX),
            creator=parse_peer_id(fields.get("creator")),
            signature=_bytes(fields, "signature", SIGNATURE_BYTES, SIGNATURE_BYTES),
        )
        if fact.run_id != run_id:
            raise InvalidRecord("format", f"this specification is of run {fact.run_id}, not {run_id}")
        if not identity.verify(fact.creator, _SPEC_DOMAIN + hashlib.sha256(fact.spec).digest(), fact.signature):
            raise InvalidRecord("signature", f"the specification is not signed by {fact.creator}")
        return fact


@dataclass(frozen=True, slots=True)
class MemberFact:
    """Under `members_key(run_id)`: "I take part, this is how to reach me, and this is how far I am"."""

    version: str
    """Of the peer's software."""
    name: str
    addresses: tuple[str, ...]
    nonce: int
    """Drawn at start: another one under the same peer id is a restart, or a second process with the same key."""
    head: bytes
    """The hash of the last committed record."""
    round: int
    tokens: int
    loss: float | None
    reachable: bool
    """False for a peer that can only dial out."""
    trains: bool
    offers: tuple[str, ...] = ()
    """What it does for others beyond its own training, such as "relay" or "snapshot"."""
    left: bool = False
    """Its last word: it has left the run."""

    def encode(self) -> bytes:
        """Raises `InvalidRecord`, a ValueError, for a fact that no reader would accept."""
        finite = self.loss is not None and math.isfinite(self.loss)
        payload = _pack(
            {
                "version": self.version,
                "name": self.name,
                "addresses": list(self.addresses),
                "nonce": self.nonce,
                "head": self.head,
                "round": self.round,
                "tokens": self.tokens,
                # A run that diverged must still be seen, and readers know no NaN.
                "loss": float(self.loss) if self.loss is not None and finite else None,
                "reachable": self.reachable,
                "trains": self.trains,
                "offers": list(self.offers),
                "left": self.left,
            }
        )
        MemberFact.decode(payload)
        return payload

    @staticmethod
    def decode(payload: bytes) -> MemberFact:
        """Raises `InvalidRecord`."""
        return _decode_member(payload)


# All peers of a simulation read the same facts.
@lru_cache(maxsize=2048)
def _decode_member(payload: bytes) -> MemberFact:
    fields = _unpack(payload, FACT_BYTES_MAX)
    return MemberFact(
        version=_text(fields, "version", WORD_CHARACTERS_MAX),
        name=_text(fields, "name", NAME_CHARACTERS_MAX),
        addresses=_texts(fields, "addresses", ADDRESSES_MAX, ADDRESS_CHARACTERS_MAX),
        nonce=_count(fields, "nonce"),
        head=_bytes(fields, "head", 0, HEAD_BYTES_MAX),
        round=_count(fields, "round"),
        tokens=_count(fields, "tokens"),
        loss=_finite(fields, "loss"),
        reachable=_flag(fields, "reachable"),
        trains=_flag(fields, "trains"),
        offers=_texts(fields, "offers", OFFERS_MAX, WORD_CHARACTERS_MAX),
        left=_flag(fields, "left"),
    )


def _pack(fields: Mapping[str, object]) -> bytes:
    packed: bytes = msgpack.packb({"schema": SCHEMA, **fields}, use_bin_type=True)
    return packed


def _unpack(payload: bytes, bytes_max: int) -> dict[str, object]:
    if len(payload) > bytes_max:
        raise InvalidRecord("size", f"a fact of {len(payload)} bytes")
    try:
        # No extension types and no array or map larger than the bytes that it comes from.
        fields = msgpack.unpackb(payload, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRecord("format", f"no msgpack: {error}") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise InvalidRecord("format", "no fact of this schema")
    return fields


def _run_id(fields: Mapping[str, object]) -> str:
    value = fields.get("run")
    if not isinstance(value, str) or not _RUN_ID.match(value):
        raise InvalidRecord("format", "run: no SHA-256 in hexadecimal")
    return value


def _text(fields: Mapping[str, object], name: str, characters_max: int) -> str:
    return _checked_text(name, fields.get(name), characters_max)


def _texts(fields: Mapping[str, object], name: str, number_max: int, characters_max: int) -> tuple[str, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > number_max:
        raise InvalidRecord("format", f"{name}: no list of at most {number_max}")
    return tuple(_checked_text(name, item, characters_max) for item in value)


def _checked_text(name: str, value: object, characters_max: int) -> str:
    # Only what can be printed: these strings end up in other people's terminals.
    if not isinstance(value, str) or len(value) > characters_max or not value.isprintable():
        raise InvalidRecord("format", f"{name}: no printable text of at most {characters_max} characters")
    return value


def _bytes(fields: Mapping[str, object], name: str, bytes_min: int, bytes_max: int) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes) or not bytes_min <= len(value) <= bytes_max:
        raise InvalidRecord("format", f"{name}: no {bytes_min} to {bytes_max} bytes")
    return value


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < COUNT_MAX:
        raise InvalidRecord("format", f"{name}: no count")
    return value


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if type(value) is not bool:
        raise InvalidRecord("format", f"{name}: no truth value")
    return value


def _finite(fields: Mapping[str, object], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not float or not math.isfinite(value):
        raise InvalidRecord("format", f"{name}: no finite number")
    return value
