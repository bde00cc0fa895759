"""One engine under test, its disk and what it says; and three voters with their offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from averaging import journal
from averaging.config import EngineConfig
from averaging.contribution import Contribution
from averaging.engine import Engine
from averaging.instance import Vote
from averaging.messages import Accepted, Message, Offer, Propose
from averaging.outbox import Actions
from averaging.record import Ballot, Record, acceptance_message
from simulator.toy import ToySigner
from tests.averaging.strategies import SIGNERS, child_of, first, offer_of, signer_of

HEAD = first(3)
LEAD = signer_of(HEAD.lead)
ONE, TWO = (s for s in SIGNERS[:3] if s is not LEAD)
STRANGER = SIGNERS[5]
OFFERS = [offer_of(s, HEAD) for s in SIGNERS[:3]]
OTHER_BASE = b"\x01" * 16
CONFIG = EngineConfig(payload_bytes_max=1000, weight_max=1000, snapshot_bytes=10**9)


@dataclass
class Peer:
    """An engine, its disk, and all it said."""

    engine: Engine
    disk: list[bytes]

    def __init__(self, signer: ToySigner, disk: Sequence[bytes] = (), head: Record = HEAD, parts: int = 0) -> None:
        self.disk = list(disk)
        restored = journal.restore(head, [], self.disk, signer, 1000)
        config = replace(CONFIG, parts=parts)
        self.engine = Engine(signer, config, restored, check=lambda payload: None, nonce=1, now=0.0)
        for other in SIGNERS[:6]:
            if other is not signer:
                self.engine.connected(other.peer_id, 0.0)
        self.engine.anchored(head.hash, head.base, 0.0)
        self.drain()

    def hear(self, source: ToySigner, message: Message, now: float = 1.0) -> Actions:
        self.engine.receive(source.peer_id, message, now)
        return self.drain()

    def hold(self, offers: Sequence[Contribution] = OFFERS, now: float = 0.5) -> Actions:
        """Hears everybody's offers; says its own as if it had made it."""
        actions = Actions()
        for offer in offers:
            actions = self.hear(
                signer_of(offer.owner) if offer.owner != self.engine.me else TWO, Offer(offer.encoded), now
            )
        return actions

    def drain(self) -> Actions:
        actions = self.engine.drain()
        self.disk += [*actions.lazy, *actions.entries]
        return actions

    def vote_on_disk(self) -> Vote:
        signer = signer_of(self.engine.me)
        return journal.restore(HEAD, [], self.disk, signer, 1000).votes.get(HEAD.hash, Vote())


def said(actions: Actions, kind: type[Message]) -> list[Message]:
    unique = {id(m): m for _, m in actions.sends if isinstance(m, kind)}
    return list(unique.values())


def proposal(record: Record, ballot: Ballot, carried: bool = False) -> Propose:
    signature = signer_of(ballot.owner).sign(acceptance_message(record.prev, ballot, record.hash))
    return Propose(ballot, record, carried, signature)


def accepted(signer: ToySigner, ballot: Ballot, record: Record) -> Accepted:
    signature = signer.sign(acceptance_message(record.prev, ballot, record.hash))
    return Accepted(record.prev, ballot, record.hash, signature)


def unsigned(propose: Propose) -> Propose:
    """The proposer's own acceptance does not count: the round stays open longer."""
    return replace(propose, signature=bytes(64))


ZERO = Ballot(0, LEAD.peer_id)
RECORD = child_of(HEAD, OFFERS)


def ballot_of(signer: ToySigner, attempt: int = 1) -> Ballot:
    return Ballot(attempt, signer.peer_id)
