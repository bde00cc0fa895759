"""A small group whose owners reduce: three voters, parts of fixed packets, and an owner's view of it."""

from __future__ import annotations

from collections.abc import Sequence

from averaging.config import EngineConfig
from averaging.contribution import Contribution, sign_contribution
from averaging.outbox import Link, Outbox
from averaging.owners import Owners, encode_parts, owned_parts
from averaging.record import Record
from simulator.toy import ToySigner
from tests.averaging.strategies import BASE, SIGNERS, first

PARTS = 6
HEAD = first(3)
VOTERS = SIGNERS[:3]
CONFIG = EngineConfig(
    payload_bytes_max=1000, weight_max=1000, snapshot_bytes=10**9, parts=PARTS, max_peers=20, voters_max=5
)
OTHER_BASE = b"\x01" * 16
PACKETS = [b"packet %d" % part for part in range(PARTS)]


def owning(head: Record = HEAD) -> list[ToySigner]:
    """The voters that own something."""
    owners = [s for s in VOTERS if owned_parts(head, s.peer_id, PARTS)]
    assert len(owners) > 1
    return owners


OWNER, OTHER_OWNER = owning()[:2]
SHARER = SIGNERS[4]


def share_of(signer: ToySigner, owner: ToySigner = OWNER, head: Record = HEAD, base: bytes = BASE) -> Contribution:
    packets = {part: PACKETS[part] for part in owned_parts(head, owner.peer_id, PARTS)}
    return sign_contribution(signer, head.hash, 10, base, True, encode_parts(packets))


def owners_of(signer: ToySigner, linked: Sequence[ToySigner] = SIGNERS[:6], head: Record = HEAD) -> Owners:
    outbox = Outbox(signer.peer_id, CONFIG.timing.silence_seconds)
    for other in linked:
        if other is not signer:
            outbox.links[other.peer_id] = Link(up=0.0, heard=0.0, sent=0.0)
    owners = Owners(signer, outbox, CONFIG, head)
    owners.begin(head, 0.0)
    owners.collector.base = BASE
    return owners
