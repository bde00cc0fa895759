"""Production peers in one process on virtual time: simulated links, disks and faults, and a check of all they do.

Everything from `peer.member` down is the code that real peers run; the seams are filled with simulated parts here.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, final

import anyio

from averaging.config import EngineConfig
from averaging.record import sha256
from averaging.snapshots import SnapshotConfig
from dht.facts import RunFact, SpecFact
from network.identity import Signer
from network.seam import PeerID
from network.simulated import World, WorldConfig
from peer.learner import Learner
from peer.loop import LoopConfig
from peer.member import Member, MemberConfig, Parts, run_member
from peer.reports import Left, Report, RoundDone, Trained
from simulator.checkers import Bounds, Checks, check_members
from simulator.directory import SharedFacts, SimulatedDirectory
from simulator.faults import Late
from simulator.injector import Injector
from simulator.liveness import break_and_mend, kill_regularly, watch
from simulator.outcome import Outcome, SwarmConfig
from simulator.owners_vector import OwnersVectorLearner
from simulator.phases import Phases
from simulator.storage import SimulatedStorage
from simulator.toy import Ledger, ToyLearner, ToySigner, VirtualWorker, training_share
from simulator.vector import VectorLearner
from simulator.virtual_time import wall_time

ALONE_SECONDS_MAX = 60.0


LearnerFactory = Callable[[PeerID], Learner]
Script = Callable[["Swarm"], Coroutine[Any, Any, None]]


async def run_swarm(
    config: SwarmConfig,
    make_learner: LearnerFactory | None = None,
    make_signer: Callable[[int], Signer] | None = None,
    *,
    payload_bytes_max: int = 1 << 20,
    on_report: Callable[[PeerID, Report], None] = lambda peer, report: None,
    script: Script | None = None,
) -> Outcome:
    """Runs until the goal; raises what the checks find: `Disagreement`, `NoProgress`, `Unbounded`, and `BooksWrong`
    with toy learners (the default).

    `script` runs beside the peers, to break and mend what it wants.
    """
    swarm = Swarm(config, make_learner, make_signer, payload_bytes_max=payload_bytes_max, on_report=on_report)
    return await swarm.run(script)


@final
class Swarm:
    """All peers, by number, through all their lives."""

    def __init__(
        self,
        config: SwarmConfig,
        make_learner: LearnerFactory | None = None,
        make_signer: Callable[[int], Signer] | None = None,
        *,
        payload_bytes_max: int = 1 << 20,
        on_report: Callable[[PeerID, Report], None] = lambda peer, report: None,
    ) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.ledger = Ledger()
        self.checker = Checks(by_owners=config.parts > 0)
        self.bounds = Bounds(config.peers)
        self.phases = Phases(self._round_of)
        rng = random.Random(self.rng.getrandbits(32))
        self.injector = Injector(config.faults, config.faults_end, rng, self.phases, self.checker)
        self.world = World(
            self.rng.getrandbits(32), WorldConfig(link=config.link), self.injector if config.faults else None
        )
        self._make_signer = make_signer or self._toy_signer
        self._num_identities = 0
        self.numbers: dict[PeerID, int] = {}
        self.signers: list[Signer] = []
        self.disks: list[SimulatedStorage] = []
        for number in range(config.peers):
            self._new_identity(number)
        self.facts = SharedFacts(wall_time, verify=self.signers[0].verify)
        self.speeds = [1 + config.speed_spread * self.rng.uniform(-1, 1) for _ in self.signers]
        self.make_learner = make_learner or self.ledger.learner
        self.on_report = on_report
        self.run_fact = RunFact(sha256(b"simulated run").hex(), "simulated", self.signers[0].peer_id)
        self.spec_fact = SpecFact(b"simulated run", self.signers[0].peer_id, bytes(64))
        self.payload_bytes_max = payload_bytes_max
        self.lives: dict[int, tuple[anyio.CancelScope, SimulatedDirectory]] = {}
        self.members: dict[int, Member] = {}
        self.packet_bytes = 0
        self.trained_seconds: dict[int, float] = defaultdict(float)
        """In inner steps, by peer and through all its lives, also in those that its end cut off."""
        self.done: set[int] = set()
        self.restarts = 0
        self.recovering: set[int] = set()
        self.recoveries = 0
        self.crashed: set[PeerID] = set()
        """Whose work may be lost."""
        self.goal_reached = False
        self.ending = False
        self.alone_since = 0.0
        self.seconds = 0.0
        self._late = {fault.peer: anyio.Event() for fault in config.faults if isinstance(fault, Late)}
        self._away: dict[int, float] = {}
        """For how long whoever goes now stays away."""
        self._loses_disk: set[int] = set()
        self._all_back = anyio.Event()
        """No fault keeps anybody down any more."""

    async def run(self, script: Script | None = None) -> Outcome:
        try:
            await self._run(script)
        finally:
            self.seconds = anyio.current_time()
        return self.outcome()

    async def _run(self, script: Script | None) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(self.config.peers):
                tasks.start_soon(self._live, number)
            tasks.start_soon(watch, self)
            if script is not None:
                tasks.start_soon(script, self)
            if self.config.faults or self.config.live_seconds is not None:
                tasks.start_soon(break_and_mend, self)
            if self.config.kill_every_seconds is not None:
                tasks.start_soon(kill_regularly, self, self.config.kill_every_seconds)
            while len(self.done) < self.config.peers and not self._is_over():
                await anyio.sleep(0.25)
                self.checker.raise_found()
            tasks.cancel_scope.cancel()

    def _is_over(self) -> bool:
        """Whether whoever is not done yet has nobody left to learn from: it was down when the others left."""
        if not self.done or any(self.members[n].node.links.linked for n in self.members):
            self.alone_since = anyio.current_time()
        return anyio.current_time() - self.alone_since > ALONE_SECONDS_MAX

    # Lives.

    async def _live(self, number: int) -> None:
        """One peer through all its lives."""
        rng = random.Random(self.rng.getrandbits(32))
        if number in self._late:
            await self._late[number].wait()
        while not (number in self.done or self.ending):
            directory = SimulatedDirectory(self.facts, rng)
            with anyio.CancelScope() as scope:
                self.lives[number] = scope, directory
                self.checker.begins(number)
                async with anyio.create_task_group() as tasks:
                    await self._one_life(number, directory, rng)
                    if number not in self._away:
                        self.done.add(number)
                    tasks.cancel_scope.cancel()
            self.lives.pop(number, None)
            self.members.pop(number, None)
            if number not in self.done:
                await self._stay_away(number, rng)
        self.done.add(number)

    async def _stay_away(self, number: int, rng: random.Random) -> None:
        self.restarts += 1
        self.recovering.add(number)
        usual = rng.uniform(0, 2 * self.config.down_seconds)
        if number in self._loses_disk:
            self._loses_disk.discard(number)
            self._new_identity(number)
        away = self._away.pop(number, None)
        if away is None:
            await anyio.sleep(usual)
        else:
            with anyio.move_on_after(away):
                await self._all_back.wait()

    def _new_identity(self, number: int) -> None:
        """A key that nobody has had, and an empty disk."""
        signer = self._make_signer(self._num_identities)
        self._num_identities += 1
        self.numbers[signer.peer_id] = number
        disk = SimulatedStorage(
            random.Random(self.rng.getrandbits(32)),
            watch=lambda what, entries: self.injector.on_disk(number, what, entries),
        )
        self.signers[number : number + 1] = [signer]
        self.disks[number : number + 1] = [disk]

    def _toy_signer(self, number: int) -> Signer:
        return ToySigner(number, self.ledger.units.history.listen)

    async def _one_life(self, number: int, directory: SimulatedDirectory, rng: random.Random) -> None:
        signer, learner = self.signers[number], self.make_learner(self.signers[number].peer_id)
        injector, speed = self.injector, self.speeds[number]

        def cost(work: Callable[..., Any], args: Sequence[Any]) -> Iterator[float]:
            share = training_share(learner, work, args)
            pieces = round(share * learner.round_steps) if self.config.stepwise else 1
            for _ in range(max(1, pieces)):
                slow = injector.slowness(number)
                usual = self.config.train_seconds * share / pieces * speed if share else 0.001
                yield usual * slow * (rng.uniform(*self.config.train_spread) if share else 1.0)

        def spent(work: Callable[..., Any], seconds: float) -> None:
            if work == learner.train:
                self.trained_seconds[number] += seconds

        async with self.world.open_network(signer.peer_id, self.config.access) as network:
            parts = Parts(
                network=network,
                directory=directory,
                signer=signer,
                storage=self.disks[number],
                learner=learner,
                worker=VirtualWorker(cost, lambda: injector.is_frozen(number), spent),
                rng=rng,
                wall_time=lambda: wall_time() + injector.skew(number),
            )

            def started(member: Member) -> None:
                self.members[number] = member
                if self.ending or number in self._away:
                    member.loop.leave()

            try:
                await run_member(parts, self._member_config(), lambda r: self._report(number, r), started)
                if isinstance(learner, (ToyLearner, VectorLearner, OwnersVectorLearner)):
                    learner.check_left(crashed=signer.peer_id in self.crashed)
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
                start_peers=config.peers - len(self._late) if config.start_peers is None else config.start_peers,
                max_peers=max(64, config.peers),
                min_peers=config.min_peers,
                recovery_share=config.recovery_share,
                parts=config.parts,
                voters_max=config.voters_max,
            ),
            loop=LoopConfig(
                rounds_goal=config.rounds if config.live_seconds is None else None,
                validate_rounds=config.validate_rounds,
                snapshot_seconds=config.snapshot_seconds,
                linger_seconds_max=config.stall_seconds_max,
                linger_seconds_min=4 * config.down_seconds,
            ),
            snapshots=SnapshotConfig(bytes_max=1 << 30),
            membership=config.membership,
        )

    # Faults: what the injector does, and what goes on for ever.

    def peer_of(self, number: int) -> PeerID:
        return self.signers[number].peer_id

    def number_of(self, peer: PeerID) -> int:
        return self.numbers[peer]

    def all_numbers(self) -> Sequence[int]:
        return range(self.config.peers)

    def crash(self, number: int, seconds_down: float | None = None, *, loses_disk: bool = False) -> bool:
        """Ends a peer's life at this instant; its disk stays, and it is back soon. False if it does not live."""
        if self.goal_reached or self.ending or number not in self.lives:
            return False
        if loses_disk and not self.checker.records and number == 0:
            return False  # The founder alone can begin the run.
        scope, directory = self.lives[number]
        if scope.cancel_called:
            return False
        self.checker.note(f"crash {number}")
        if seconds_down is not None:
            self._away[number] = seconds_down
        else:
            self._away.pop(number, None)
        if loses_disk:
            self._loses_disk.add(number)
        peer = self.peer_of(number)
        self.crashed.add(peer)
        directory.is_cut = True
        self.world.crash(peer)
        scope.cancel()
        return True

    def leave(self, number: int, seconds_away: float) -> bool:
        """Has a peer say goodbye, and come back."""
        if self.goal_reached or self.ending or number not in self.lives or number in self._away:
            return False
        self._away[number] = seconds_away
        if number in self.members:
            self.members[number].loop.leave()
        return True

    def admit(self, number: int) -> None:
        """Lets a late peer start."""
        self._late[number].set()

    def leave_all(self) -> None:
        """The end of the run: everybody is told to leave, and nobody comes back."""
        self.ending = True
        for _, member in sorted(self.members.items()):
            member.loop.leave()

    def open_doors(self) -> None:
        """Whoever is late or down through a fault comes now."""
        self._all_back.set()
        for event in self._late.values():
            event.set()

    def situations(self) -> str:
        now = anyio.current_time()
        return "; ".join(f"{n}: {m.node.engine.situation(now)}" for n, m in sorted(self.members.items()))

    def _round_of(self, number: int) -> int:
        """The one in the air."""
        return self.members[number].node.head.round + 1 if number in self.members else 0

    # Checks.

    def _report(self, number: int, report: Report) -> None:
        before, member = self.checker.newest, self.members[number]
        self.checker.observe(number, self.peer_of(number), report, member.loop.applied)
        if isinstance(report, RoundDone):
            self.bounds.sample(number, member)
            check_members(number, member, wall_time() + self.injector.skew(number))
            if number in self.recovering:
                self.recovering.discard(number)
                self.recoveries += 1
        elif isinstance(report, Left) and report.tokens_pending and number in self._away:
            self.crashed.add(self.peer_of(number))  # What was offered in vain ends with the process.
        if self.checker.newest > before and self.config.churn_rate:
            for other in sorted(self.lives):
                if self.rng.random() < self.config.churn_rate:
                    self.crash(other)
        self.goal_reached |= self.config.live_seconds is None and self.checker.newest >= self.config.rounds
        self.on_report(self.peer_of(number), report)
        if isinstance(report, RoundDone):
            self.phases.happened(number, "committed", report.round)
        elif isinstance(report, Trained):
            self.phases.happened(number, "trained")

    def outcome(self) -> Outcome:
        """What happened so far."""
        checker = self.checker
        merged = checker.merged()
        rounds = checker.chain()
        return Outcome(
            rounds_committed=checker.newest,
            restarts=self.restarts,
            recoveries=self.recoveries,
            recovery_records=checker.recovery_records,
            faults=dict(sorted(self.injector.done.items())),
            seconds=self.seconds,
            trace=checker.trace.hexdigest(),
            members=sum(len(record.members) for record in rounds) / max(1, len(rounds)),
            validation=checker.validation,
            fingerprints_equal=set(checker.left.values()) == {checker.newest},
            tokens_of={peer: (done, merged.get(peer, 0)) for peer, done in sorted(checker.processed.items())},
            bytes_sent=sum(self.world.bytes_sent.values()),
            packet_bytes_sent=self.packet_bytes,
            peaks=self.bounds.peaks,
            notes=checker.notes,
        )
