"""Production peers in one process on virtual time: simulated links, disks and crashes, and a check of every round.

Everything from `peer.member` down is the code that real peers run; the seams are filled with simulated parts here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, final

import anyio

from averaging.config import EngineConfig
from averaging.record import sha256
from averaging.snapshots import SnapshotConfig
from dht.facts import RunFact, SpecFact
from dht.membership import MembershipConfig
from network.identity import Signer
from network.seam import PeerID
from network.simulated import Access, Link, World, WorldConfig
from peer.learner import Learner
from peer.loop import LoopConfig
from peer.member import Member, MemberConfig, Parts, run_member
from peer.reports import Left, Note, Report, RoundDone, Validated
from simulator.directory import SharedFacts, SimulatedDirectory
from simulator.storage import SimulatedStorage
from simulator.toy import Ledger, ToyLearner, ToySigner, VirtualWorker
from simulator.virtual_time import wall_time

ALONE_SECONDS_MAX = 60.0


class Disagreement(AssertionError):
    """Two peers committed different things: the one failure that must never be."""


class NoProgress(AssertionError):
    """The swarm committed nothing for longer than any fault explains."""


@final
@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """What the world is like; rates are per virtual second and peer."""

    peers: int = 4
    rounds: int = 50
    seed: int = 0
    link: Link = field(default_factory=lambda: Link(0.02, 0.02))
    access: Access = field(default_factory=Access)
    dial_loss: float = 0.0
    crash_rate: float = 0.0
    churn_rate: float = 0.0
    """The chance of each peer to crash in each round."""
    down_seconds: float = 5.0
    """After a crash a peer is back within twice so long."""
    kill_every_seconds: float | None = None
    """Crash one random peer this often."""
    train_seconds: float = 0.5
    speed_spread: float = 0.3
    """Peers differ in speed by up to this fraction."""
    start_peers: int | None = None
    """Offers that the first round waits for; None for all that are there from the beginning."""
    late_peers: int = 0
    """So many of the peers, the last ones, join only after `late_seconds`."""
    late_seconds: float = 10.0
    snapshot_bytes: int = 4000
    snapshot_seconds: float = 20.0
    validate_rounds: int = 20
    stall_seconds_max: float = 600.0
    """No commit for so long means that the protocol hangs."""


@final
@dataclass
class Outcome:
    """What happened, for summaries and checks."""

    rounds_committed: int = 0
    restarts: int = 0
    seconds: float = 0.0
    trace: str = ""
    """Hash of everything that was reported, in order: equal for equal seeds."""
    members: float = 0.0
    """Contributions per round, on average."""
    validation: dict[int, float] = field(default_factory=dict)
    fingerprints_equal: bool = False
    tokens_processed: int = 0
    tokens_merged: int = 0
    bytes_sent: int = 0
    packet_bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)


LearnerFactory = Callable[[PeerID], Learner]


async def run_swarm(
    config: SwarmConfig,
    make_learner: LearnerFactory | None = None,
    make_signer: Callable[[int], Signer] = ToySigner,
    *,
    payload_bytes_max: int = 1 << 20,
    on_report: Callable[[PeerID, Report], None] = lambda peer, report: None,
    script: Callable[[Swarm], Coroutine[Any, Any, None]] | None = None,
) -> Outcome:
    """Runs until the goal; raises `Disagreement`, `NoProgress`, or `BooksWrong` with toy learners (the default).

    `script` runs beside the peers, to break and mend what it wants.
    """
    swarm = Swarm(config, make_learner, make_signer, payload_bytes_max, on_report)
    return await swarm.run(script)


@final
class Swarm:
    """All peers, by number, through all their lives."""

    def __init__(
        self,
        config: SwarmConfig,
        make_learner: LearnerFactory | None,
        make_signer: Callable[[int], Signer],
        payload_bytes_max: int,
        on_report: Callable[[PeerID, Report], None],
    ) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.world = World(self.rng.getrandbits(32), WorldConfig(link=config.link, dial_loss=config.dial_loss))
        self.signers = [make_signer(number) for number in range(config.peers)]
        self.facts = SharedFacts(wall_time, verify=self.signers[0].verify)
        self.disks = [SimulatedStorage(random.Random(self.rng.getrandbits(32))) for _ in self.signers]
        self.speeds = [1 + config.speed_spread * self.rng.uniform(-1, 1) for _ in self.signers]
        self.ledger = Ledger()
        self.make_learner = make_learner or self.ledger.learner
        self.on_report = on_report
        self.run_fact = RunFact(sha256(b"simulated run").hex(), "simulated", self.signers[0].peer_id)
        self.spec_fact = SpecFact(b"simulated run", self.signers[0].peer_id, bytes(64))
        self.payload_bytes_max = payload_bytes_max
        self.checker = _Checker()
        self.lives: dict[int, tuple[anyio.CancelScope, SimulatedDirectory]] = {}
        self.members: dict[int, Member] = {}
        self.packet_bytes = 0
        self.done: set[int] = set()
        self.restarts = 0
        self.crashed: set[int] = set()
        self.goal_reached = False
        self.alone_since = 0.0

    async def run(self, script: Callable[[Swarm], Coroutine[Any, Any, None]] | None = None) -> Outcome:
        async with anyio.create_task_group() as tasks:
            for number in range(self.config.peers):
                tasks.start_soon(self._live, number)
            tasks.start_soon(self._watch)
            if script is not None:
                tasks.start_soon(script, self)
            if self.config.kill_every_seconds is not None:
                tasks.start_soon(self._kill_regularly, self.config.kill_every_seconds)
            while len(self.done) < self.config.peers and not self._is_over():  # noqa: ASYNC110
                await anyio.sleep(0.25)
            tasks.cancel_scope.cancel()
        return self._outcome()

    def _is_over(self) -> bool:
        """Whether whoever is not done yet has nobody left to learn from: it was down when the others left."""
        if not self.done or any(self.members[n].node.links.linked for n in self.members):
            self.alone_since = anyio.current_time()
        return anyio.current_time() - self.alone_since > ALONE_SECONDS_MAX

    async def _live(self, number: int) -> None:
        """One peer through all its lives."""
        rng = random.Random(self.rng.getrandbits(32))
        if number >= self.config.peers - self.config.late_peers:
            await anyio.sleep(self.config.late_seconds)
        while number not in self.done:
            directory = SimulatedDirectory(self.facts, rng)
            with anyio.CancelScope() as scope:
                self.lives[number] = scope, directory
                async with anyio.create_task_group() as tasks:
                    if self.config.crash_rate:
                        tasks.start_soon(self._crash_later, number, rng)
                    await self._one_life(number, directory, rng)
                    self.done.add(number)
                    tasks.cancel_scope.cancel()
            self.lives.pop(number, None)
            self.members.pop(number, None)
            if number not in self.done:
                self.restarts += 1
                await anyio.sleep(rng.uniform(0, 2 * self.config.down_seconds))

    async def _one_life(self, number: int, directory: SimulatedDirectory, rng: random.Random) -> None:
        signer, learner = self.signers[number], self.make_learner(self.signers[number].peer_id)
        speed = self.speeds[number]

        def cost(work: Callable[..., Any]) -> float:
            return self.config.train_seconds * speed * rng.uniform(0.8, 1.25) if work == learner.train else 0.001

        async with self.world.open_network(signer.peer_id, self.config.access) as network:
            parts = Parts(
                network=network,
                directory=directory,
                signer=signer,
                storage=self.disks[number],
                learner=learner,
                worker=VirtualWorker(cost),
                rng=rng,
                wall_time=wall_time,
            )

            def started(member: Member) -> None:
                self.members[number] = member

            try:
                await run_member(parts, self._member_config(), lambda r: self._report(number, r), started)
                if isinstance(learner, ToyLearner):
                    self.ledger.check_left(learner, crashed=number in self.crashed)
            finally:
                if number in self.members:
                    self.packet_bytes += self.members[number].node.packet_bytes_sent

    def _member_config(self) -> MemberConfig:
        config = self.config
        return MemberConfig(
            run=self.run_fact,
            spec=self.spec_fact,
            engine=EngineConfig(
                payload_bytes_max=self.payload_bytes_max,
                weight_max=1 << 40,
                snapshot_bytes=config.snapshot_bytes,
                start_peers=config.peers - config.late_peers if config.start_peers is None else config.start_peers,
            ),
            loop=LoopConfig(
                rounds_goal=config.rounds,
                validate_rounds=config.validate_rounds,
                snapshot_seconds=config.snapshot_seconds,
                linger_seconds_max=config.stall_seconds_max,
                linger_seconds_min=4 * config.down_seconds,
            ),
            snapshots=SnapshotConfig(bytes_max=1 << 30),
            membership=MembershipConfig(),
        )

    # Faults.

    async def _crash_later(self, number: int, rng: random.Random) -> None:
        await anyio.sleep(rng.expovariate(self.config.crash_rate))
        self.crash(number)

    async def _kill_regularly(self, seconds: float) -> None:
        while True:
            await anyio.sleep(seconds)
            if self.lives:
                self.crash(self.rng.choice(sorted(self.lives)))

    def crash(self, number: int) -> None:
        """Ends a peer's life at this instant; its disk stays, and it is back soon."""
        if self.goal_reached or number not in self.lives:
            return
        scope, directory = self.lives[number]
        self.checker.note(f"crash {number}")
        self.crashed.add(number)
        directory.is_cut = True
        self.world.crash(self.signers[number].peer_id)
        scope.cancel()

    async def _watch(self) -> None:
        """Liveness: some round is committed within the bound, as long as the goal is not reached by all."""
        while True:
            before, before_done = self.checker.newest, len(self.done)
            await anyio.sleep(self.config.stall_seconds_max)
            if (self.checker.newest, len(self.done)) == (before, before_done):
                raise NoProgress(f"seed {self.config.seed}: no commit after round {before}; {self._situations()}")

    def _situations(self) -> str:
        now = anyio.current_time()
        return "; ".join(f"{n}: {m.node.engine.situation(now)}" for n, m in sorted(self.members.items()))

    # Checks.

    def _report(self, number: int, report: Report) -> None:
        before = self.checker.newest
        self.checker.observe(self.config.seed, number, report)
        if self.checker.newest > before and self.config.churn_rate:
            for other in sorted(self.lives):
                if self.rng.random() < self.config.churn_rate:
                    self.crash(other)
        self.goal_reached |= self.checker.newest >= self.config.rounds
        self.on_report(self.signers[number].peer_id, report)

    def _outcome(self) -> Outcome:
        checker = self.checker
        return Outcome(
            rounds_committed=checker.newest,
            restarts=self.restarts,
            seconds=anyio.current_time(),
            trace=checker.trace.hexdigest(),
            members=checker.contributions / max(1, checker.newest),
            validation=checker.validation,
            fingerprints_equal=set(checker.left.values()) == {checker.newest},
            tokens_processed=sum(checker.processed.values()),
            tokens_merged=checker.merged,
            bytes_sent=sum(self.world.bytes_sent.values()),
            packet_bytes_sent=self.packet_bytes,
            notes=checker.notes,
        )


@final
class _Checker:
    """Looks at every report of every peer."""

    def __init__(self) -> None:
        self.rounds: dict[bytes, RoundDone] = {}
        self.newest = 0
        self.contributions = 0
        self.merged = 0
        self.processed: dict[tuple[int, int], int] = {}
        self.validation: dict[int, float] = {}
        self.left: dict[int, int] = {}
        self.notes: list[str] = []
        self.trace = hashlib.sha256()
        self._life: dict[int, int] = {}

    def observe(self, seed: int, number: int, report: Report) -> None:
        self.note(f"{number} {report!r}")
        if isinstance(report, RoundDone):
            key = report.prev if report.members else report.head + b"recovery"
            known = self.rounds.setdefault(key, report)
            if (known.head, known.fingerprint) != (report.head, report.fingerprint):
                raise Disagreement(
                    f"seed {seed}, round {report.round}: peer {number} committed {report.head.hex()[:8]} {report.fingerprint.hex()[:8]}, not {known.head.hex()[:8]} {known.fingerprint.hex()[:8]}"
                )
            if report.round > self.newest:
                self.newest, self.merged = report.round, report.tokens
                self.contributions += len(report.members)
            life = self._life.setdefault(number, 0)
            if report.tokens_processed < self.processed.get((number, life), 0):
                life = self._life[number] = life + 1
            self.processed[number, life] = report.tokens_processed
        elif isinstance(report, Validated):
            self.validation[report.round] = report.loss
        elif isinstance(report, Left):
            self.left[number] = report.round
        elif isinstance(report, Note):
            self.notes.append(f"{number}: {report.text}")

    def note(self, text: str) -> None:
        self.trace.update(f"{anyio.current_time():.6f} {text}\n".encode())
