"""Production peers of a gossip run in one process on virtual time: simulated links, disks, crashes and partitions."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import anyio

from averaging.config import EngineConfig
from averaging.gossip import GossipConfig
from averaging.record import sha256
from averaging.snapshots import SnapshotConfig
from dht.facts import RunFact, SpecFact
from dht.membership import MembershipConfig
from network.identity import Signer
from network.seam import PeerID
from network.simulated import Access, Link, World, WorldConfig
from peer.gossip_member import GossipMember, run_gossip_member
from peer.learner import Learner
from peer.loop import LoopConfig
from peer.member import MemberConfig, Parts
from peer.reports import Left, Note, Report, RoundDone, Validated
from simulator.checkers import Disagreement, NoProgress
from simulator.directory import SharedFacts, SimulatedDirectory
from simulator.storage import SimulatedStorage
from simulator.toy import ToySigner, VirtualWorker
from simulator.virtual_time import wall_time


@final
@dataclass(frozen=True, slots=True)
class GossipSwarmConfig:
    """What the world is like; rates are per virtual second and peer."""

    peers: int = 4
    rounds: int = 20
    seed: int = 0
    group_size: int = 2
    start_peers: int | None = None
    """None: all that are there from the beginning."""
    link: Link = field(default_factory=lambda: Link(0.02, 0.02))
    access: Access = field(default_factory=Access)
    dial_loss: float = 0.0
    crash_rate: float = 0.0
    churn_rate: float = 0.0
    """The chance of a peer to crash in each of its rounds."""
    kill_every_seconds: float | None = None
    down_seconds: float = 5.0
    train_seconds: float = 0.5
    speed_spread: float = 0.3
    late_peers: int = 0
    late_seconds: float = 10.0
    snapshot_rounds: int = 64
    snapshot_seconds: float = 20.0
    validate_rounds: int = 20
    stall_seconds_max: float = 300.0
    """No round of anybody for so long means that the protocol hangs."""
    payload_bytes_max: int = 1 << 20


@final
@dataclass
class GossipOutcome:
    """What happened, for summaries and checks."""

    rounds: int = 0
    """That every peer has behind it, at least."""
    restarts: int = 0
    seconds: float = 0.0
    trace: str = ""
    """Hash of all reports, in order: equal for equal seeds."""
    sizes: Counter[int] = field(default_factory=Counter)
    """How many peers' rounds were meetings of how many; 1: alone."""
    halves: int = 0
    """Members named by a meeting that did not report it: a crash, or a doubt that was resolved wrongly."""
    learners: dict[int, Learner] = field(default_factory=dict)
    """Of those who reached the end, with their replicas."""
    first_loss: float = float("nan")
    last_losses: dict[int, float] = field(default_factory=dict)
    fingerprints: dict[int, bytes] = field(default_factory=dict)
    tokens_merged: int = 0
    bytes_sent: int = 0
    packet_bytes_sent: int = 0
    notes: list[str] = field(default_factory=list)


async def run_gossip_swarm(
    config: GossipSwarmConfig,
    make_learner: Callable[[PeerID], Learner],
    make_signer: Callable[[int], Signer] = ToySigner,
    *,
    on_report: Callable[[PeerID, Report], None] = lambda peer, report: None,
    script: Callable[[GossipSwarm], Coroutine[Any, Any, None]] | None = None,
) -> GossipOutcome:
    """Runs until all have reached the goal; raises `Disagreement` if two peers tell of one meeting differently, and
    `NoProgress`. `script` runs beside the peers, to break and mend what it wants.
    """
    swarm = GossipSwarm(config, make_learner, make_signer, on_report)
    return await swarm.run(script)


@final
class GossipSwarm:
    """All peers, by number, through all their lives."""

    def __init__(
        self,
        config: GossipSwarmConfig,
        make_learner: Callable[[PeerID], Learner],
        make_signer: Callable[[int], Signer],
        on_report: Callable[[PeerID, Report], None],
    ) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.world = World(self.rng.getrandbits(32), WorldConfig(link=config.link, dial_loss=config.dial_loss))
        self.signers = [make_signer(number) for number in range(config.peers)]
        self.facts = SharedFacts(wall_time, verify=self.signers[0].verify)
        self.disks = [SimulatedStorage(random.Random(self.rng.getrandbits(32))) for _ in self.signers]
        self.speeds = [1 + config.speed_spread * self.rng.uniform(-1, 1) for _ in self.signers]
        self.make_learner = make_learner
        self.on_report = on_report
        self.run_fact = RunFact(sha256(b"simulated gossip").hex(), "simulated", self.signers[0].peer_id)
        self.spec_fact = SpecFact(b"simulated gossip", self.signers[0].peer_id, bytes(64))
        self.lives: dict[int, tuple[anyio.CancelScope, SimulatedDirectory]] = {}
        self.members: dict[int, GossipMember] = {}
        self.learners: dict[int, Learner] = {}
        self.done: set[int] = set()
        self.outcome = GossipOutcome()
        self.rounds: dict[int, int] = {}
        self._numbers = {signer.peer_id: number for number, signer in enumerate(self.signers)}
        self._meetings: dict[bytes, tuple[PeerID, ...]] = {}
        self._reported: Counter[bytes] = Counter()
        self._tokens: dict[int, int] = {}
        self._trace = hashlib.sha256()
        self._news = 0

    async def run(self, script: Callable[[GossipSwarm], Coroutine[Any, Any, None]] | None = None) -> GossipOutcome:
        async with anyio.create_task_group() as tasks:
            for number in range(self.config.peers):
                tasks.start_soon(self._live, number)
            tasks.start_soon(self._watch)
            if script is not None:
                tasks.start_soon(script, self)
            if self.config.kill_every_seconds is not None:
                tasks.start_soon(self._kill_regularly, self.config.kill_every_seconds)
            while len(self.done) < self.config.peers:  # noqa: ASYNC110
                await anyio.sleep(0.25)
            tasks.cancel_scope.cancel()
        return self._ended()

    def crash(self, number: int) -> None:
        """Ends a peer's life at this instant; its disk stays, and it is back soon."""
        if number in self.lives and number not in self.done:
            scope, directory = self.lives[number]
            self._note(f"crash {number}")
            directory.is_cut = True
            self.world.crash(self.signers[number].peer_id)
            scope.cancel()

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
                self.outcome.restarts += 1
                await anyio.sleep(rng.uniform(0, 2 * self.config.down_seconds))

    async def _one_life(self, number: int, directory: SimulatedDirectory, rng: random.Random) -> None:
        config, signer = self.config, self.signers[number]
        learner = self.learners[number] = self.make_learner(signer.peer_id)

        def cost(work: Callable[..., Any], args: Sequence[Any]) -> tuple[float]:
            trains = work == learner.train
            return (config.train_seconds * self.speeds[number] * rng.uniform(0.8, 1.25) if trains else 0.001,)

        async with self.world.open_network(signer.peer_id, config.access) as network:
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

            def started(member: GossipMember) -> None:
                self.members[number] = member

            try:
                await run_gossip_member(
                    parts, self._member_config(), self._gossip_config(), lambda r: self._report(number, r), started
                )
            finally:
                if number in self.members:
                    self.outcome.packet_bytes_sent += self.members[number].node.packet_bytes_sent

    def _member_config(self) -> MemberConfig:
        config = self.config
        return MemberConfig(
            run=self.run_fact,
            spec=self.spec_fact,
            engine=EngineConfig(config.payload_bytes_max, 1 << 40, 1 << 20),
            loop=LoopConfig(
                rounds_goal=config.rounds,
                validate_rounds=config.validate_rounds,
                snapshot_rounds=config.snapshot_rounds,
                snapshot_seconds=config.snapshot_seconds,
                linger_seconds_min=4 * config.down_seconds,
            ),
            snapshots=SnapshotConfig(bytes_max=1 << 30),
            membership=MembershipConfig(),
        )

    def _gossip_config(self) -> GossipConfig:
        config = self.config
        founders = config.peers - config.late_peers
        return GossipConfig(
            payload_bytes_max=config.payload_bytes_max,
            weight_max=1 << 40,
            group_size=config.group_size,
            start_peers=founders if config.start_peers is None else config.start_peers,
        )

    # Faults.

    async def _crash_later(self, number: int, rng: random.Random) -> None:
        await anyio.sleep(rng.expovariate(self.config.crash_rate))
        self.crash(number)

    async def _kill_regularly(self, seconds: float) -> None:
        while True:
            await anyio.sleep(seconds)
            training = sorted(number for number in self.lives if self.rounds.get(number, 0) < self.config.rounds)
            if training:
                self.crash(self.rng.choice(training))

    async def _watch(self) -> None:
        while True:
            before = self._news, len(self.done)
            await anyio.sleep(self.config.stall_seconds_max)
            if (self._news, len(self.done)) == before:
                raise NoProgress(f"seed {self.config.seed}: nobody ended a round; they stand at {self.rounds}")

    # Checks.

    def _report(self, number: int, report: Report) -> None:
        self._note(f"{number} {report!r}")
        outcome = self.outcome
        if isinstance(report, RoundDone):
            self._news += 1
            self._check(number, report)
            self.rounds[number] = report.round
            self._tokens[number] = report.tokens
            outcome.sizes[len(report.members)] += 1
            outcome.fingerprints[number] = report.fingerprint
            if self.config.churn_rate and self.rng.random() < self.config.churn_rate:
                self.crash(number)
        elif isinstance(report, Validated):
            if report.round == 0:
                outcome.first_loss = report.loss
            outcome.last_losses[number] = report.loss
        elif isinstance(report, Left):
            self.rounds[number] = report.round
        elif isinstance(report, Note):
            outcome.notes.append(f"{number}: {report.text}")
        self.on_report(self.signers[number].peer_id, report)

    def _check(self, number: int, report: RoundDone) -> None:
        if self._meetings.setdefault(report.head, report.members) != report.members:
            raise Disagreement(f"seed {self.config.seed}: peer {number} tells of a meeting of {report.members}")
        if self.signers[number].peer_id not in report.members:
            raise Disagreement(f"seed {self.config.seed}: peer {number} was in a meeting of others: {report.members}")
        self._reported[report.head] += 1
        if self._reported[report.head] > len(report.members):
            raise Disagreement(f"seed {self.config.seed}: a meeting was applied twice: {report.members}")

    def _note(self, text: str) -> None:
        self._trace.update(f"{anyio.current_time():.6f} {text}\n".encode())

    def _ended(self) -> GossipOutcome:
        outcome = self.outcome
        outcome.rounds = min(self.rounds[number] for number in self.done)
        outcome.seconds = anyio.current_time()
        outcome.trace = self._trace.hexdigest()
        outcome.halves = sum(len(members) - self._reported[head] for head, members in self._meetings.items())
        outcome.learners = {number: self.learners[number] for number in sorted(self.done)}
        outcome.tokens_merged = sum(self._tokens.values())
        outcome.bytes_sent = sum(self.world.bytes_sent.values())
        return outcome
