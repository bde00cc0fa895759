"""The round protocol as a state machine without I/O: messages and time go in; writes, sends and commits come out.

docs/PROTOCOL.md states the rules (R1 to R10). The caller must make `Actions.entries` durable before it sends
`Actions.sends`, and apply `Actions.commits` in order. Deterministic: same inputs, same outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from averaging import journal
from averaging.catch_up import CatchUp
from averaging.chain import Chain
from averaging.config import EngineConfig
from averaging.contribution import Contribution
from averaging.fetcher import Fetcher
from averaging.following import REPLAY_AHEAD, Following, Moved
from averaging.forks import Recovery
from averaging.instance import Instance
from averaging.messages import Accepted, Get, GetLog, Head, Log, Message, Offer, Propose, Share
from averaging.offering import Offering
from averaging.outbox import Actions, Link, Outbox
from averaging.pulse import Pulse, pauses
from averaging.record import Certificate, Hash, Malformed, Record
from averaging.rounds import Rounds
from averaging.serving import asked_for
from averaging.voting import Voting
from network.identity import Signer
from network.seam import PeerID


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
        self.nonce = nonce
        self.catch_up = CatchUp(signer, config.snapshot_bytes)
        self._outbox = Outbox(self.me, config.timing.silence_seconds)
        self._pulse = Pulse(self._outbox, config.timing)
        self.recovery = Recovery(signer, self._outbox, config.timing, config.recovery_share, now, restored.chain)
        self._fetcher = Fetcher()
        self._told: dict[PeerID, Hash] = {}
        self.rounds = Rounds(signer, config, restored, self._outbox, self._fetch, now)
        self.offering = Offering(
            signer, config, self.rounds, self.catch_up, self._fetcher, self._outbox, check, self._tell
        )
        self._following = Following(self.rounds, self.catch_up, self.recovery, self._fetcher, self._outbox)

    # What the caller asks.

    @property
    def chain(self) -> Chain:
        return self.rounds.chain

    @property
    def head(self) -> Record:
        return self.chain.head

    @property
    def _voting(self) -> Voting:
        return self.rounds.voting

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
        if self.is_following(now):
            return f"{about}: following others, {len(self.catch_up.pending)} rounds behind"
        voting = self._voting
        if self.recovery.lacks_quorum(self.head, voting.clock, now) and voting.clock.waits_since is not None:
            plan = self.recovery.situation(self.head, voting.clock, self.rounds.timing, now)
            return f"{about}: {voting.situation(now)}; {plan}"
        return f"{about}: {voting.situation(now)}"

    def is_behind(self, now: float) -> bool:
        """Whether others are known to have committed rounds that this peer has not, and will."""
        return self.catch_up.behind_since is not None or self.is_following(now)

    def is_following(self, now: float) -> bool:
        """Whether verified records are about to be applied."""
        return self._following.is_under_way(now)

    def drain(self) -> Actions:
        actions = self._outbox.drain()
        self.catch_up.is_lost |= actions.diverged
        actions.wants_snapshot = self.catch_up.wants_snapshot(self.chain)
        return actions

    def next_wake(self, now: float) -> float:
        """When `tick` has something to do, if nothing else happens before."""
        times = [
            *self._voting.wake_at(self.rounds.timing, now),
            self._recovery_due(now),
            self.recovery.look_again_at(self._voting.clock),
            self._reduce_at(now),
            self._fetcher.next_due(self._retry) if self._fetcher else None,
            self._ask_log_at if self.links else None,
            self._pulse.next_at,
        ]
        return min(t for t in times if t is not None)

    # What the world says.

    def connected(self, peer: PeerID, now: float) -> None:
        """A link to `peer` can be written to (again): it hears where this peer stands and what it offered."""
        self.links[peer] = Link(up=now, heard=now, sent=now)
        self._voting.clock.came[peer] = now
        self._pulse.hurry()
        self._told.pop(peer, None)
        self._outbox.send(peer, self._own_head(), now)
        self.offering.connected(peer, now)

    def disconnected(self, peer: PeerID) -> None:
        self._outbox.lost(peer)
        self.offering.disconnected(peer)
        self._pulse.hurry()
        self.catch_up.lost(peer, self.head)
        self.rounds.lost(peer)

    def offer(self, payload: bytes, weight: int, willing: bool, now: float) -> Contribution:
        """R1: pushes this peer's contribution to the round after the head; needs `anchored` for that head before."""
        mine = self.offering.offer(payload, weight, willing, now)
        self._progress(now)
        return mine

    def share(self, packets: list[bytes], weight: int, willing: bool, now: float) -> None:
        """R1 where owners reduce: sends each part to its owner."""
        self.offering.share(packets, weight, willing, now)
        self._progress(now)

    def anchored(self, head: Hash, base: bytes, now: float) -> None:
        """This peer's state after the record `head` has the fingerprint `base`."""
        if head == self.head.hash:
            self.instance.base = base
            self._progress(now)

    def leave(self, now: float) -> None:
        """From now on this peer offers no vote, and says so; it still answers."""
        self._outbox.leaving = True
        self._outbox.broadcast(self._own_head(), now)

    def adopt(self, head: Hash, now: float) -> Moved | None:
        """The state at `head`, which `CatchUp.child_of` attests, was fetched: go on from there. None if nothing attests
        it any more.
        """
        moved = self._following.move(head, now)
        if moved is None:
            return None
        for entry in moved[1]:
            self._append(entry.record, entry.certificate, None, now)
        self._told.clear()
        self._progress(now)
        return moved[0]

    def snapshot_failed(self, now: float) -> None:
        """No donor had a state that could be taken: what can be is replayed."""
        self.catch_up.snapshot_failed()
        self._progress(now)

    def receive(self, peer: PeerID, message: Message, now: float) -> None:
        link = self.links.get(peer)
        if link is None:
            return
        link.heard = now
        try:
            self._handle(peer, message, now)
        except Malformed as error:
            self._outbox.refuse(peer, str(error))

    def is_old_news(self, peer: PeerID, message: Message, now: float) -> bool:
        """Whether `message` says only that its sender lives, and stands where this peer stands: then it is heard with
        this, and `receive` has nothing to do. Many messages of a large group are such. Not to be asked before what came
        earlier was received.
        """
        link = self.links.get(peer)
        if link is None or not isinstance(message, Head) or message.leaving != link.leaving:
            return False
        if message.head != self.head.hash:
            return False
        link.heard = now
        link.stands(message, self.config.pause_max, now)
        return True

    def tick(self, now: float) -> None:
        """Does what time alone demands."""
        if self._pulse.next_at <= now:
            self._give_signs_of_life(now)
        self.recovery.awake(now, self._pulse.next_at, self._voting.clock)
        ask_at = self._ask_log_at
        if ask_at is not None and ask_at <= now:
            self._outbox.send(self.catch_up.whom_to_ask(self.head, now), GetLog(self.catch_up.known(self.chain)), now)
        if self._fetcher:
            for peer, digests in self._fetcher.ask(now, self._retry, self.links.__contains__).items():
                self._outbox.send(peer, Get(tuple(digests)), now)
        take_over_at = self._voting.take_over_at(self.rounds.timing, now)
        if take_over_at is not None and take_over_at <= now:
            self._voting.take_over(now)
        self._progress(now)
        self._recover_if_due(now)

    def _give_signs_of_life(self, now: float) -> None:
        length = max(self.rounds.timing.interval.mean, now - self._voting.clock.began)
        # Where voters are lacking, everybody may have to see who is here.
        seconds = None if self._voting.lacks_quorum(now) else length
        pause_of = pauses(self.me, self.head, self.config.timing, seconds, by_owners=self.config.parts > 0)
        for pause, peers in self._pulse.due(now, pause_of).items():
            said = self._own_head(pause)
            for peer in peers:
                self._outbox.send(peer, said, now)

    # Messages.

    def _handle(self, peer: PeerID, message: Message, now: float) -> None:
        if isinstance(message, Head):
            self._on_head(peer, message, now)
        elif isinstance(message, Offer):
            self.offering.on_offer(peer, message, now)
            self._progress(now)
        elif isinstance(message, Share):
            self.offering.on_share(peer, message, now)
            self._progress(now)
        elif isinstance(message, (Get, GetLog)):
            self._outbox.send_all(peer, asked_for(message, self.chain, self.instance) or [self._own_head()], now)
        elif isinstance(message, Log):
            self._on_log(peer, message, now)
        elif isinstance(message, Accepted) and (message.record, message.prev) == (self.head.hash, self.head.prev):
            pass  # A vote for what the votes of others have decided; its sender says soon enough where it stands.
        elif self._is_current(peer, message.record.prev if isinstance(message, Propose) else message.prev, now):
            self._voting.receive(peer, message, now)
            self._progress(now)

    def _on_head(self, peer: PeerID, message: Head, now: float) -> None:
        head, link = self.head, self.links[peer]
        is_other = link.leaving != message.leaving
        link.stands(message, self.config.pause_max, now)
        if message.head in self.chain:
            if message.head != head.hash:
                self._tell(peer, message.head, now)
        elif message.tokens > head.tokens or (
            # A recovery after this head has as many, and so has a chain that goes before this one.
            message.tokens == head.tokens and (message.round > head.round or message.head < head.hash)
        ):
            self.catch_up.notice(peer, message.round, now)
        if is_other:  # One fewer is waited for, or one more.
            self._progress(now)

    def _on_log(self, peer: PeerID, message: Log, now: float) -> None:
        if (flaw := self.catch_up.receive(peer, message, self.chain)) is not None:
            self._outbox.refuse(peer, flaw)
        self._progress(now)

    def _is_current(self, peer: PeerID, prev: Hash, now: float) -> bool:
        """Whether a message is about the round in the air; else its sender is told, or asked, what was decided."""
        if prev == self.head.hash:
            return True
        if prev in self.chain:
            self._tell(peer, prev, now)
        else:
            self.catch_up.notice(peer, 0, now)
        return False

    # Progress: whatever the state allows, until nothing more is possible.

    def _progress(self, now: float) -> None:
        while self._commit_decided(now) or self._replay(now):
            pass
        self._voting.start_clock(self.rounds.timing, now)
        self._voting.progress(self.rounds.timing, now)
        self._reduce_if_due(now)
        if self._commit_decided(now):
            self._progress(now)

    def _reduce_if_due(self, now: float) -> None:
        due = self._reduce_at(now)
        if due is not None and due <= now:
            assert self.rounds.owners is not None
            self._outbox.actions.reductions.append(self.rounds.owners.close())

    def _reduce_at(self, now: float) -> float | None:
        """When this peer, as an owner, merges the shares that it has."""
        owners, config = self.rounds.owners, self.config
        if owners is None:
            return None
        owners.collector.base = self.instance.base
        needed = config.start_peers if self.head.round == 0 else config.min_peers
        return owners.due_at(self.rounds.timing, max(1, needed), now)

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
                    self.catch_up.notice(peer, 0, now)
            return False
        missing = self.instance.missing(record)
        if missing:
            self._fetch(missing, record, list(certificate.signatures), now)
            return False
        contributions = [self.instance.held[m.digest] for m in record.members]
        self._append(record, certificate, contributions, now)
        return True

    def _replay(self, now: float) -> bool:
        """R7, R9: the next record of a verified gap whose contributions are here, on this chain or on a better one."""
        if (following := self._following.next(now)) is None:
            return False
        entry, contributions = following
        self._append(entry.record, entry.certificate, contributions, now)
        return True

    def _append(
        self, record: Record, certificate: Certificate, contributions: list[Contribution] | None, now: float
    ) -> None:
        self.rounds.append(record, certificate, contributions, now)
        self.catch_up.applied(record)
        self._fetcher.keep(self.catch_up.lacking(REPLAY_AHEAD))
        self._pulse.hurry()
        self.offering.begun(record.prev, now)

    # Forks.

    def _recover_if_due(self, now: float) -> None:
        """R8: the round in the air lacks its quorum for so long that those who are here go on without it."""
        due, base = self._recovery_due(now), self.instance.base
        if due is not None and due <= now and base is not None:
            record, certificate = self.recovery.mint(self.head, base, now)
            self._append(record, certificate, [], now)
            for peer in sorted(self.links):
                self._tell(peer, record.prev, now)

    def _recovery_due(self, now: float) -> float | None:
        if self.instance.base is None or self.catch_up.behind_since is not None:
            return None
        look_at = self.recovery.look_at(self._voting.clock)
        if look_at is None or look_at > now:
            return look_at
        return self.recovery.due_at(self.head, self._voting.clock, self.rounds.timing, now)

    @property
    def _ask_log_at(self) -> float | None:
        is_behind = self.catch_up.behind_since is not None
        return self.catch_up.ask_at(self._patience, self._retry) if is_behind else None

    @property
    def _patience(self) -> float:
        """What is pushed anyway gets this long to arrive before it is asked for."""
        return max(self.config.timing.delay_seconds_min, 2 * self.rounds.timing.decide.mean)

    @property
    def _retry(self) -> float:
        """When something asked for is asked for again: as answers come, or, before there was any, as votes do."""
        pace = self._fetcher.pace if self._fetcher.pace.is_known else self.rounds.timing.decide
        return max(8 * self.config.timing.delay_seconds_min, 4 * pace.high)

    def _fetch(
        self, digests: list[Hash], record: Record, sources: list[PeerID], now: float, at_once: bool = False
    ) -> None:
        owners = [m.peer for m in record.members]
        others = [p for p in [*sources, *owners] if p != self.me]
        self._fetcher.need(digests, others, now if at_once else now + self._patience)

    def _own_head(self, pause: float | None = None) -> Head:
        head, pause = self.head, self.config.timing.heartbeat_seconds if pause is None else pause
        return Head(head.hash, head.round, head.tokens, self.nonce, self._outbox.leaving, round(1000 * pause))

    def _tell(self, peer: PeerID, prev: Hash, now: float) -> None:
        """Tells a peer that speaks of a decided round what followed, once a link."""
        if self._told.get(peer) != prev:
            self._told[peer] = prev
            entries = self.chain.after(prev, limit=1)
            if entries:
                self._outbox.send(peer, Log(prev, self.head.round, tuple(entries)), now)
