"""The round protocol as a state machine without I/O: messages and time go in; writes, sends and commits come out.

docs/PROTOCOL.md states the rules (R1 to R7). The caller must make `Actions.entries` durable before it sends
`Actions.sends`, and apply `Actions.commits` in order. Deterministic: same inputs, same outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from averaging import journal
from averaging.catch_up import CatchUp
from averaging.config import EngineConfig
from averaging.contribution import HEADER_BYTES_MAX, Contribution, parse_contribution, sign_contribution
from averaging.fetcher import Fetcher
from averaging.instance import Instance
from averaging.messages import Get, GetLog, Head, Log, Message, Offer, Propose
from averaging.outbox import Actions, Commit, Link, Outbox
from averaging.record import Certificate, Hash, Malformed, Record
from averaging.round_clock import RoundClock
from averaging.serving import asked_for
from averaging.timing import Timing
from averaging.voting import Voting
from network.identity import Signer
from network.seam import PeerID

EARLY_OFFERS_MAX = 64
RECENT_ROUNDS = 4
"""Who contributed to none of so many rounds is no longer waited for."""
REPLAY_AHEAD = 8
"""Of a gap, the contributions of so many rounds are fetched at a time."""


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
        self.restored = restored
        self.chain = restored.chain
        self.nonce = nonce
        self.timing = Timing()
        self.catch_up = CatchUp(signer, config.snapshot_bytes)
        self._outbox = Outbox(self.me, config.timing.silence_seconds)
        self._check_payload = check
        self._fetcher = Fetcher()
        self._early: dict[PeerID, Contribution] = {}
        self._told: dict[PeerID, Hash] = {}
        self._far_from_lead: set[PeerID] = set()
        """Who asked for a relay in this round: without a link to the lead they miss its vote, and have to be told."""
        self._voting = self._begin(now, {})

    # What the caller asks.

    @property
    def head(self) -> Record:
        return self.chain.head

    @property
    def instance(self) -> Instance:
        """The round in the air."""
        return self._voting.instance

    @property
    def links(self) -> dict[PeerID, Link]:
        return self._outbox.links

    def situation(self, now: float) -> str:
        """One sentence on why the round in the air is not committed yet."""
        about = f"round {self.head.round + 1}, {now - self._voting.clock.began:.0f} s old"
        if self.catch_up.pending:
            return f"{about}: following others, {len(self.catch_up.pending)} rounds behind"
        return f"{about}: {self._voting.situation(now)}"

    def drain(self) -> Actions:
        actions = self._outbox.drain()
        actions.wants_snapshot = self.catch_up.wants_snapshot
        return actions

    def next_wake(self, now: float) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        times = [
            *self._voting.wake_at(self.timing, now),
            self._fetcher.next_due,
            self.catch_up.ask_at(self._patience, self._retry) if self.links else None,
            min((link.sent for link in self.links.values()), default=now) + self.config.timing.heartbeat_seconds,
        ]
        return min(t for t in times if t is not None)

    # What the world says.

    def connected(self, peer: PeerID, now: float) -> None:
        """A link to `peer` can be written to (again): it hears where this peer stands and what it offered."""
        self.links[peer] = Link(heard=now, sent=now)
        self._told.pop(peer, None)
        self._outbox.send(peer, self._own_head(), now)
        own = self.instance.offers.get(self.me)
        if own is not None:
            self._outbox.send(peer, Offer(own.encoded), now)

    def disconnected(self, peer: PeerID) -> None:
        self._outbox.lost(peer)
        self.catch_up.lost(peer)
        self._voting.clock.freed.pop(peer, None)

    def offer(self, payload: bytes, weight: int, willing: bool, now: float) -> Contribution:
        """R1: pushes this peer's contribution to the round after the head; needs `anchored` for that head before."""
        assert self.instance.base is not None
        # Who is not linked with all the others (two that can only dial out never are) cannot lead them.
        is_linked = all(m.peer in self.links for m in self.head.members if m.peer != self.me)
        willing = willing and is_linked and not self._outbox.leaving
        weight = max(1, min(weight, self.config.weight_max))
        mine = sign_contribution(self.signer, self.head.hash, weight, self.instance.base, willing, payload)
        if self.instance.hold(mine):
            self._observe_offer(mine, now)
            relays = [p for p in sorted(self.links) if self._outbox.alive(p, now)] if self._lead_is_far else []
            for peer in sorted(self.links):
                self._outbox.send(peer, Offer(mine.encoded, relay=relays[:1] == [peer]), now)
            self._progress(now)
        return mine

    def anchored(self, head: Hash, base: bytes, now: float) -> None:
        """This peer's state after the record `head` has the fingerprint `base`."""
        if head == self.head.hash:
            self.instance.base = base
            self._progress(now)

    def leave(self, now: float) -> None:
        """From now on this peer offers no vote, and says so; it still answers."""
        self._outbox.leaving = True
        self._outbox.broadcast(self._own_head(), now)

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
            self._handle(peer, message, now)
        except Malformed as error:
            self._outbox.refuse(peer, str(error))

    def tick(self, now: float) -> None:
        """Does what time alone demands."""
        timing = self.config.timing
        for peer in sorted(self.links):
            # The same sum as in `next_wake`: a difference rounds otherwise, and the caller would spin.
            if self.links[peer].sent + timing.heartbeat_seconds <= now:
                self._outbox.send(peer, self._own_head(), now)
        ask_at = self.catch_up.ask_at(self._patience, self._retry)
        if ask_at is not None and ask_at <= now:
            self._outbox.send(self.catch_up.whom_to_ask(now), GetLog(self.catch_up.tip(self.head).hash), now)
        for peer, digests in self._fetcher.ask(now, self._retry, self.links.__contains__).items():
            self._outbox.send(peer, Get(tuple(digests)), now)
        take_over_at = self._voting.take_over_at(self.timing, now)
        if take_over_at is not None and take_over_at <= now:
            self._voting.take_over(now)
        self._progress(now)

    # Messages.

    def _handle(self, peer: PeerID, message: Message, now: float) -> None:
        if isinstance(message, Head):
            self._on_head(peer, message, now)
        elif isinstance(message, Offer):
            self._on_offer(peer, message, now)
        elif isinstance(message, (Get, GetLog)):
            self._outbox.send_all(peer, asked_for(message, self.chain, self.instance) or [self._own_head()], now)
        elif isinstance(message, Log):
            self._on_log(peer, message, now)
        elif self._is_current(peer, message.record.prev if isinstance(message, Propose) else message.prev, now):
            self._voting.receive(peer, message, now)
            self._progress(now)

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
        if message.relay:
            self._far_from_lead.add(peer)
        if contribution.digest in self._fetcher or contribution.prev == self.head.hash:
            self._check(contribution)
        if contribution.digest in self._fetcher:
            self._fetcher.arrived(contribution.digest)
            if contribution.prev != self.head.hash:
                self.catch_up.held[contribution.digest] = contribution
        if contribution.prev == self.head.hash:
            if contribution.owner not in self.links:
                self._outbox.heard_of(contribution.owner, now)
            if self.instance.hold(contribution):
                self._observe_offer(contribution, now)
                if message.relay:
                    self._outbox.send(self.head.lead, Offer(message.encoded), now)
        elif contribution.prev not in self.chain:
            if contribution.owner == peer and len(self._early) < EARLY_OFFERS_MAX:
                self._early[peer] = contribution
            self.catch_up.notice(peer, self.head.round + 1, now)
        elif contribution.owner == peer:
            self._observe_offer(contribution, now)
            self._voting.clock.freed[peer] = now  # Void: it trains anew.
            self._tell(peer, contribution.prev, now)
        self._progress(now)

    def _check(self, contribution: Contribution) -> None:
        if not 0 < contribution.weight <= self.config.weight_max:
            raise Malformed(f"contribution of {contribution.owner}: claims {contribution.weight} tokens")
        try:
            self._check_payload(contribution.payload)
        except ValueError as error:
            self._fetcher.arrived(contribution.digest)
            raise Malformed(f"contribution of {contribution.owner}: {error}") from error

    def _on_log(self, peer: PeerID, message: Log, now: float) -> None:
        flaw = self.catch_up.receive(peer, message, self.head)
        if flaw is not None:
            self._outbox.refuse(peer, flaw)
        self._progress(now)

    def _is_current(self, peer: PeerID, prev: Hash, now: float) -> bool:
        """Whether a message is about the round in the air; else its sender is told, or asked, what was decided."""
        if prev == self.head.hash:
            return True
        if prev in self.chain:
            self._tell(peer, prev, now)
        else:
            self.catch_up.notice(peer, self.head.round + 1, now)
        return False

    # Progress: whatever the state allows, until nothing more is possible.

    def _progress(self, now: float) -> None:
        while self._commit_decided(now) or self._replay(now):
            pass
        self._voting.start_clock(now)
        self._voting.progress(self.timing, now)
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
        entry = self.catch_up.next(now)
        if entry is None:
            return False
        ahead: list[Hash] = []
        for near in self.catch_up.pending[:REPLAY_AHEAD]:
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
        self._outbox.actions.log.append(journal.encode_commit(record, certificate))
        if contributions is not None:
            self._outbox.actions.lazy += [
                journal.encode_packet(c) for c in contributions if c.digest not in self._voting.durable
            ]
            self._outbox.actions.commits.append(Commit(record, tuple(contributions)))
            if self.instance.base not in (None, record.base):
                self._outbox.actions.diverged = True
        clock = self._voting.clock
        if clock.started is not None:
            decide = None if clock.proposed is None else now - clock.proposed
            self.timing = self.timing.committed(now - clock.began, decide)
        freed = {**clock.freed, **dict.fromkeys(self.instance.offers, now)}
        self.catch_up.applied(record)
        self._voting = self._begin(now, freed)
        for peer in sorted(self._far_from_lead):
            self._tell(peer, record.prev, now)
        self._far_from_lead.clear()
        for peer in sorted(self._early):
            if self._early[peer].prev == record.hash:
                early = self._early.pop(peer)
                try:
                    self._check(early)
                except Malformed as error:
                    self._outbox.refuse(peer, str(error))
                    continue
                if self.instance.hold(early):
                    self._observe_offer(early, now)

    def _begin(self, now: float, freed: dict[PeerID, float]) -> Voting:
        """A new round begins on the head, with what this peer said about it and held before it restarted."""
        vote = self.restored.votes.get(self.head.hash)
        recent = self.chain.records[-RECENT_ROUNDS:]
        contributors = frozenset(m.peer for record in recent for m in record.members) or frozenset(self.head.voters)
        clock = RoundClock(now, contributors, freed=freed, ballot_seen=None if vote is None else now)
        self._fetcher.clear()
        voting = Voting(
            self.head,
            vote,
            clock,
            signer=self.signer,
            outbox=self._outbox,
            fetch=self._fetch,
            config=self.config.timing,
            needed=max(1, self.config.min_peers, self.config.start_peers if self.head.round == 0 else 1),
            members_max=self.config.max_peers,
        )
        for contribution in self.restored.undecided:
            if contribution.prev == self.head.hash:
                voting.instance.held[contribution.digest] = contribution
                voting.durable.add(contribution.digest)
        return voting

    def _observe_offer(self, contribution: Contribution, now: float) -> None:
        freed = self._voting.clock.freed.pop(contribution.owner, None)
        if freed is not None:
            self.timing = self.timing.cycled(contribution.owner, now - freed)

    @property
    def _lead_is_far(self) -> bool:
        return self.head.lead != self.me and self.head.lead not in self.links

    @property
    def _patience(self) -> float:
        """What is pushed anyway gets this long to arrive before it is asked for."""
        return max(self.config.timing.delay_seconds_min, 2 * self.timing.decide.mean)

    @property
    def _retry(self) -> float:
        return max(8 * self.config.timing.delay_seconds_min, 4 * self.timing.decide.high)

    def _fetch(
        self, digests: list[Hash], record: Record, sources: list[PeerID], now: float, at_once: bool = False
    ) -> None:
        owners = [m.peer for m in record.members]
        others = [p for p in [*sources, *owners] if p != self.me]
        self._fetcher.need(digests, others, now if at_once else now + self._patience)

    def _own_head(self) -> Head:
        return Head(self.head.hash, self.head.round, self.nonce, self._outbox.leaving)

    def _tell(self, peer: PeerID, prev: Hash, now: float) -> None:
        """Tells a peer that speaks of a decided round what followed, once a link."""
        if self._told.get(peer) != prev:
            self._told[peer] = prev
            entries = self.chain.after(prev, limit=1)
            if entries:
                self._outbox.send(peer, Log(prev, self.head.round, tuple(entries)), now)
