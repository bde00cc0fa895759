"""The life of one peer in a gossip run: take a replica, train, meet others, until the goal or the order to leave.

Nothing certifies a replica here: a newcomer believes the member whose state it takes, and all that is checked is that
the state fits the model and is finite. Replicas differ, so fingerprints do too, and a round is a peer's own count:
after a meeting all of its members stand at the same one, the highest of theirs and one more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import final

import anyio
import msgpack

from averaging.gossip import GossipConfig
from averaging.gossip_meeting import Met, Signal
from averaging.gossip_messages import Done, encode_members, parse_members
from averaging.gossip_node import GossipNode
from averaging.gossip_voice import Said
from averaging.record import INTEGER_MAX, Hash, Malformed, as_hash, as_integer, as_list, unpack_list
from averaging.snapshots import Snapshot, SnapshotConfig, SnapshotFailed, fetch_snapshot, serve_snapshots
from averaging.storage import Storage
from dht.facts import MemberFact, RunFact
from network.seam import Network, PeerID
from peer.learner import Learner, Own
from peer.loop import LoopConfig
from peer.reports import Left, Note, Report, RoundDone, Trained, Validated
from peer.worker import Worker

GOSSIP_FILE = "gossip"
"""The file of a snapshot that says how far the replica is, and which meetings are in it."""
_GOSSIP_BYTES_MAX = 1 << 20
_MEETINGS_MAX = 256
ROUNDS_BEHIND_MAX = 64
"""A peer that is further behind the median of the others takes one of their replicas: it has slept."""
DONORS_MAX = 8
FIRST_DONORS_MAX = 2
"""Of those who say that they are at the beginning too: their word may be half a minute old."""
FOUND_SECONDS = 20.0
"""For a newcomer to hear of others before it takes itself for the first."""
LOOK_SECONDS = 2.0
"""The same for the run's founder, which may be the first, or may have lost its folder."""


@final
@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replica is: rounds behind it, tokens of this peer's own in it, and the meetings that it organised."""

    round: int = 0
    tokens: int = 0
    outcomes: Mapping[Hash, Done] | None = None

    def encode(self) -> bytes:
        meetings = [
            [meeting, done.round, encode_members(done.members)] for meeting, done in (self.outcomes or {}).items()
        ]
        packed: bytes = msgpack.packb([self.round, self.tokens, meetings])
        return packed


def parse_progress(data: bytes) -> Progress:
    """Raises `Malformed`."""
    round_, tokens, meetings = unpack_list(data, GOSSIP_FILE, _GOSSIP_BYTES_MAX, 3)
    outcomes = {}
    for fields in as_list(meetings, "meetings", _MEETINGS_MAX):
        meeting, at, members = as_list(fields, "meeting", 3, exact=True)
        outcomes[as_hash(meeting, "meeting")] = Done(as_integer(at, "meeting.round"), parse_members(members))
    return Progress(as_integer(round_, "round", INTEGER_MAX), as_integer(tokens, "tokens"), outcomes)


@final
class Members:
    """The others as the directory tells, for whoever wants to look or wait."""

    def __init__(self) -> None:
        self.facts: dict[PeerID, MemberFact] = {}
        self.look: Callable[[], None] = lambda: None
        """Has them looked up soon."""
        self._signal = Signal()

    def update(self, facts: Mapping[PeerID, MemberFact]) -> None:
        self.facts = dict(facts)
        self._signal.notify()

    def names(self) -> list[PeerID]:
        return [peer for peer, fact in self.facts.items() if fact.trains and not fact.left]

    def median_round(self) -> int:
        """Where the swarm is; a few who say nonsense do not move it. Facts are some seconds old."""
        rounds = [self.facts[peer].round for peer in self.names()]
        return median_low(rounds) if rounds else 0

    async def wait_changed(self, seconds: float) -> None:
        await self._signal.wait(seconds)


@final
class GossipLoop:
    """`run` returns when the goal is reached or `leave` was called."""

    def __init__(
        self,
        network: Network,
        node: GossipNode,
        learner: Learner,
        worker: Worker,
        storage: Storage,
        config: LoopConfig,
        *,
        members: Members,
        gossip: GossipConfig,
        run: RunFact,
        snapshots: SnapshotConfig,
        rng: random.Random,
        report: Callable[[Report], None],
        progress: Progress | None,
    ) -> None:
        """`progress` is that of the replica which the learner holds; None for one that has just begun."""
        self._network = network
        self._node = node
        self._learner = learner
        self._worker = worker
        self._storage = storage
        self._members = members
        self._config = config
        self._gossip = gossip
        self._run_id = run.run_id
        self._is_founder = network.peer_id == run.creator
        self._snapshots = snapshots
        self._rng = rng
        self._report = report
        self._is_new = progress is None
        self._leaving = False
        self._leave_asked = anyio.Event()
        self._pending_tokens = 0
        self._rounds_mine = 0
        self._served: Snapshot | None = None
        self._saved_round = self.round = 0 if progress is None else progress.round
        self._saved_at = anyio.current_time()
        self.tokens = 0 if progress is None else progress.tokens
        """Of this peer's own, in its replica."""
        self.head = self._first = Hash(bytes.fromhex(run.run_id))
        """The last meeting."""
        self.tokens_processed = 0
        self.train_loss = math.nan
        self.validation_loss = math.nan

    def leave(self) -> None:
        """Ends `run` soon: inner steps stop at the next step, and one more meeting may take them."""
        self._leaving = True
        self._leave_asked.set()
        self._node.hurry(self._config.leave_seconds_max)

    async def run(self) -> None:
        """Trains; the learner must hold the replica that `progress` is about when this is called."""
        await serve_snapshots(self._network, self._run_id, lambda: self._served, self._snapshots)
        await self._refresh_served()
        await self._begin()
        if self.round == 0:
            await self._validate()
        while not self._is_done:
            if self._members.median_round() > self.round + ROUNDS_BEHIND_MAX:  # Else its own work is worth more.
                self._report(Note(f"the others are far ahead of round {self.round}; taking one of their replicas"))
                await self._take_replica()
            begun = anyio.current_time()
            trained = await self._worker.run(self._learner.train, self.round, lambda: self._leaving)
            if not trained.tokens:
                self._report(Note(f"round {self.round + 1}: training diverged here, nothing was said"))
                await anyio.sleep(1.0)
                continue
            self.train_loss = trained.loss
            self.tokens_processed += trained.tokens
            self._pending_tokens += trained.tokens
            self._report(Trained(self.round, self.tokens_processed, trained.loss))
            await self._meet(anyio.current_time() - begun)
        await self._end()

    @property
    def _is_done(self) -> bool:
        goal, most = self._config.rounds_goal, self._config.rounds_max
        reached = goal is not None and self.round >= goal
        return self._leaving or reached or (most is not None and self._rounds_mine >= most)

    # Beginning.

    async def _begin(self) -> None:
        """Waits for the founders, or takes a replica where others are already further."""
        begun, told = anyio.current_time(), 0
        alone = LOOK_SECONDS if self._is_founder else FOUND_SECONDS
        while self._is_new and not self._leaving:
            waited, others = anyio.current_time() - begun, len(self._members.names())
            has_heard = others > 0 or waited >= alone
            if has_heard and (others + 1 >= self._gossip.start_peers or self._members.median_round() > 0):
                break
            if waited >= told * self._config.waiting_note_seconds and others + 1 < self._gossip.start_peers:
                told += 1
                wanted, here = self._gossip.start_peers, others + 1
                are = "is" if here == 1 else "are"
                self._report(Note(f"waiting for {wanted} peers to begin with; {here} {are} here"))
            self._members.look()
            await self._members.wait_changed(1.0)
        if self._is_new and await self._take_replica():
            await self._refresh_served()

    async def _take_replica(self) -> bool:
        """The replica of any member that gives one, the most advanced first. Nobody vouches for it but that member."""
        facts, middle = self._members.facts, self._members.median_round()
        donors = [peer for peer in self._members.names() if self._is_new or facts[peer].round > self.round]
        self._rng.shuffle(donors)
        donors.sort(key=lambda peer: facts[peer].round < middle)
        for donor in donors[: DONORS_MAX if middle else FIRST_DONORS_MAX]:
            if not self._leaving and await self._take_from(donor):
                return True
        if middle > self.round:
            self._report(Note("no member gave its replica; going on with this one"))
        return False

    async def _take_from(self, donor: PeerID) -> bool:
        begun: list[Hash] = []
        try:
            snapshot = await fetch_snapshot(
                self._network, self._run_id, donor, self._snapshots, lambda head: not self._is_first(head, begun)
            )
            files = dict(snapshot.files)
            progress = progress_in(files)
            await self._worker.run(self._learner.load, files, own=False)
        except (SnapshotFailed, ValueError) as error:
            if not begun:
                self._report(Note(f"replica of {donor}: {error}"))
            return False
        self.round = max(self.round, min(progress.round, self._members.median_round() + self._gossip.round_leap_max))
        self._is_new = False
        size = sum(len(data) for data in files.values())
        self._report(Note(f"took the replica of {donor} at round {self.round} ({size} bytes)"))
        await self._save()
        return True

    def _is_first(self, head: Hash, begun: list[Hash]) -> bool:
        """Whether a replica has not met anybody yet: then it is the one that this peer holds too."""
        if head == self._first:
            begun.append(head)
        return bool(begun)

    # One round.

    async def _meet(self, trained_seconds: float) -> None:
        payload = await self._worker.run(self._learner.pack, self.round)
        base = await self._worker.run(self._learner.fingerprint)
        said = Said(payload, max(1, self._pending_tokens), base, self.round)
        met = await self._explained(said, trained_seconds)
        await self._worker.run(self._learner.apply, met.round, met.contributions, Own.SAID)
        before = self.head
        self.round, self.head = met.round, met.meeting
        self.tokens += self._pending_tokens
        self._pending_tokens = 0
        self._rounds_mine += 1
        await self._refresh_served()
        self._report(await self._round_done(met, before))
        if self._turn_to_validate(self.round):
            await self._validate()
        await self._save_if_due()

    async def _explained(self, said: Said, trained_seconds: float) -> Met:
        """The meeting; a long wait for it is explained."""
        async with anyio.create_task_group() as tasks:

            async def explain() -> None:
                while True:
                    await anyio.sleep(self._config.waiting_note_seconds)
                    others = len(self._members.names())
                    self._report(Note(f"round {self.round + 1}: looking for one of {others} others to meet"))

            tasks.start_soon(explain)
            met = await self._node.meet(said, trained_seconds)
            tasks.cancel_scope.cancel()
        return met

    async def _round_done(self, met: Met, before: Hash) -> RoundDone:
        return RoundDone(
            round=self.round,
            head=met.meeting,
            prev=before,
            members=tuple(c.owner for c in met.contributions),
            mine=True,
            tokens=self.tokens,
            tokens_processed=self.tokens_processed,
            fingerprint=await self._worker.run(self._learner.fingerprint),
            train_loss=self.train_loss,
        )

    # Keeping and telling.

    def _turn_to_validate(self, number: int) -> bool:
        goal = self._config.rounds_goal
        turn = sum(self._network.peer_id.encode()) % self._config.validate_rounds
        return (goal is not None and number >= goal) or number % self._config.validate_rounds == turn

    async def _validate(self) -> None:
        self.validation_loss = await self._worker.run(self._learner.validation_loss)
        self._report(Validated(self.round, self.validation_loss))

    async def _save_if_due(self) -> None:
        config, now = self._config, anyio.current_time()
        due = self.round - self._saved_round >= config.snapshot_rounds
        if due or now - self._saved_at >= config.snapshot_seconds:
            await self._save()

    async def _save(self) -> None:
        files = await self._worker.run(self._learner.dump)
        outcomes = {meeting: done for meeting, done in self._node.outcomes.items() if done is not None}
        progress = Progress(self.round, self.tokens, outcomes)
        await self._storage.save_snapshot({**files, GOSSIP_FILE: progress.encode()}, [])
        self._saved_round, self._saved_at = self.round, anyio.current_time()

    async def _refresh_served(self) -> None:
        """What a newcomer may take is never older than the last meeting."""
        files = await self._worker.run(self._learner.dump, shared_only=True)
        self._served = Snapshot(self.head, {**files, GOSSIP_FILE: Progress(self.round).encode()})

    async def _end(self) -> None:
        """Nobody waits for a peer that has left; its replica goes with it, its work is in those that it met."""
        self._node.rest()
        goal = self._config.rounds_goal
        await self._save()
        if goal is not None and self.round >= goal:
            with anyio.move_on_after(self._config.linger_seconds_min):
                await self._leave_asked.wait()
        self._report(Left(self.round, self.tokens_processed, self._pending_tokens))


def progress_in(files: dict[str, bytes]) -> Progress:
    """Takes it out of a snapshot's files; raises `Malformed` if it is not there."""
    data = files.pop(GOSSIP_FILE, None)
    if data is None:
        raise Malformed("the snapshot is not one of a gossip run")
    return parse_progress(data)
