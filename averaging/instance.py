"""One round as one decree of single-decree Paxos: what this peer promised, accepted and heard on one previous record.

Pure: no I/O, no clock. The rules R2 to R6 of docs/PROTOCOL.md stand here; when to apply them is the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from averaging.contribution import Contribution
from averaging.messages import Promise
from averaging.record import (
    MEMBERS_MAX,
    NO_BALLOT,
    NORMAL,
    RECOVERY,
    Ballot,
    Certificate,
    Hash,
    Member,
    Record,
    acceptance_message,
    recovery_message,
)
from network.identity import Signer
from network.seam import PeerID

Assembly = tuple[Sequence[PeerID], Sequence[PeerID]]
"""Who votes, and, if those are not the same, who owns parts."""
OFFERS_PER_PEER_MAX = 8
PROPOSALS_MAX = 64


@final
@dataclass(frozen=True, slots=True)
class Vote:
    """What must survive a crash before it is spoken of (R3, R4)."""

    promised: Ballot = NO_BALLOT
    accepted_ballot: Ballot = NO_BALLOT
    accepted: Record | None = None


@final
@dataclass(frozen=True, slots=True)
class Proposal:
    """Somebody's PROPOSE that this voter may still answer."""

    ballot: Ballot
    record: Record
    carried: bool
    proposer: PeerID


@final
class Instance:
    """The state of the round that follows `head`, as seen by one peer."""

    def __init__(self, head: Record, vote: Vote, base: bytes | None = None, *, members_max: int = MEMBERS_MAX) -> None:
        self.head = head
        self.vote = vote
        self.members_max = members_max
        self.may_recruit = False
        """Whether a record may name voters that neither contributed nor voted: where owners contribute for others."""
        self.base = base
        """Fingerprint of this peer's own state at `head`; None until it is computed."""
        self.offers: dict[PeerID, Contribution] = {}
        """The newest offer of each peer on `head`."""
        self.held: dict[Hash, Contribution] = {}
        self.records: dict[Hash, Record] = {}
        self.acceptances: dict[tuple[Ballot, Hash], dict[PeerID, bytes]] = {}
        self.promises: dict[PeerID, Promise] = {}
        self.ballot: Ballot | None = None
        """The ballot that this peer prepared and has not yet proposed at."""
        self.proposal: Proposal | None = None
        """The newest proposal that waits for contributions to be fetched."""
        self.attempt_seen = max(0, vote.promised.attempt)
        if vote.accepted is not None:
            self.records[vote.accepted.hash] = vote.accepted

    # R1: offers.

    def hold(self, contribution: Contribution) -> bool:
        """Keeps an offer on this head; a later one of the same peer replaces it as that peer's offer."""
        assert contribution.prev == self.head.hash
        if contribution.digest in self.held:
            # What a journal held for a record is an offer only once its owner pushes it again.
            if contribution.owner in self.offers:
                return False
            self.offers[contribution.owner] = contribution
            return True
        repeats = contribution.owner in self.offers
        if repeats and sum(c.owner == contribution.owner for c in self.held.values()) >= OFFERS_PER_PEER_MAX:
            return False
        self.held[contribution.digest] = contribution
        self.offers[contribution.owner] = contribution
        return True

    def usable_owners(self) -> set[PeerID]:
        """Of `usable`, whose."""
        return {peer for peer, c in self.offers.items() if c.base == self.base}

    def usable(self) -> list[Contribution]:
        """The offers that a fresh proposal of this peer may name, by peer id: made from the same anchor as its own, and
        of those the first to come, as many as a round takes.
        """
        same = [c for c in self.offers.values() if c.base == self.base]
        return sorted(same[: self.members_max], key=lambda c: c.owner)

    # R2, R5: proposing.

    def may_propose_at_zero(self, me: PeerID) -> bool:
        return self.head.lead == me and self.vote.promised.attempt <= 0 and self.vote.accepted is None

    def fresh(
        self,
        me: PeerID,
        attempt: int,
        alive: Callable[[PeerID], bool],
        assemble: Callable[[Sequence[PeerID]], Assembly] = lambda voters: (voters, ()),
    ) -> Record:
        """A record of all usable offers. The next voters: the willing owners heard alive; if there are none (the only
        voter is leaving), the voters of this round heard alive; else the owners heard alive; else all owners. Of these
        and of others `assemble` chooses who votes, and who owns parts.
        """
        offers = self.usable()
        assert offers and self.base is not None
        owners = [c.owner for c in offers]
        willing = [c.owner for c in offers if c.willing and alive(c.owner)]
        heirs = sorted(p for p in self.head.voters if alive(p))
        voters = willing or heirs or [p for p in owners if alive(p)] or owners
        voting, owning = assemble(voters)
        members = tuple(Member(c.owner, c.weight, c.digest) for c in offers)
        tokens = self.head.tokens + sum(c.weight for c in offers)
        chosen = tuple(sorted(voting)), self.base, tokens, tuple(sorted(owning))
        return Record(NORMAL, self.head.hash, self.head.round + 1, me, attempt, members, *chosen)

    def promised_quorum(self) -> bool:
        return self.ballot is not None and self.head.is_quorum(self.promises)

    def carried(self) -> Record | None:
        """What a ballot with a quorum of promises must propose: the record accepted at their highest ballot, if any."""
        best = max(self.promises.values(), key=lambda p: p.accepted_ballot)
        return best.accepted

    # R3, R4: voting. Each returns the vote to make durable before it is spoken of, or None for a refusal.

    def promise(self, ballot: Ballot) -> Vote | None:
        self.attempt_seen = max(self.attempt_seen, ballot.attempt)
        return replace(self.vote, promised=ballot) if ballot > self.vote.promised else None

    def may_accept(self, ballot: Ballot) -> bool:
        return ballot >= self.vote.promised and ballot > self.vote.accepted_ballot

    def accept(self, ballot: Ballot, record: Record) -> Vote:
        assert self.may_accept(ballot)
        assert not self.missing(record)
        return Vote(ballot, ballot, record)

    def missing(self, record: Record) -> list[Hash]:
        return [m.digest for m in record.members if m.digest not in self.held]

    def flaw(self, record: Record) -> str | None:
        """Why `record` can never follow `head`, or None; contributions that are not held are not judged."""
        head = self.head
        if record.kind != NORMAL or record.prev != head.hash or record.round != head.round + 1:
            return "it does not follow the head"
        if record.origin not in head.voters:
            return f"its proposer {record.origin} is no voter"
        if not self.may_recruit and not set(record.voters) <= {*(m.peer for m in record.members), *head.voters}:
            return "it names a voter that neither contributed nor voted"
        if record.owners and not self.may_recruit:
            return "it names owners where everybody gets everything"
        if record.tokens != head.tokens + sum(m.weight for m in record.members):
            return "its token count is wrong"
        for member in record.members:
            offer = self.held.get(member.digest)
            claim = member.peer, member.weight, record.base
            if offer is not None and (offer.owner, offer.weight, offer.base) != claim:
                return f"it misstates the contribution of {member.peer}"
        return None

    # R6: deciding.

    def learn(self, record: Record) -> bool:
        """Remembers a proposed record, so that a quorum of acceptances of its hash can commit it."""
        if record.hash in self.records:
            return True
        if len(self.records) >= PROPOSALS_MAX:
            return False
        self.records[record.hash] = record
        return True

    def accepted_by(self, peer: PeerID, ballot: Ballot, record: Hash, signature: bytes) -> None:
        self.attempt_seen = max(self.attempt_seen, ballot.attempt)
        key = ballot, record
        if key not in self.acceptances and len(self.acceptances) >= PROPOSALS_MAX:
            # Keep the votes on the newest ballots: an old one can only be decided if a newer carries the same record.
            del self.acceptances[min(self.acceptances)]
        self.acceptances.setdefault(key, {})[peer] = signature

    def decided(self) -> tuple[Hash, Certificate] | None:
        """The record that a quorum accepted at one ballot, with the proof, whether or not its bytes are here."""
        for (ballot, record), signatures in self.acceptances.items():
            if self.head.is_quorum(signatures):
                return record, Certificate(ballot, dict(signatures))
        return None


def is_certified(previous: Record, record: Record, certificate: Certificate, signer: Signer) -> bool:
    """Whether `record` is a child of `previous`: accepted by a quorum of its voters, or a recovery that its origin
    signed. `signer` only verifies.
    """
    if record.prev != previous.hash or record.round != previous.round + 1:
        return False
    if record.kind == RECOVERY:
        signature = certificate.signatures.get(record.origin)
        is_empty = record.tokens == previous.tokens and record.attempt == 0 and record.origin in record.voters
        return is_empty and signature is not None and signer.verify(record.origin, recovery_message(record), signature)
    message = acceptance_message(previous.hash, certificate.ballot, record.hash)
    signed = {p for p in previous.voters if p in certificate.signatures}
    return record.kind == NORMAL and previous.is_quorum(
        {p for p in signed if signer.verify(p, message, certificate.signatures[p])}
    )


def settled_votes(
    records: Sequence[Record], certificates: Sequence[Certificate | None], votes: Mapping[Hash, Vote]
) -> dict[Hash, Vote]:
    """The votes to remember on leaving a chain: what was decided there stays decided.

    A vote for each record, as if it had been cast at its certificate's ballot, so that whoever stands there again
    reports it; claiming a chosen value is always safe.
    """
    settled: dict[Hash, Vote] = {}
    for record, certificate in zip(records, certificates, strict=True):
        if record.kind == NORMAL and certificate is not None:
            before = votes.get(record.prev, Vote())
            if before.accepted_ballot < certificate.ballot:
                settled[record.prev] = Vote(max(before.promised, certificate.ballot), certificate.ballot, record)
    return settled
