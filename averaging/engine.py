"""The round protocol as a state machine without I/O: messages and time go in; writes, sends and commits come out.

docs/PROTOCOL.md states the rules (R1 to R7). The caller must make `Actions.entries` durable before it sends
`Actions.sends`, and apply `Actions.commits` in order. Deterministic: same inputs, same outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from averaging import journal
from averaging.catch_up import CatchUp
from averaging.contribution import HEADER_BYTES_MAX, Contribution, parse_contribution, sign_contribution
from averaging.fetcher import Fetcher
from averaging.instance import Instance, Proposal, Vote
from averaging.messages import (
    Accepted,
    Get,
    GetLog,
    Head,
    Log,
    Message,
    Nack,
    Offer,
    Prepare,
    Promise,
    Propose,
)
from averaging.record import Ballot, Certificate, Hash, Malformed, Record, acceptance_message
from averaging.round_clock import Alive, RoundClock
from averaging.timing import Timing, TimingConfig
from network.identity import Signer
from network.seam import PeerID

EARLY_OFFERS_MAX = 64
RECENT_ROUNDS = 4
"""Who contributed to none of so many rounds is no longer waited for."""


@final
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and the group's sizes."""

    payload_bytes_max: int
    weight_max: int
    snapshot_bytes: int
    """About what a snapshot weighs: a gap whose contributions weigh more is jumped."""
    start_peers: int = 1
    """Offers that the first round waits for."""
    min_peers: int = 1
    """Contributions that any round needs."""
    timing: TimingConfig = field(default_factory=TimingConfig)


@final
@dataclass(frozen=True, slots=True)
class Commit:
    """One committed round; `contributions` are in the order of the record's members."""

    record: Record
    contributions: tuple[Contribution, ...]


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """What a peer sent was refused, and why."""

    peer: PeerID
    reason: str


@final
@dataclass(slots=True)
class Actions:
    """What the caller must do, in this order: make durable, send, apply, report."""

    entries: list[bytes] = field(default_factory=list)
    lazy: list[bytes] = field(default_factory=list)
    """Entries that may be written with the next durable write."""
    log: list[bytes] = field(default_factory=list)
    """Committed records, written after all other entries of the same write, so that none outlives its contributions."""
    sends: list[tuple[PeerID, Message]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    wants_snapshot: bool = False
    diverged: bool = False
    """A quorum's fingerprint differs from this peer's: its state must be fetched anew."""


@final
@dataclass(slots=True)
class Link:
    """What is known of one linked peer."""

    heard: float
    sent: float
    leaving: bool = False


@final
class Engine:
    """One peer's part in the rounds of one run."""

    def __init__(
        self,
        signer: Signer,
        config: EngineConfig,
        restored: journal.Restored,
        *,
        check: Callable[[bytes], None],
        nonce: int,
        now: float,
    ) -> None:
        """`check` raises `ValueError` on a payload that cannot be merged."""
        self.me = signer.peer_id
        self.signer = signer
        self.config = config
        self.chain = restored.chain
        self.nonce = nonce
        self._check_payload = check
        self.timing = Timing()
        self.leaving = False
        self.links: dict[PeerID, Link] = {}
        self.catch_up = CatchUp(signer, config.snapshot_bytes)
        self._fetcher = Fetcher()
        self._actions = Actions()
        self._early: dict[PeerID, Contribution] = {}
        self._told: set[tuple[PeerID, Hash]] = set()
        self._begin(now, restored.vote)
        for contribution in restored.undecided:
            self.instance.held[contribution.digest] = contribution
            self._durable.add(contribution.digest)

    # What the caller asks.

    @property
    def head(self) -> Record:
        return self.chain.head

    def alive(self, peer: PeerID, now: float) -> bool:
        if peer == self.me:
            return not self.leaving
        link = self.links.get(peer)
        return link is not None and not link.leaving and now - link.heard <= self.config.timing.silence_seconds

    def situation(self, now: float) -> str:
        """One sentence on why the round in the air is not committed yet."""
        head = self.head
        heard = sum(self.alive(p, now) for p in head.voters)
        offered = len(self.instance.usable())
        about = f"round {head.round + 1}, {now - self._clock.began:.0f} s old"
        if not head.is_quorum({p for p in head.voters if self.alive(p, now)}):
            return f"{about}: waiting for voters; {heard} of {len(head.voters)} are heard and that is no quorum"
        if self.catch_up.pending:
            return f"{about}: following others, {len(self.catch_up.pending)} rounds behind"
        if self._clock.started is None:
            return f"{about}: waiting for contributions; {offered} offered, {self._needed} needed, {heard} voters heard"
        proposed = "a proposal is in the air" if self._clock.proposed is not None else "the group is open"
        return f"{about}: {offered} contributions, {heard} of {len(head.voters)} voters heard, {proposed}"

    def drain(self) -> Actions:
        actions, self._actions = self._actions, Actions()
        actions.wants_snapshot = self.catch_up.wants_snapshot
        return actions

    def next_wake(self, now: float) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        times = [
            self._fetcher.next_due,
            self._close_at(now) if self.instance.may_propose_at_zero(self.me) else None,
            self._take_over_at(now),
            self.catch_up.ask_at(self._patience, self._retry) if self.links else None,
            min((link.sent for link in self.links.values()), default=now) + self.config.timing.heartbeat_seconds,
        ]
        return min(t for t in times if t is not None)

    # What the world says.

    def connected(self, peer: PeerID, now: float) -> None:
        """A link to `peer` can be written to (again): it hears where this peer stands and what it offered."""
        self.links[peer] = Link(heard=now, sent=now)
        self._told = {(p, h) for p, h in self._told if p != peer}
        self._send(peer, Head(self.head.hash, self.head.round, self.nonce, self.leaving), now)
        own = self.instance.offers.get(self.me)
        if own is not None:
            self._send(peer, Offer(own.encoded), now)

    def disconnected(self, peer: PeerID) -> None:
        self.links.pop(peer, None)
        self.catch_up.lost(peer)
        self._clock.freed.pop(peer, None)

    def offer(self, payload: bytes, weight: int, willing: bool, now: float) -> Contribution:
        """R1: pushes this peer's contribution to the round after the head; needs `anchored` for that head before."""
        assert self.instance.base is not None
        willing = willing and not self.leaving
        mine = sign_contribution(self.signer, self.head.hash, weight, self.instance.base, willing, payload)
        if self.instance.hold(mine):
            self._observe_offer(mine, now)
            self._broadcast(Offer(mine.encoded), now)
            self._progress(now)
        return mine

    def anchored(self, head: Hash, base: bytes, now: float) -> None:
        """This peer's state after the record `head` has the fingerprint `base`."""
        if head == self.head.hash:
            self.instance.base = base
            self._observe_clock(now)
            self._progress(now)

    def leave(self, now: float) -> None:
        """From now on this peer offers no vote, and says so; it still answers."""
        self.leaving = True
        self._broadcast(Head(self.head.hash, self.head.round, self.nonce, True), now)

    def adopt(self, head: Hash, now: float) -> bool:
        """The state at `head`, in the verified gap, was fetched: go on from there. False: there is no such gap."""
        entries = self.catch_up.up_to(head)
        for entry in entries:
            self._append(entry.record, entry.certificate, None, now)
        return bool(entries)

    def receive(self, peer: PeerID, message: Message, now: float) -> None:
        link = self.links.get(peer)
        if link is None:
            return
        link.heard = now
        try:
            _HANDLERS[type(message)](self, peer, message, now)
        except Malformed as error:
            self._refuse(peer, str(error))

    def tick(self, now: float) -> None:
        """Does what time alone demands."""
        timing = self.config.timing
        for peer in sorted(self.links):
            # The same sum as in `next_wake`: a difference rounds otherwise, and the caller would spin.
            if self.links[peer].sent + timing.heartbeat_seconds <= now:
                self._send(peer, Head(self.head.hash, self.head.round, self.nonce, self.leaving), now)
        ask_at = self.catch_up.ask_at(self._patience, self._retry)
        if ask_at is not None and ask_at <= now:
            self._send(self.catch_up.whom_to_ask(now), GetLog(self.catch_up.tip(self.head).hash), now)
        for peer, digests in self._fetcher.ask(now, self._retry, self.links.__contains__).items():
            self._send(peer, Get(tuple(digests)), now)
        take_over_at = self._take_over_at(now)
        if take_over_at is not None and take_over_at <= now:
            self._prepare(now)
        self._progress(now)

    # Handlers, one a message.

    def _on_head(self, peer: PeerID, message: Head, now: float) -> None:
        self.links[peer].leaving = message.leaving
        known = message.head in self.chain
        if not known and message.round > self.head.round:
            self.catch_up.notice(peer, message.round, now)
        elif known and message.head != self.head.hash:
            self._tell(peer, message.head, now)

    def _on_offer(self, peer: PeerID, message: Offer, now: float) -> None:
        limit = self.config.payload_bytes_max + HEADER_BYTES_MAX
        contribution = parse_contribution(message.encoded, self.signer, limit)
        if contribution.digest in self._fetcher or contribution.prev == self.head.hash:
            self._check(contribution)
        if contribution.digest in self._fetcher:
            self._fetcher.arrived(contribution.digest)
            if contribution.prev != self.head.hash:
                self.catch_up.held[contribution.digest] = contribution
        if contribution.prev == self.head.hash:
            if self.instance.hold(contribution):
                self._observe_offer(contribution, now)
        elif contribution.prev not in self.chain:
            if contribution.owner == peer and len(self._early) < EARLY_OFFERS_MAX:
                self._early[peer] = contribution
            self.catch_up.notice(peer, self.head.round + 1, now)
        elif contribution.owner == peer:
            self._tell(peer, contribution.prev, now)
        self._progress(now)

    def _check(self, contribution: Contribution) -> None:
        if contribution.weight > self.config.weight_max:
            raise Malformed(f"contribution of {contribution.owner}: claims {contribution.weight} tokens, too many")
        try:
            self._check_payload(contribution.payload)
        except ValueError as error:
            self._fetcher.arrived(contribution.digest)
            raise Malformed(f"contribution of {contribution.owner}: {error}") from error

    def _on_get(self, peer: PeerID, message: Get, now: float) -> None:
        for digest in message.digests:
            found = self.instance.held.get(digest) or self.chain.contribution(digest)
            if found is not None:
                self._send(peer, Offer(found.encoded), now)

    def _on_get_log(self, peer: PeerID, message: GetLog, now: float) -> None:
        entries = self.chain.after(message.head)
        if entries:
            self._send(peer, Log(message.head, self.head.round, tuple(entries)), now)
        else:
            self._send(peer, Head(self.head.hash, self.head.round, self.nonce, self.leaving), now)

    def _on_log(self, peer: PeerID, message: Log, now: float) -> None:
        flaw = self.catch_up.receive(peer, message, self.head)
        if flaw is not None:
            self._refuse(peer, flaw)
        self._progress(now)

    def _on_propose(self, peer: PeerID, message: Propose, now: float) -> None:
        record = message.record
        if not self._is_current(peer, record.prev, now):
            return
        flaw = self.instance.flaw(record)
        if flaw is not None or message.ballot.owner != peer:
            self._refuse(peer, f"proposal refused: {flaw or 'its ballot is not its own'}")
            return
        if not self.instance.learn(record):
            return
        self._count_acceptance(peer, message.ballot, record.hash, message.signature)
        self._clock.ballot_seen = now
        waiting = self.instance.proposal
        if waiting is None or message.ballot > waiting.ballot:
            self.instance.proposal = Proposal(message.ballot, record, message.carried, peer)
        self._clock.proposed = self._clock.proposed or now
        self._progress(now)

    def _on_accepted(self, peer: PeerID, message: Accepted, now: float) -> None:
        if self._is_current(peer, message.prev, now):
            self._count_acceptance(peer, message.ballot, message.record, message.signature)
            self._progress(now)

    def _on_prepare(self, peer: PeerID, message: Prepare, now: float) -> None:
        if not self._is_current(peer, message.prev, now) or message.ballot.owner != peer:
            return
        if self.me not in self.head.voters or peer not in self.head.voters:
            return
        vote = self.instance.promise(message.ballot)
        if vote is None:
            self._send(peer, Nack(message.prev, self.instance.vote.promised, False), now)
            return
        self._keep(vote)
        self._clock.ballot_seen = now
        self._send(peer, Promise(message.prev, message.ballot, vote.accepted_ballot, vote.accepted), now)

    def _on_promise(self, peer: PeerID, message: Promise, now: float) -> None:
        instance = self.instance
        if message.prev == self.head.hash and message.ballot == instance.ballot and peer in self.head.voters:
            if message.accepted is not None and instance.flaw(message.accepted) is not None:
                raise Malformed("promise: it carries a record that cannot follow the head")
            instance.promises[peer] = message
            self._progress(now)

    def _on_nack(self, peer: PeerID, message: Nack, now: float) -> None:
        if message.prev != self.head.hash:
            return
        self.instance.attempt_seen = max(self.instance.attempt_seen, message.promised.attempt)
        if message.other_base:
            self._other_base.add(peer)
            if self.head.is_quorum(self._other_base):
                self._actions.diverged = True

    def _is_current(self, peer: PeerID, prev: Hash, now: float) -> bool:
        """Whether a message is about the round in the air; else its sender is told, or asked, what was decided."""
        if prev == self.head.hash:
            return True
        if prev in self.chain:
            self._tell(peer, prev, now)
        else:
            self.catch_up.notice(peer, self.head.round + 1, now)
        return False

    def _count_acceptance(self, peer: PeerID, ballot: Ballot, record: Hash, signature: bytes) -> None:
        message = acceptance_message(self.head.hash, ballot, record)
        if peer in self.head.voters and self.signer.verify(peer, message, signature):
            self.instance.accepted_by(peer, ballot, record, signature)

    # Progress: whatever the state allows, until nothing more is possible.

    def _progress(self, now: float) -> None:
        while self._commit_decided(now) or self._replay(now):
            pass
        self._propose_if_due(now)
        self._answer_proposal(now)
        if self._commit_decided(now):
            self._progress(now)

    def _commit_decided(self, now: float) -> bool:
        """R6: a quorum accepted a record whose contributions are here."""
        decided = self.instance.decided()
        if decided is None:
            return False
        digest, certificate = decided
        record = self.instance.records.get(digest)
        if record is None:
            for peer in certificate.signatures:
                if peer != self.me:
                    self.catch_up.notice(peer, self.head.round + 1, now)
            return False
        missing = self.instance.missing(record)
        if missing:
            self._fetch(missing, record, list(certificate.signatures), now)
            return False
        contributions = [self.instance.held[m.digest] for m in record.members]
        self._append(record, certificate, contributions, now)
        return True

    def _replay(self, now: float) -> bool:
        """R7: the next record of a verified gap whose contributions are here."""
        entry = self.catch_up.next()
        if entry is None:
            return False
        ahead: list[Hash] = []
        for near in self.catch_up.pending[:8]:
            ahead += [m.digest for m in near.record.members if m.digest not in self.catch_up.held]
        held = self.instance.held
        lacking = [d for d in ahead if d not in held]
        if lacking:
            self._fetch(lacking, entry.record, sorted(self.links), now, at_once=True)
        found = [self.catch_up.held.get(m.digest) or held.get(m.digest) for m in entry.record.members]
        if not all(found):
            return False
        self._append(entry.record, entry.certificate, [c for c in found if c is not None], now)
        return True

    def _append(
        self, record: Record, certificate: Certificate, contributions: list[Contribution] | None, now: float
    ) -> None:
        self.chain.append(record, certificate, contributions)
        self._actions.log.append(journal.encode_commit(record, certificate))
        if contributions is not None:
            self._actions.lazy += [journal.encode_packet(c) for c in contributions if c.digest not in self._durable]
            self._actions.commits.append(Commit(record, tuple(contributions)))
            if self.instance.base not in (None, record.base):
                self._actions.diverged = True
        clock = self._clock
        if clock.started is not None:
            decide = None if clock.proposed is None else now - clock.proposed
            self.timing = self.timing.committed(now - clock.began, decide)
        freed = {**clock.freed, **dict.fromkeys(self.instance.offers, now)}
        self.catch_up.applied(record)
        self._begin(now)
        self._clock.freed = freed
        for peer in sorted(self._early):
            if self._early[peer].prev == record.hash:
                early = self._early.pop(peer)
                try:
                    self._check(early)
                except Malformed as error:
                    self._refuse(peer, str(error))
                    continue
                if self.instance.hold(early):
                    self._observe_offer(early, now)

    def _begin(self, now: float, vote: Vote | None = None) -> None:
        """A new round begins on the head; `vote` is what this peer said about it before it restarted."""
        self.instance = Instance(self.head, vote or Vote())
        self._fetcher.clear()
        self._durable: set[Hash] = set()
        self._other_base: set[PeerID] = set()
        recent = self.chain.records[-RECENT_ROUNDS:]
        contributors = frozenset(m.peer for record in recent for m in record.members) or frozenset(self.head.voters)
        self._clock = RoundClock(now, contributors, ballot_seen=None if vote is None else now)

    def _propose_if_due(self, now: float) -> None:
        instance = self.instance
        if instance.ballot is not None and instance.promised_quorum() and self._carry_on(now):
            return
        close_at = self._close_at(now)
        if close_at is not None and close_at <= now and instance.may_propose_at_zero(self.me):
            record = instance.fresh(self.me, 0, lambda p: self.alive(p, now))
            self._propose(Ballot(0, self.me), record, False, now)

    def _carry_on(self, now: float) -> bool:
        """R5: with a quorum of promises, propose what may already be decided, else something fresh."""
        instance = self.instance
        ballot = instance.ballot
        assert ballot is not None
        record = instance.carried()
        if record is not None:
            missing = instance.missing(record)
            if missing:
                holders = [p for p, promise in instance.promises.items() if promise.accepted == record]
                self._fetch(missing, record, holders, now, at_once=True)
                return False
        elif instance.base is None or len(instance.usable()) < self._needed:
            return False
        carried = record is not None
        if record is None:
            record = instance.fresh(self.me, ballot.attempt, lambda p: self.alive(p, now))
        instance.ballot = None
        if instance.may_accept(ballot):
            self._propose(ballot, record, carried, now)
        return True

    def _propose(self, ballot: Ballot, record: Record, carried: bool, now: float) -> None:
        self.instance.learn(record)
        signature = self._accept(ballot, record)
        self._clock.proposed = now
        self._clock.ballot_seen = now
        self._broadcast(Propose(ballot, record, carried, signature), now)

    def _answer_proposal(self, now: float) -> None:
        """R3: accept what this voter holds and may accept."""
        instance, proposal = self.instance, self.instance.proposal
        if proposal is None or self.me not in self.head.voters:
            return
        record = proposal.record
        if not instance.may_accept(proposal.ballot):
            instance.proposal = None
            if proposal.ballot < instance.vote.promised:
                self._send(proposal.proposer, Nack(record.prev, instance.vote.promised, False), now)
            return
        missing = instance.missing(record)
        if missing:
            self._fetch(missing, record, [proposal.proposer], now)
            return
        instance.proposal = None
        flaw = instance.flaw(record)
        if flaw is not None:
            self._refuse(proposal.proposer, f"proposal refused: {flaw}")
        elif not proposal.carried and instance.base not in (None, record.base):
            self._send(proposal.proposer, Nack(record.prev, instance.vote.promised, True), now)
        else:
            signature = self._accept(proposal.ballot, record)
            self._broadcast(Accepted(record.prev, proposal.ballot, record.hash, signature), now)

    def _accept(self, ballot: Ballot, record: Record) -> bytes:
        self._keep(self.instance.accept(ballot, record), [self.instance.held[m.digest] for m in record.members])
        signature = self.signer.sign(acceptance_message(record.prev, ballot, record.hash))
        self.instance.accepted_by(self.me, ballot, record.hash, signature)
        return signature

    def _keep(self, vote: Vote, contributions: Sequence[Contribution] = ()) -> None:
        """Makes a vote durable, together with the contributions that an acceptance says this peer can serve."""
        self.instance.vote = vote
        for contribution in contributions:
            if contribution.digest not in self._durable:
                self._durable.add(contribution.digest)
                self._actions.entries.append(journal.encode_packet(contribution))
        self._actions.entries.append(journal.encode_vote(self.head.hash, vote))

    def _prepare(self, now: float) -> None:
        """R4: this voter takes a ballot above all it has seen and asks what was accepted."""
        instance = self.instance
        self._clock.attempts += 1
        ballot = Ballot(instance.attempt_seen + 1, self.me)
        vote = instance.promise(ballot)
        assert vote is not None
        self._keep(vote)
        instance.ballot = ballot
        instance.promises = {self.me: Promise(self.head.hash, ballot, vote.accepted_ballot, vote.accepted)}
        self._clock.ballot_seen = now
        self._broadcast(Prepare(self.head.hash, ballot), now)

    # Time.

    @property
    def _needed(self) -> int:
        return max(1, self.config.min_peers, self.config.start_peers if self.head.round == 0 else 1)

    @property
    def _patience(self) -> float:
        return max(self.config.timing.delay_seconds_min, 2 * self.timing.decide.mean)

    @property
    def _retry(self) -> float:
        return max(8 * self.config.timing.delay_seconds_min, 4 * self.timing.decide.high)

    def _alive_at(self, now: float) -> Alive:
        return lambda peer: self.alive(peer, now)

    def _observe_offer(self, contribution: Contribution, now: float) -> None:
        freed = self._clock.freed.pop(contribution.owner, None)
        if freed is not None:
            self.timing = self.timing.cycled(contribution.owner, now - freed)
        self._observe_clock(now)

    def _observe_clock(self, now: float) -> None:
        self._clock.start_if_enough(now, self.instance, self._needed, self._alive_at(now))

    def _close_at(self, now: float) -> float | None:
        return self._clock.close_at(self.instance, self.timing, self.config.timing, self._alive_at(now))

    def _take_over_at(self, now: float) -> float | None:
        return self._clock.take_over_at(self.me, self.instance, self.timing, self.config.timing, self._alive_at(now))

    # Saying.

    def _fetch(
        self, digests: list[Hash], record: Record, sources: list[PeerID], now: float, *, at_once: bool = False
    ) -> None:
        owners = [m.peer for m in record.members]
        others = [p for p in [*sources, *owners] if p != self.me]
        self._fetcher.need(digests, others, now if at_once else now + self._patience)

    def _tell(self, peer: PeerID, prev: Hash, now: float) -> None:
        """Tells a peer that speaks of a decided round what followed, once a link."""
        if (peer, prev) not in self._told:
            self._told = {(p, h) for p, h in self._told if p != peer} | {(peer, prev)}
            entries = self.chain.after(prev, limit=1)
            if entries:
                self._send(peer, Log(prev, self.head.round, tuple(entries)), now)

    def _refuse(self, peer: PeerID, reason: str) -> None:
        self._actions.refusals.append(Refused(peer, reason))

    def _broadcast(self, message: Message, now: float) -> None:
        for peer in sorted(self.links):
            self._send(peer, message, now)

    def _send(self, peer: PeerID, message: Message, now: float) -> None:
        link = self.links.get(peer)
        if link is not None:
            link.sent = now
            self._actions.sends.append((peer, message))


_HANDLERS: dict[type, Callable[..., None]] = {
    Head: Engine._on_head,
    Offer: Engine._on_offer,
    Get: Engine._on_get,
    GetLog: Engine._on_get_log,
    Log: Engine._on_log,
    Propose: Engine._on_propose,
    Accepted: Engine._on_accepted,
    Prepare: Engine._on_prepare,
    Promise: Engine._on_promise,
    Nack: Engine._on_nack,
}
