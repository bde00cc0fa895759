"""What the death or the freezing of a member costs the others, and what is left of memory and files in the end.

python -m benchmarks.faults [--quick] [--json FILE] [--seed N]

Four real peers train gpt-nano with `distro` on loopback. First, undisturbed: the memory of their processes. Then a
storm of some hundred rounds: every few seconds a member gets SIGKILL (and is started again once the others have gone
on) or SIGSTOP (with its daemon, like a laptop that sleeps; SIGCONT follows 10 s later), in each phase of a round: while
it trains; just after it has trained and offers; the lead, or a voter, while the group's proposal is voted on; and at
random instants. At most two are away at a time, and one, the witness, is never killed: its memory is judged over the
whole run. Measured from the signal: until all who are there have committed another round, and one more (the first may
have been decided already); until the victim, once it runs again, has a contribution in a round. In the end: anchors
that differ after one record, forks, recoveries, and processes, sockets and shared memory that were left behind.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import anyio
from anyio.abc import TaskGroup

from benchmarks.figures import Figure, circumstances, end_cleanly_when_told, write_json
from benchmarks.memory import MemoryWatch, show_memory
from benchmarks.resources import processes_of, shared_memory
from benchmarks.swarm import Heard, Swarm, SwarmFailed, SwarmPeer, open_swarm, story_of
from network.seam import PeerID
from simulator.options import SimulateOptions

PEERS = 4
WITNESS = 0
PHASES = ("training", "offering", "lead votes", "voter votes", "any instant")
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
PAUSE_SECONDS = 2.0, 5.0
AWAY_MAX = 2
PHASE_SECONDS_MAX = 20.0
COMMIT_SECONDS_MAX = 60.0
BACK_SECONDS_MAX = 120.0
STOPPED_SECONDS = 10.0
DAEMON_SECONDS = 2.0
"""A daemon may end so much later than its peer."""
SLOW_SECONDS = 40.0
"""The story of a return that takes longer is printed."""
COLUMNS = ("next_seconds", "second_seconds", "back_seconds")


@final
@dataclass(frozen=True, slots=True)
class Extent:
    """How much is tried; rounds, and seconds that end it whatever was reached."""

    quiet_rounds: int
    quiet_seconds_max: float
    storm_rounds: int
    storm_seconds_max: float
    warm_rounds: int
    """Of a process, before its memory is judged."""


FULL = Extent(170, 180.0, 300, 390.0, 30)
QUICK = Extent(12, 30.0, 40, 45.0, 5)


@final
@dataclass(slots=True)
class Fault:
    """Seconds; None for what did not happen within its bound."""

    phase: str
    signal: str
    was_lead: bool
    away: int
    """How many others were away."""
    usual_seconds: float
    """Between two commits, before."""
    next_seconds: float | None = None
    second_seconds: float | None = None
    back_seconds: float | None = None
    story: str = ""
    """What the victim said until it was back, in seconds from its new start."""


@final
@dataclass(frozen=True, slots=True)
class Remains:
    """What was there after the end that was not there before; empty if all is well."""

    processes: list[int]
    sockets: list[str]
    shared_memory: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes: a few faults, few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    end_cleanly_when_told()
    before = circumstances()
    results = anyio.run(measure, QUICK if options.quick else FULL, random.Random(options.seed))
    write_json(options.json, results, before)


async def measure(extent: Extent, rng: random.Random) -> dict[str, object]:
    swarm_options = SimulateOptions(peers=PEERS, rounds=1_000_000, model="gpt-nano", preset="distro")
    shared_before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="peer-benchmark-") as folder:
        async with open_swarm(Path(folder), swarm_options) as swarm:
            memory = MemoryWatch(swarm, extent.warm_rounds)
            await swarm.wait_until(lambda: all(p.round >= 3 for p in swarm.peers), 120.0, "three rounds")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(memory.run)
                await run_for(swarm, extent.quiet_rounds, extent.quiet_seconds_max)
                faults = await Storm(swarm, extent, rng).run()
                tasks.cancel_scope.cancel()
            await swarm.wait_until(lambda: is_level(swarm), 60.0, "all peers to be level")
        await anyio.sleep(DAEMON_SECONDS)
        remains = look_for_remains(swarm, shared_before)
    growths = memory.growths()
    show_memory(growths)
    show_faults(faults)
    forks = sum(len(heads) > 1 for heads in swarm.heads.values())
    recoveries, heals = swarm.counts["Recovered"], swarm.counts["Healed"]
    print(f"{swarm.round} rounds; wrong anchors: {swarm.wrong or 'none'}; rounds with two records: {forks}; ", end="")
    print(f"Recovered said {recoveries} times, Healed {heals}; left behind: {remains}")
    return {
        "memory": [asdict(growth) for growth in growths],
        "faults": [asdict(fault) for fault in faults],
        "rounds": swarm.round,
        "wrong": swarm.wrong,
        "forked_rounds": forks,
        "recovered": recoveries,
        "healed": heals,
        "remains": asdict(remains),
    }


async def run_for(swarm: Swarm, rounds: int, seconds_max: float) -> None:
    """Until so many more rounds are committed, or the time is over."""
    target = swarm.round + rounds
    with anyio.move_on_after(seconds_max):
        await swarm.wait_until(lambda: swarm.round >= target, 2 * seconds_max, f"round {target}")


def is_level(swarm: Swarm) -> bool:
    return len({p.fingerprints.get(swarm.round) for p in swarm.peers}) == 1


def look_for_remains(swarm: Swarm, shared_before: set[str]) -> Remains:
    """After all processes were told to end: whoever inherited the swarm's environment, and what they made."""
    sockets = sorted(path.name for path in Path(swarm.mark).iterdir())
    return Remains(processes_of(swarm.mark), sockets, sorted(shared_memory() - shared_before))


@final
class Storm:
    """Faults, one after the other; victims come back while others are hit."""

    def __init__(self, swarm: Swarm, extent: Extent, rng: random.Random) -> None:
        self._swarm = swarm
        self._extent = extent
        self._rng = rng
        self._away: set[int] = set()
        self._faults: list[Fault] = []

    async def run(self) -> list[Fault]:
        """All that happened, once every victim is back."""
        kinds = zip(itertools.cycle(PHASES), itertools.cycle(SIGNALS), strict=False)  # Each with each, by and by.
        target = self._swarm.round + self._extent.storm_rounds
        end = anyio.current_time() + self._extent.storm_seconds_max
        async with anyio.create_task_group() as tasks:
            while self._swarm.round < target and anyio.current_time() < end:
                await anyio.sleep(self._rng.uniform(*PAUSE_SECONDS))
                await self._swarm.wait_until(self._may_strike, BACK_SECONDS_MAX, "enough members")
                phase, number = next(kinds)
                await self._strike(tasks, phase, number)
        return self._faults

    def _present(self) -> list[SwarmPeer]:
        """Members of the newest rounds."""
        present = []
        for peer in self._swarm.peers:
            last = peer.last("RoundDone")
            is_member = last is not None and last.fields["mine"] and peer.round >= self._swarm.round - 1
            if is_member and peer.number not in self._away:
                present.append(peer)
        return present

    def _may_strike(self) -> bool:
        return len(self._away) < AWAY_MAX and len(self._present()) >= PEERS - len(self._away) > 2

    def _leaves_quorum(self, victim: SwarmPeer) -> bool:
        """Without one, only a fork by choice would go on, after a long wait: that is an outage, and not asked here."""
        record = self._swarm.newest()
        left = {PeerID(peer.peer_id) for peer in self._present() if peer is not victim}
        return record is not None and record.is_quorum(left & set(record.voters))

    async def _strike(self, tasks: TaskGroup, phase: str, number: signal.Signals) -> None:
        """Waits for the phase, sends the signal, and follows what happens to the others."""
        swarm, rng = self._swarm, self._rng
        present, lead = self._present(), swarm.lead()
        choice = [p for p in present if self._leaves_quorum(p) and (number != signal.SIGKILL or p.number != WITNESS)]
        leads = [p for p in choice if p is lead]
        others = [p for p in choice if p is not lead]
        if not choice:
            return
        victim = rng.choice((leads if phase == "lead votes" else others if phase == "voter votes" else []) or choice)
        usual = usual_interval(victim)
        try:
            await wait_phase(swarm, victim, phase, usual, rng)
        except SwarmFailed as failure:
            print(failure)
        if not self._leaves_quorum(victim):
            return
        begin = anyio.current_time()
        fault = Fault(phase, number.name, victim is swarm.lead(), len(self._away), usual)
        self._away.add(victim.number)
        victim.send(number)
        survivors = [peer for peer in present if peer is not victim]
        reached = max(peer.round for peer in survivors)
        fault.next_seconds = await until_commit(swarm, survivors, reached + 1, begin)
        fault.second_seconds = await until_commit(swarm, survivors, reached + 2, begin)
        self._faults.append(fault)
        tasks.start_soon(self._bring_back, victim, number, begin, fault)

    async def _bring_back(self, victim: SwarmPeer, number: signal.Signals, begin: float, fault: Fault) -> None:
        swarm = self._swarm
        again = anyio.current_time()
        if number == signal.SIGKILL:
            await swarm.wait_until(lambda: victim.process is None, 10.0, "the killed peer to be gone")
            swarm.start(victim)
        else:
            await anyio.sleep(max(0.0, begin + STOPPED_SECONDS - anyio.current_time()))
            again = anyio.current_time()
            victim.send(signal.SIGCONT)
        fault.back_seconds = await until_back(swarm, victim, swarm.round)
        fault.story = story_of(victim, again)
        self._away.discard(victim.number)
        print(describe(fault), flush=True)


def usual_interval(peer: SwarmPeer) -> float:
    times = [e.at for e in peer.events if e.kind == "RoundDone"][-10:]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(gaps or [1.0])


async def wait_phase(swarm: Swarm, victim: SwarmPeer, phase: str, usual: float, rng: random.Random) -> None:
    """Returns at an instant inside the phase, as far as events can tell."""
    now = anyio.current_time()
    if phase == "any instant":
        await anyio.sleep(rng.uniform(0.0, 2 * usual))
        return
    if phase == "training":
        await swarm.wait_until(lambda: victim.first_after(now, "RoundDone") is not None, PHASE_SECONDS_MAX, phase)
        await anyio.sleep(rng.uniform(0.0, usual / 4))
        return
    if phase == "offering":
        await swarm.wait_until(lambda: victim.first_after(now, "Trained") is not None, PHASE_SECONDS_MAX, phase)
        await anyio.sleep(rng.uniform(0.0, usual / 8))
        return

    def all_offered() -> bool:
        """Of those who run at the newest round."""
        target = swarm.round
        level = [peer for peer in swarm.peers if peer.round == target]
        return all(peer.first_after(now, "Trained", lambda e: e.fields["round"] == target) for peer in level)

    await swarm.wait_until(all_offered, PHASE_SECONDS_MAX, phase)
    await anyio.sleep(rng.uniform(0.0, usual / 4))


async def until_commit(swarm: Swarm, peers: Sequence[SwarmPeer], number: int, begin: float) -> float | None:
    """Seconds from `begin` until all of `peers` have round `number`."""
    left = begin + COMMIT_SECONDS_MAX - anyio.current_time()
    try:
        await swarm.wait_until(lambda: all(p.round >= number for p in peers), left, f"round {number} of the survivors")
    except SwarmFailed as failure:
        print(failure)
        return None
    return anyio.current_time() - begin


async def until_back(swarm: Swarm, victim: SwarmPeer, reached: int) -> float | None:
    """Seconds from now until a round after `reached` has a contribution of `victim`."""
    begin = anyio.current_time()

    def is_back(event: Heard) -> bool:
        return bool(event.fields["mine"]) and event.fields["round"] > reached

    try:
        await swarm.wait_until(
            lambda: victim.first_after(begin, "RoundDone", is_back) is not None, BACK_SECONDS_MAX, "the victim's return"
        )
    except SwarmFailed as failure:
        print(failure)
        return None
    return anyio.current_time() - begin


def describe(fault: Fault) -> str:
    times = (fault.usual_seconds, fault.next_seconds, fault.second_seconds, fault.back_seconds)
    usual, first, second, back = ("never" if t is None else f"{t:6.2f} s" for t in times)
    who = "lead" if fault.was_lead else "voter"
    is_slow = fault.back_seconds is None or fault.back_seconds > SLOW_SECONDS
    text = f"{fault.signal} {fault.phase:<12} {who:<6} {fault.away} away  usual {usual}  next commit {first}"
    text += f"  second {second}  back {back}"
    return text + (f"\n    {fault.story}" if is_slow else "")


def show_faults(faults: Sequence[Fault]) -> None:
    print(f"\n{'seconds: median (min-max), p95':<32}{'next commit':>28}{'second commit':>28}{'back':>28}")
    for name in ("SIGKILL", "SIGSTOP"):
        for phase in (*PHASES, "all"):
            chosen = [f for f in faults if f.signal == name and phase in (f.phase, "all")]
            columns = [[getattr(f, field) for f in chosen] for field in COLUMNS]
            print(f"{name} {phase:<15}{len(chosen):>3} times" + "".join(f"{column_text(v):>28}" for v in columns))
    print(f"{len(faults)} faults, {sum(fault.back_seconds is not None for fault in faults)} victims came back")


def column_text(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    lost = f" {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{Figure.of(known).text(digits=2)}, {Figure.of(known).p95:.2f}{lost}" if known else f"none{lost}"


if __name__ == "__main__":
    main()
