"""The life of one training peer: train, offer, follow what is committed, until the goal or the order to leave."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import anyio

from averaging.chain import Left as LeftRound
from averaging.contribution import Contribution
from averaging.node import Node
from averaging.outbox import Commit, Fork
from averaging.owners import parse_parts
from averaging.record import FINGERPRINT_BYTES, RECOVERY, Record
from averaging.snapshots import Snapshot, SnapshotConfig, SnapshotFailed, fetch_snapshot, serve_snapshots
from network.seam import Network, PeerID
from peer.books import Books
from peer.learner import Learner, Own, SharingLearner
from peer.readings import healed, payloads_of, round_done
from peer.reports import Left, Note, Recovered, Report, Trained, Validated
from peer.shelf import Shelf
from peer.waiting import wait_heads, wait_news
from peer.worker import Worker

SAID_FILE = "said"
"""The file of a snapshot with what the peer had said and may have to take back."""


@final
@dataclass(frozen=True, slots=True)
class LoopConfig:
    """What this peer does when; counts are rounds."""

    rounds_goal: int | None = None
    """Stop when the swarm has committed so many; None goes on until told to leave."""
    rounds_max: int | None = None
    """Stop after so many rounds of one's own, whatever the swarm's goal."""
    validate_rounds: int = 20
    serve_rounds: int = 32
    """How far the snapshot for latecomers may lag; contributions since it are kept for those who replay."""
    snapshot_rounds: int = 64
    snapshot_seconds: float = 60.0
    leave_seconds_max: float = 2.0
    """For the swarm to commit a round that needs this peer no more."""
    linger_seconds_max: float = 10.0
    """At the goal: for the others to reach it too."""
    linger_seconds_min: float = 0.0
    """At the goal: for those that are down just now to come back and reach it."""
    heads_seconds_max: float = 5.0
    """For a peer that comes back to hear where the others stand, before it trains."""
    waiting_note_seconds: float = 15.0
    """A round that takes longer is explained, again and again at this distance."""


@final
class PeerLoop:
    """`run` returns when the goal is reached or `leave` was called."""

    def __init__(
        self,
        network: Network,
        node: Node,
        learner: Learner,
        worker: Worker,
        config: LoopConfig,
        *,
        run_id: str,
        snapshots: SnapshotConfig,
        rng: random.Random,
        report: Callable[[Report], None],
        saved: Snapshot,
        said: Sequence[Contribution] = (),
    ) -> None:
        """`saved` is the snapshot in the peer's storage, or the state before the first round, without what is the
        peer's own; `said` is what the peer had said when it was taken.
        """
        self._network = network
        self._node = node
        self._learner = learner
        self._worker = worker
        self._config = config
        self._run_id = run_id
        self._snapshots = snapshots
        self._rng = rng
        self._report = report
        self._me = network.peer_id
        self._applied: Record = node.head
        self._leaving = False
        self._leave_asked = anyio.Event()
        self._books = Books(
            network.peer_id, node.engine.config.remembered_bytes_max, said, by_parts=node.engine.config.parts > 0
        )
        self._unsent = False
        """Inner steps are done and not packed yet."""
        self._outdated = False
        """Something of this peer's own was committed after the newest payload was made: it may say that again."""
        self._moved = False
        """The log has forked under this peer, and its state there is not on disk yet."""
        self._shelf = Shelf(node, saved)
        self._bytes_since_snapshot = 0
        self._snapshot_round = 0
        self._snapshot_at = anyio.current_time()
        self._committed_mine = 0
        self.tokens_processed = 0
        self.train_loss = math.nan
        self.validation_loss = math.nan

    @property
    def applied(self) -> Record:
        """The newest record whose round is in the learner's state."""
        return self._applied

    def leave(self) -> None:
        """Ends `run` soon: inner steps stop at the next step, and the others are told."""
        self._leaving = True
        self._leave_asked.set()

    async def run(self) -> None:
        """Trains; the learner must hold the state at the node's head when this is called."""
        await serve_snapshots(self._network, self._run_id, lambda: self._shelf.served, self._snapshots)
        self._shelf.serve_newest()
        await self._anchor()
        if self._applied.round == 0:
            await self._validate()
        else:  # Whoever comes back was left behind, most likely, and would train a round in vain.
            await wait_heads(self._node, self._leave_asked, self._config.heads_seconds_max)
        while not self._is_done:
            await self._catch_up()
            if self._is_done:
                break
            if self._learner.steps_left and not await self._train(self._learner.steps_left):
                continue
            await self._follow()
            if not self._is_done:
                await self._contribute()
        await self._end()

    @property
    def _is_done(self) -> bool:
        goal, most = self._config.rounds_goal, self._config.rounds_max
        reached = goal is not None and self._applied.round >= goal
        return self._leaving or reached or (most is not None and self._committed_mine >= most)

    # One round.

    async def _train(self, steps: int) -> bool:
        """Some inner steps of the next round; False if they diverged."""
        # What is in the air will be committed, most likely: then these steps are the next round's.
        number = self._applied.round + (self._books.offered_on is not None)
        trained = await self._worker.run(self._learner.train, number, lambda: self._leaving, steps)
        if not trained.tokens:
            self._report(Note(f"round {number + 1}: training diverged here, nothing was offered"))
            await anyio.sleep(1.0)
            return False
        self.train_loss = trained.loss
        self.tokens_processed += trained.tokens
        self._books.trained(trained.tokens)
        self._report(Trained(self._applied.round, self.tokens_processed, trained.loss))
        self._unsent = True
        return True

    async def _contribute(self) -> None:
        """Offers what was trained and waits until the round is committed, with it or without; the first steps of the
        next round are done meanwhile.
        """
        payload = await self._pack()
        # Whoever is there at the first round is a founder. Later a newcomer votes from its second commit on, so that a
        # crowd that comes and goes never holds the majority.
        is_known = self._me in self._applied.voters or self._committed_mine > 0
        willing = is_known or self._applied.round == 0
        while not await self._offer(payload, willing):
            # Rounds came in between: this is as good on the new head, unless one was this peer's, or it is a fragment.
            await self._wait_news()
            await self._follow()
            if self._outdated or self._is_done:
                return
            if self._learner.fragments > 1:
                payload = await self._pack()
        goal = self._config.rounds_goal
        if self._learner.overlap and not self._is_done and (goal is None or self._applied.round + 1 < goal):
            await self._train(self._learner.overlap)
            await self._follow()
        while self._books.offered_on is not None and not self._is_done:
            await self._wait_news()
            await self._follow()

    async def _pack(self) -> bytes:
        payload = await self._worker.run(self._learner.pack, self._applied.round)
        self._unsent = self._outdated = False
        return payload

    async def _offer(self, payload: bytes, willing: bool) -> bool:
        tokens = max(1, self._books.pending_tokens)
        if isinstance(self._learner, SharingLearner):
            if not self._node.share(payload, tokens, willing):
                return False
            self._books.shared(self._node.head, tokens)
            return True
        offered = await self._node.offer(payload, tokens, willing)
        if offered is None:
            return False
        self._books.offered(offered)
        return True

    async def _reduce(self, learner: SharingLearner) -> None:
        """As an owner of parts: merges what others shared, and offers that to the round."""
        for reduction in self._node.take_reductions():
            if reduction.shares and reduction.head.hash == self._applied.hash == self._node.head.hash:
                payload = await self._worker.run(learner.reduce, reduction)
                # Each part carries its own share of the tokens, so that all parts together count each token once.
                tokens = sum(share.weight for share in reduction.shares) * len(parse_parts(payload))
                if reduction.head.hash == self._node.head.hash:
                    await self._node.offer(payload, max(1, tokens // learner.num_parts), willing=True)

    async def _follow(self, *, may_jump: bool = True) -> None:
        """Applies all that is committed, takes a snapshot where that was asked for."""
        if self._node.take_diverged():
            self._report(Note("this peer's state differs from what a quorum certified; fetching it anew"))
        await self._apply_commits()
        if may_jump and self._node.take_wants_snapshot():
            await self._jump()
            await self._apply_commits()
        if isinstance(self._learner, SharingLearner):
            await self._reduce(self._learner)

    async def _apply_commits(self) -> None:
        for event in self._node.take_commits():
            if isinstance(event, Fork):
                await self._go_back(event)
            else:
                await self._apply(event)
        if self._moved:
            await self._save(self._applied)

    async def _apply(self, commit: Commit) -> None:
        record = commit.record
        assert record.prev == self._applied.hash
        if isinstance(self._learner, SharingLearner):
            shared = self._books.reduced(record, commit.shared, self._learner.num_parts)
            await self._worker.run(self._learner.apply_shared, record.round, commit.contributions, shared)
            is_mine = shared is not None and bool(shared[0])
        else:
            own = self._books.committed(record)
            await self._worker.run(self._learner.apply, record.round, commit.contributions, own)
            is_mine = own in (Own.SAID, Own.FORGOTTEN)
        self._applied = record
        if is_mine:
            self._outdated = True
            self._committed_mine += 1
        base = await self._anchor()
        self._shelf.serve_newest()
        self._bytes_since_snapshot += sum(len(c.payload) for c in commit.contributions)
        self._report(
            round_done(record, self._me, base, tokens_processed=self.tokens_processed, train_loss=self.train_loss)
        )
        if record.kind == RECOVERY:
            self._report(Recovered(record.round, record.voters))
        if self._turn_to_validate(record.round):
            await self._validate()
        await self._save_if_due()

    async def _anchor(self) -> bytes:
        base = await self._worker.run(self._learner.fingerprint)
        assert len(base) == FINGERPRINT_BYTES
        self._node.anchored(self._applied.hash, base)
        return base

    async def _wait_news(self) -> None:
        await wait_news(self._node, self._leave_asked, self._config.waiting_note_seconds, self._report)

    # Following others.

    async def _catch_up(self) -> None:
        """Training on a state that others have left behind is waste: follow first, as long as there is progress."""
        while self._node.is_behind and not self._leaving:
            with anyio.move_on_after(2.0):
                await self._wait_news()
            before = self._applied
            await self._follow()
            if self._applied is before and not self._node.is_following:
                return

    async def _jump(self) -> None:
        """Fetches the state after some record of the verified gap from any peer that has it."""
        donors = list(self._node.links.linked)
        self._rng.shuffle(donors)
        for donor in donors:
            try:
                snapshot = await fetch_snapshot(
                    self._network,
                    self._run_id,
                    donor,
                    self._snapshots,
                    lambda head: self._node.child_of(head) is not None,
                )
                if await self._adopt(donor, snapshot):
                    return
            except (SnapshotFailed, ValueError) as error:
                self._report(Note(f"snapshot of {donor}: {error}"))
        self._node.snapshot_failed()
        await anyio.sleep(self._rng.uniform(0.5, 1.5))

    async def _adopt(self, donor: PeerID, snapshot: Snapshot) -> bool:
        child = self._node.child_of(snapshot.head)
        if child is None:
            return False  # Nothing certifies it (yet).
        base = await self._worker.run(self._learner.fingerprint_of, snapshot.files)
        if base != child.base:
            raise SnapshotFailed("it is not the state that the run certified")
        await self._apply_commits()  # What was offered is accounted for round by round, up to the jump.
        moved = self._node.adopt(snapshot.head)
        if moved is None:
            return False
        joined = self._books.moved(moved)
        await self._worker.run(self._learner.load, snapshot.files, own=False)
        left = [] if joined is None else payloads_of(moved.left)
        await self._worker.run(self._learner.move, left, joined)
        self._outdated |= joined is None or bool(joined)
        self._applied = self._node.record_of(snapshot.head)
        await self._anchor()
        await self._save(self._applied)
        size = sum(len(data) for data in snapshot.files.values())
        self._report(Note(f"took the state after round {self._applied.round} from {donor} ({size} bytes)"))
        self._tell_healed(moved.left)
        return True

    async def _go_back(self, fork: Fork) -> None:
        """R9: to the state where the chains parted; what was said on the one that is left is to be said again."""
        start = self._shelf.before(fork.ancestor)
        await self._worker.run(self._learner.load, start.files, own=False)
        for commit in self._node.commits_between(start.head, fork.ancestor.hash) or ():
            await self._worker.run(self._learner.apply, commit.record.round, commit.contributions, Own.NOTHING)
        self._books.left(fork.left)
        await self._worker.run(self._learner.move, payloads_of(fork.left), ())
        self._applied = fork.ancestor
        self._moved = True
        await self._anchor()
        self._tell_healed(fork.left)

    def _tell_healed(self, left: Sequence[LeftRound]) -> None:
        if left:
            self._report(healed(left, self._me, self._applied.round))

    # Keeping and telling.

    def _turn_to_validate(self, number: int) -> bool:
        """All peers hold the same anchor: they take turns, and all look at the end."""
        if number == self._config.rounds_goal:
            return True
        turn = sum(self._me.encode()) % self._config.validate_rounds
        return number % self._config.validate_rounds == turn

    async def _validate(self) -> None:
        self.validation_loss = await self._worker.run(self._learner.validation_loss)
        self._report(Validated(self._applied.round, self.validation_loss))

    async def _save_if_due(self) -> None:
        config, now = self._config, anyio.current_time()
        rounds = self._applied.round - self._snapshot_round
        heavy = self._bytes_since_snapshot >= self._node.engine.config.snapshot_bytes
        late = now - self._snapshot_at >= config.snapshot_seconds
        # Not while an offer is out: what it holds would be saved as if it had not been offered.
        if self._books.offered_on is None and (heavy or late or rounds >= config.snapshot_rounds):
            await self._save(self._applied)
        elif self._applied.round - self._shelf.newest_round >= config.serve_rounds:
            await self._dump_for_others(self._applied)

    async def _save(self, record: Record) -> None:
        files = await self._worker.run(self._learner.dump)
        await self._node.save_snapshot(record, {**files, SAID_FILE: self._books.remembered()})
        self._moved = False
        await self._dump_for_others(record)
        self._bytes_since_snapshot, self._snapshot_round = 0, record.round
        self._snapshot_at = anyio.current_time()

    async def _dump_for_others(self, record: Record) -> None:
        files = await self._worker.run(self._learner.dump, shared_only=True)
        self._shelf.put(Snapshot(record.hash, files), record.round)

    async def _end(self) -> None:
        """Leaves so that nobody has to wait for this peer: no longer a voter, and the others have what they need."""
        self._node.leave()
        goal, now = self._config.rounds_goal, anyio.current_time()
        at_goal = goal is not None and self._applied.round >= goal
        # While an offer is in the air there can be no other; what was trained since is saved.
        if self._unsent and not at_goal and self._books.offered_on is None:
            await self._offer(await self._pack(), willing=False)
        earliest = now + (self._config.linger_seconds_min if at_goal else 0.0)
        latest = now + (self._config.linger_seconds_max if at_goal else self._config.leave_seconds_max)
        # Not cancelled: what is half applied would be saved as if it were not, and its books as if it were.
        while (now := anyio.current_time()) < latest and (now < earliest or not self._node.may_go(goal)):
            await anyio.sleep(0.05)
            await self._follow(may_jump=False)
        await self._save(self._applied)
        await self._node.links.flush(0.5)
        self._report(Left(self._applied.round, self.tokens_processed, self._books.pending_tokens))
