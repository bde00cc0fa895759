"""One round's votes at one peer: when to propose, what to accept, when to take over (R2 to R5 of docs/PROTOCOL.md).

What may be said is decided by `Instance`, pure; here it is decided when, made durable, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from averaging import journal
from averaging.contribution import Contribution
from averaging.instance import Assembly, Instance, Proposal, Vote
from averaging.messages import Accepted, Nack, Prepare, Promise, Propose
from averaging.outbox import Outbox
from averaging.record import Ballot, Hash, Malformed, Record, acceptance_message
from averaging.round_clock import Alive, RoundClock
from averaging.timing import Timing, TimingConfig, start_patience
from network.identity import Signer
from network.seam import PeerID

VotingMessage = Propose | Accepted | Prepare | Promise | Nack
ATTEMPTS_AHEAD_MAX = 1_000_000
"""No voter is honestly so many ballots ahead of another."""

Fetch = Callable[[list[Hash], Record, list[PeerID], float, bool], None]
"""(digests, record, sources, now, at once): have these contributions fetched."""


@final
class Voting:
    """The round after `head`. Every method leaves the next step to `progress`."""

    def __init__(
        self,
        instance: Instance,
        clock: RoundClock,
        *,
        signer: Signer,
        outbox: Outbox,
        fetch: Fetch,
        config: TimingConfig,
        needed: int,
        assemble: Callable[[Sequence[PeerID], float], Assembly] = lambda voters, now: (voters, ()),
    ) -> None:
        self.head = instance.head
        self.instance = instance
        self.clock = clock
        self.durable: set[Hash] = set()
        """Contributions that are on disk already."""
        self._me = signer.peer_id
        self._signer = signer
        self._outbox = outbox
        self._fetch = fetch
        self._config = config
        self._needed = needed
        self._assemble = assemble
        self._other_base: set[PeerID] = set()

    # What others say.

    def receive(self, peer: PeerID, message: VotingMessage, now: float) -> None:
        """Raises `Malformed`."""
        if isinstance(message, Propose):
            self.on_propose(peer, message, now)
        elif isinstance(message, Accepted):
            self.on_accepted(peer, message)
        elif isinstance(message, Prepare):
            self.on_prepare(peer, message, now)
        elif isinstance(message, Promise):
            self.on_promise(peer, message)
        else:
            self.on_nack(peer, message)

    def on_propose(self, peer: PeerID, message: Propose, now: float) -> None:
        instance, record = self.instance, message.record
        flaw = instance.flaw(record) or self._usurped(peer, message)
        if flaw is not None:
            self._outbox.refuse(peer, f"proposal refused: {flaw}")
            return
        if not instance.learn(record):
            return
        self._count(peer, message.ballot, record.hash, message.signature)
        self.clock.ballot_seen = now
        if self.clock.proposed is None:
            self.clock.proposed = now
        if instance.proposal is None or message.ballot > instance.proposal.ballot:
            instance.proposal = Proposal(message.ballot, record, message.carried, peer)

    def _usurped(self, peer: PeerID, message: Propose) -> str | None:
        """Why `peer` may not propose this at this ballot: two values at one ballot would undo everything."""
        ballot, record = message.ballot, message.record
        if ballot.owner != peer or peer not in self.head.voters:
            return "its ballot is not its own"
        if ballot.attempt == 0 and (peer != self.head.lead or message.carried):
            return "ballot 0 belongs to the lead, and carries nothing on"
        if not message.carried and (record.origin, record.attempt) != (peer, ballot.attempt):
            return "it is not fresh, and not said to be carried on"
        return None

    def on_accepted(self, peer: PeerID, message: Accepted) -> None:
        self._count(peer, message.ballot, message.record, message.signature)

    def on_prepare(self, peer: PeerID, message: Prepare, now: float) -> None:
        """R4, answered: promise and say what was accepted, or refuse."""
        if message.ballot.owner != peer or not {self._me, peer} <= set(self.head.voters):
            return
        if message.ballot.attempt < 1:
            return  # Attempt 0 is the lead's, and needs no preparing.
        vote = self.instance.promise(message.ballot)
        if vote is None:
            self._outbox.send(peer, Nack(message.prev, self.instance.vote.promised, False), now)
            return
        self._keep(vote)
        self.clock.ballot_seen = now
        self._outbox.send(peer, Promise(message.prev, message.ballot, vote.accepted_ballot, vote.accepted), now)

    def on_promise(self, peer: PeerID, message: Promise) -> None:
        if message.ballot == self.instance.ballot and peer in self.head.voters:
            if message.accepted is not None and self.instance.flaw(message.accepted) is not None:
                raise Malformed("promise: it carries a record that cannot follow the head")
            self.instance.promises[peer] = message

    def on_nack(self, peer: PeerID, message: Nack) -> None:
        if peer not in self.head.voters or message.promised.attempt > self.instance.attempt_seen + ATTEMPTS_AHEAD_MAX:
            return
        self.instance.attempt_seen = max(self.instance.attempt_seen, message.promised.attempt)
        if message.other_base:
            self._other_base.add(peer)
            if self.head.is_quorum(self._other_base):
                self._outbox.actions.diverged = True

    def _count(self, peer: PeerID, ballot: Ballot, record: Hash, signature: bytes) -> None:
        message = acceptance_message(self.head.hash, ballot, record)
        if peer in self.head.voters and self._signer.verify(peer, message, signature):
            self.instance.accepted_by(peer, ballot, record, signature)

    # What this peer does.

    def progress(self, timing: Timing, now: float) -> None:
        """Proposes if that is due, and answers a proposal if that has become possible."""
        self._propose_if_due(timing, now)
        self._answer_proposal(now)

    def _propose_if_due(self, timing: Timing, now: float) -> None:
        instance = self.instance
        if instance.ballot is not None and instance.promised_quorum() and self._carry_on(now):
            return
        if not instance.may_propose_at_zero(self._me):
            return
        close_at = self.close_at(timing, now)
        if close_at is not None and close_at <= now:
            self._propose(Ballot(0, self._me), self._fresh(0, now), False, now)

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
                self._fetch(missing, record, holders, now, True)
                return False
        elif instance.base is None or len(instance.usable()) < self._needed:
            return False
        carried = record is not None
        if record is None:
            record = self._fresh(ballot.attempt, now)
        instance.ballot = None
        if instance.may_accept(ballot):
            self._propose(ballot, record, carried, now)
        return True

    def _fresh(self, attempt: int, now: float) -> Record:
        return self.instance.fresh(self._me, attempt, self._alive_at(now), lambda voters: self._assemble(voters, now))

    def _propose(self, ballot: Ballot, record: Record, carried: bool, now: float) -> None:
        self.instance.learn(record)
        signature = self._accept(ballot, record)
        self.clock.proposed = self.clock.ballot_seen = now
        self._outbox.broadcast(Propose(ballot, record, carried, signature), now)

    def _answer_proposal(self, now: float) -> None:
        """R3: accept what this voter holds and may accept."""
        instance, proposal = self.instance, self.instance.proposal
        if proposal is None or self._me not in self.head.voters:
            return
        record, proposer = proposal.record, proposal.proposer
        if not instance.may_accept(proposal.ballot):
            instance.proposal = None
            if proposal.ballot < instance.vote.promised:
                self._outbox.send(proposer, Nack(record.prev, instance.vote.promised, False), now)
            return
        missing = instance.missing(record)
        if missing:
            self._fetch(missing, record, [proposer], now, False)
            return
        instance.proposal = None
        flaw = instance.flaw(record)
        if flaw is not None:
            self._outbox.refuse(proposer, f"proposal refused: {flaw}")
        elif not proposal.carried and instance.base not in (None, record.base):
            self._outbox.send(proposer, Nack(record.prev, instance.vote.promised, True), now)
        else:
            signature = self._accept(proposal.ballot, record)
            self._outbox.broadcast(Accepted(record.prev, proposal.ballot, record.hash, signature), now)

    def _accept(self, ballot: Ballot, record: Record) -> bytes:
        self._keep(self.instance.accept(ballot, record), [self.instance.held[m.digest] for m in record.members])
        signature = self._signer.sign(acceptance_message(record.prev, ballot, record.hash))
        self.instance.accepted_by(self._me, ballot, record.hash, signature)
        return signature

    def _keep(self, vote: Vote, contributions: Sequence[Contribution] = ()) -> None:
        """Makes a vote durable, together with the contributions that an acceptance says this peer can serve."""
        self.instance.vote = vote
        entries = self._outbox.actions.entries
        for contribution in contributions:
            if contribution.digest not in self.durable:
                self.durable.add(contribution.digest)
                entries.append(journal.encode_packet(contribution))
        entries.append(journal.encode_vote(self.head.hash, vote))

    def take_over(self, now: float) -> None:
        """R4: this voter takes a ballot above all it has seen and asks what was accepted."""
        instance = self.instance
        self.clock.attempts += 1
        ballot = Ballot(instance.attempt_seen + 1, self._me)
        vote = instance.promise(ballot)
        assert vote is not None
        self._keep(vote)
        instance.ballot = ballot
        instance.promises = {self._me: Promise(self.head.hash, ballot, vote.accepted_ballot, vote.accepted)}
        self.clock.ballot_seen = now
        self._outbox.broadcast(Prepare(self.head.hash, ballot), now)

    # Time.

    def start_clock(self, timing: Timing, now: float) -> None:
        patience = start_patience(timing, self._config)
        self.clock.start_if_enough(now, self.instance, self._needed, self._alive_at(now), patience)

    def close_at(self, timing: Timing, now: float) -> float | None:
        """When this peer, if it may, should propose."""
        instance = self.instance
        if len(instance.usable_owners()) < self._needed:
            return None
        if self._outbox.leaving and self.clock.proposed is None and instance.base is not None:
            # A leaving lead waits for nobody: its last record lets the others go on without it.
            return now
        return self.clock.close_at(self.instance, timing, self._config, self._alive_at(now))

    def take_over_at(self, timing: Timing, now: float) -> float | None:
        return self.clock.take_over_at(self._me, self.instance, timing, self._config, self._alive_at(now))

    def wake_at(self, timing: Timing, now: float) -> list[float | None]:
        """When this peer will have to start the grace, to propose, or to take over."""
        closes = self.close_at(timing, now) if self.instance.may_propose_at_zero(self._me) else None
        starts = self.clock.start_at(start_patience(timing, self._config))
        return [starts, closes, self.take_over_at(timing, now)]

    def situation(self, now: float) -> str:
        """What this round waits for."""
        heard = [p for p in self.head.voters if self._outbox.alive(p, now)]
        offered = len(self.instance.usable())
        if self.lacks_quorum(now):
            return f"waiting for voters; {len(heard)} of {len(self.head.voters)} are heard and that is no quorum"
        if self.clock.started is None:
            return f"waiting for contributions; {offered} offered, {self._needed} needed, {len(heard)} voters heard"
        state = "a proposal is in the air" if self.clock.proposed is not None else "the group is open"
        return f"{offered} contributions, {len(heard)} of {len(self.head.voters)} voters heard, {state}"

    def lacks_quorum(self, now: float) -> bool:
        return not self.head.is_quorum({p for p in self.head.voters if self._outbox.alive(p, now)})

    def _alive_at(self, now: float) -> Alive:
        return lambda peer: self._outbox.alive(peer, now)
