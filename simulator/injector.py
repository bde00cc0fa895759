"""Makes a scenario's faults happen to a swarm, and undoes all of them in the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, final

import anyio
from anyio.abc import TaskGroup

from network.seam import PeerID
from network.simulated import World
from network.simulated_stream import Tap
from simulator.checkers import Checks
from simulator.faults import (
    NAMES,
    Blackout,
    Crash,
    DaemonDeath,
    Delay,
    DiskLoss,
    Duplicate,
    Fault,
    Freeze,
    Lasting,
    Late,
    Leave,
    Lossy,
    Partition,
    Skew,
    SlowCompute,
    SlowLink,
    Torn,
    When,
)
from simulator.phases import FrameReader, Phases, is_frame

BREAK_SECONDS = 0.5
"""How often a lossy world looks for streams to break."""
ROUND_PROTOCOL = "/peer/round/"
L = TypeVar("L")


class Victim(Protocol):
    """What faults can be done to: a swarm."""

    world: World

    def peer_of(self, number: int) -> PeerID: ...
    def number_of(self, peer: PeerID) -> int: ...
    def crash(self, number: int, seconds_down: float | None = None, *, loses_disk: bool = False) -> bool: ...
    def leave(self, number: int, seconds_away: float) -> bool: ...
    def admit(self, number: int) -> None: ...
    def all_numbers(self) -> Sequence[int]: ...


@final
class Injector(Tap):
    """Also the tap on the world's messages: tells the phases and the checks what is said, and delays or repeats it."""

    def __init__(self, faults: Sequence[Fault], end: float, rng: random.Random, phases: Phases, checks: Checks) -> None:
        self.done: Counter[str] = Counter()
        """How many faults of each kind have happened to somebody."""
        self._faults = faults
        self._end = end
        self._rng = rng
        self._phases = phases
        self._checks = checks
        self._reader = FrameReader()
        self._active: list[Lasting] = []
        self._torn: dict[int, float] = {}
        """Who is to crash in its next write, and for how long."""
        self._tasks: TaskGroup | None = None
        self._swarm: Victim | None = None

    async def run(self, swarm: Victim) -> None:
        """Returns at the end of all faults, when none is left."""
        self._swarm = swarm
        with anyio.CancelScope(deadline=self._end):
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                for fault in self._faults:
                    if isinstance(fault.at, When):
                        self._phases.wait(fault.at, self._begins(fault, fault.at.after))
                    else:
                        tasks.start_soon(self._begin_after, fault, fault.at)
                await anyio.sleep_forever()
        self._tasks = None
        self._phases.clear()
        self._torn.clear()
        while self._active:
            self._finish(self._active[-1])

    def _begins(self, fault: Fault, after: float) -> Callable[[], None]:
        def begin() -> None:
            if self._tasks is None:
                return
            if after:
                self._tasks.start_soon(self._begin_after, fault, after)
            else:
                self._begin(fault)

        return begin

    async def _begin_after(self, fault: Fault, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._begin(fault)

    # What happens.

    def _begin(self, fault: Fault) -> None:
        assert self._swarm is not None
        swarm = self._swarm
        if isinstance(fault, Crash):
            happened = swarm.crash(fault.peer, fault.restart_after)
        elif isinstance(fault, DiskLoss):
            happened = swarm.crash(fault.peer, fault.restart_after, loses_disk=True)
        elif isinstance(fault, Torn):
            self._torn[fault.peer] = fault.restart_after
            return  # It counts when it happens.
        elif isinstance(fault, Leave):
            happened = swarm.leave(fault.peer, fault.restart_after)
        elif isinstance(fault, Blackout):
            numbers = swarm.all_numbers()
            shares = [fault.restart_after * (n + 1) / len(numbers) for n in range(len(numbers))]
            happened = sum(swarm.crash(number, share) for number, share in zip(numbers, shares, strict=True)) > 0
        elif isinstance(fault, Late):
            swarm.admit(fault.peer)
            happened = True
        else:
            self._start(fault)
            happened = True
        self.done[NAMES[type(fault)]] += happened

    def _start(self, fault: Lasting) -> None:
        assert self._tasks is not None
        self._active.append(fault)
        self._settle(fault)
        self._tasks.start_soon(self._finish_later, fault)

    async def _finish_later(self, fault: Lasting) -> None:
        if isinstance(fault, Lossy) and fault.breaks:
            with anyio.move_on_after(fault.seconds):
                while True:
                    await anyio.sleep(BREAK_SECONDS)
                    self._break_some(fault.breaks)
        else:
            await anyio.sleep(fault.seconds)
        self._finish(fault)

    def _break_some(self, breaks: float) -> None:
        assert self._swarm is not None
        self._swarm.world.break_streams(lambda: self._rng.random() < breaks * BREAK_SECONDS)

    def _finish(self, fault: Lasting) -> None:
        self._active = [one for one in self._active if one is not fault]
        self._settle(fault)

    def _settle(self, fault: Lasting) -> None:
        """Brings the world into the state that the active faults of this kind ask for."""
        assert self._swarm is not None
        swarm, world = self._swarm, self._swarm.world
        if isinstance(fault, Freeze):
            peer = swarm.peer_of(fault.peer)
            world.freeze(peer) if self.is_frozen(fault.peer) else world.thaw(peer)
        elif isinstance(fault, Partition):
            parted = self._now(Partition)
            sides = parted[-1].sides if parted else ()
            world.partition(*([swarm.peer_of(n) for n in side] for side in sides)) if parted else world.heal()
        elif isinstance(fault, DaemonDeath):
            is_dead = any(one.peer == fault.peer for one in self._now(DaemonDeath))
            peer = swarm.peer_of(fault.peer)
            world.kill_daemon(peer) if is_dead else world.revive_daemon(peer)
        elif isinstance(fault, Lossy):
            world.dial_loss = max([world.config.dial_loss, *(one.dial_loss for one in self._now(Lossy))])

    def _now(self, kind: type[L]) -> list[L]:
        return [fault for fault in self._active if isinstance(fault, kind)]

    # What the swarm asks.

    def is_frozen(self, number: int) -> bool:
        return any(fault.peer == number for fault in self._now(Freeze))

    def slowness(self, number: int) -> float:
        """By what factor computing takes longer just now."""
        return max([1.0, *(fault.factor for fault in self._now(SlowCompute) if fault.peer == number)])

    def skew(self, number: int) -> float:
        """Seconds by which a peer's wall clock is ahead."""
        return sum(fault.clock for fault in self._now(Skew) if fault.peer == number)

    def on_disk(self, number: int, what: str, entries: Sequence[bytes]) -> None:
        """For the `watch` of a peer's storage."""
        self._phases.on_disk(number, what, entries)
        if what == "writing" and number in self._torn and self._swarm is not None:
            self.done["torn"] += self._swarm.crash(number, self._torn.pop(number))

    # The tap.

    def fate(self, source: PeerID, target: PeerID, protocol: str, data: bytes) -> Sequence[float]:
        if not self._active or not protocol.startswith(ROUND_PROTOCOL):
            return (0.0,)
        late, copies = self._slowness_between(source, target), 1
        for delay in self._now(Delay):
            if self._rng.random() < delay.share:
                late += delay.late * self._rng.random()
        for duplicate in self._now(Duplicate):
            copies += self._rng.random() < duplicate.share and is_frame(data)
        return (late,) * copies

    def _slowness_between(self, source: PeerID, target: PeerID) -> float:
        slow = self._now(SlowLink)
        if not slow:
            return 0.0
        assert self._swarm is not None
        ends = self._swarm.number_of(source), self._swarm.number_of(target)
        factors = [s.factor for s in slow if s.peer in ends and (s.other is None or s.other in ends)]
        usual = self._swarm.world.link(source, target).delay_seconds
        return usual * (max(factors) - 1) if factors else 0.0

    def sent(self, source: PeerID, target: PeerID, protocol: str, data: bytes) -> None:
        read = self._reader.read(source, data)
        if read is not None and self._swarm is not None:
            phase, message = read
            self._checks.sent(source, message)
            self._phases.happened(self._swarm.number_of(source), phase)
