"""What the death or the freezing of a member costs the others, and what a peer needs of its machine.

python -m benchmarks.faults [--quick] [--json FILE]

Four real peers train gpt-nano with `distro` on loopback. First, undisturbed: their processes and memory, early and many
rounds later. Then one member at a time gets SIGKILL (and is started again once the others have gone on) or SIGSTOP
(with its daemon, like a laptop that sleeps; SIGCONT follows 10 s later), in each phase of a round: while it trains;
just after it has trained and offers; the lead, or a voter, while the group's proposal is voted on (from the last peer's
offer, for as long as that usually takes); and at random instants. Measured from the signal: until all survivors have
committed another round, and one more (the first may have been decided already); until the victim, once it runs again,
has a contribution in a round. In the end: whether every round had one and the same anchor everywhere.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import anyio

from benchmarks.figures import Figure, circumstances, end_cleanly_when_told, write_json
from benchmarks.resources import name_of, resident_bytes
from benchmarks.swarm import Heard, Swarm, SwarmFailed, SwarmPeer, open_swarm, story_of
from simulator.options import SimulateOptions

PEERS = 4
PHASES = ("training", "offering", "lead votes", "voter votes", "any instant")
STEADY_ROUNDS = 3
PHASE_SECONDS_MAX = 60.0
COMMIT_SECONDS_MAX = 120.0
BACK_SECONDS_MAX = 180.0
STOPPED_SECONDS = 10.0
SLOW_SECONDS = 30.0
"""The story of a return that takes longer is printed."""
COLUMNS = ("next_seconds", "second_seconds", "back_seconds")


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """Seconds; None for what did not happen within its bound."""

    phase: str
    signal: str
    was_lead: bool
    usual_seconds: float
    """Between two commits, before."""
    next_seconds: float | None
    second_seconds: float | None
    back_seconds: float | None
    story: str
    """What the victim said until it was back, in seconds from its new start."""


@final
@dataclass(frozen=True, slots=True)
class Memory:
    round: int
    processes: list[int]
    """How many each peer has."""
    peer_megabytes: list[float]
    daemon_megabytes: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one fault of each kind, few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--times", type=int, help="faults of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    times = options.times or (1 if options.quick else 5)
    rounds = 60 if options.quick else 260
    end_cleanly_when_told()
    before = circumstances()
    results = anyio.run(measure, times, rounds, random.Random(options.seed))
    write_json(options.json, results, before)


async def measure(times: int, rounds: int, rng: random.Random) -> dict[str, object]:
    swarm_options = SimulateOptions(peers=PEERS, rounds=1_000_000, model="gpt-nano", preset="distro")
    with tempfile.TemporaryDirectory(prefix="peer-benchmark-") as folder:
        async with open_swarm(Path(folder), swarm_options) as swarm:
            await swarm.wait_until(lambda: all(p.round >= 10 for p in swarm.peers), 300.0, "ten rounds")
            memory = [take_memory(swarm)]
            seconds_max = 60.0 + 10.0 * rounds
            await swarm.wait_until(lambda: swarm.round >= rounds, seconds_max, f"round {rounds}")
            memory.append(take_memory(swarm))
            show_memory(memory)
            faults = []
            for _ in range(times):
                for phase in PHASES:
                    for number in (signal.SIGKILL, signal.SIGSTOP):
                        faults.append(await one_fault(swarm, phase, number, rng))
                        print(describe(faults[-1]), flush=True)
            await swarm.wait_until(
                lambda: len({p.fingerprints.get(swarm.round) for p in swarm.peers}) == 1, 60.0, "all peers to be level"
            )
    show_faults(faults, swarm)
    return {
        "memory": [{name: getattr(m, name) for name in Memory.__slots__} for m in memory],
        "faults": [{name: getattr(f, name) for name in Fault.__slots__} for f in faults],
        "rounds": swarm.round,
        "differing_rounds": sorted(swarm.differing_rounds),
    }


def take_memory(swarm: Swarm) -> Memory:
    peers, daemons = [], []
    for peer in swarm.peers:
        own, *below = peer.processes
        peers.append(round(resident_bytes(own) / 1e6, 1))
        daemons.append(round(sum(resident_bytes(p) for p in below if name_of(p) == "p2pd") / 1e6, 1))
    return Memory(swarm.round, [len(peer.processes) for peer in swarm.peers], peers, daemons)


async def one_fault(swarm: Swarm, phase: str, number: signal.Signals, rng: random.Random) -> Fault:
    """Waits for steady rounds of all, then for the phase, sends the signal and follows what happens."""
    await wait_steady(swarm)
    usual = usual_interval(swarm)
    lead = swarm.lead()
    if phase == "lead votes":
        victim = lead or swarm.peers[0]
    else:
        victim = rng.choice([p for p in swarm.peers if p is not lead] if phase == "voter votes" else swarm.peers)
    await wait_phase(swarm, victim, phase, usual, rng)
    begin = anyio.current_time()
    victim.send(number)
    survivors = [peer for peer in swarm.peers if peer is not victim]
    reached = max(peer.round for peer in survivors)
    first = await until_commit(swarm, survivors, reached + 1, begin)
    second = await until_commit(swarm, survivors, reached + 2, begin)
    again = anyio.current_time()
    if number == signal.SIGKILL:
        await swarm.wait_until(lambda: victim.process is None, 10.0, "the killed peer to be gone")
        swarm.start(victim)
    else:
        await anyio.sleep(max(0.0, begin + STOPPED_SECONDS - anyio.current_time()))
        victim.send(signal.SIGCONT)
    back = await until_back(swarm, victim, swarm.round)
    return Fault(phase, number.name, victim is lead, usual, first, second, back, story_of(victim, again))


async def wait_steady(swarm: Swarm) -> None:
    """All members of the last rounds, so that a fault does not meet the one before."""

    def steady() -> bool:
        lasts = [peer.last("RoundDone") for peer in swarm.peers]
        return all(last is not None and len(last.fields["members"]) == len(swarm.peers) for last in lasts)

    target = swarm.round + STEADY_ROUNDS
    await swarm.wait_until(lambda: swarm.round >= target and steady(), COMMIT_SECONDS_MAX, "steady rounds of all")


def usual_interval(swarm: Swarm) -> float:
    times = [e.at for e in swarm.peers[0].events if e.kind == "RoundDone"][-10:]
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
        target = swarm.round
        return all(
            peer.round == target and peer.first_after(now, "Trained", lambda e: e.fields["round"] == target) is not None
            for peer in swarm.peers
        )

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
    text = f"{fault.signal} {fault.phase:<12} {who:<6} usual {usual}  next commit {first}  second {second}  back {back}"
    return text + (f"\n    {fault.story}" if is_slow else "")


def show_memory(memory: Sequence[Memory]) -> None:
    for sample in memory:
        both = [peer + daemon for peer, daemon in zip(sample.peer_megabytes, sample.daemon_megabytes, strict=True)]
        print(
            f"round {sample.round}: {max(sample.processes)} processes a peer; MB: peer "
            f"{Figure.of(sample.peer_megabytes).text()}, daemon {Figure.of(sample.daemon_megabytes).text()}, "
            f"both {Figure.of(both).text()}",
            flush=True,
        )


def show_faults(faults: Sequence[Fault], swarm: Swarm) -> None:
    print(f"\n{'seconds: median (min-max), p95':<32}{'next commit':>28}{'second commit':>28}{'back':>28}")
    for name in ("SIGKILL", "SIGSTOP"):
        for phase in (*PHASES, "all"):
            chosen = [f for f in faults if f.signal == name and phase in (f.phase, "all")]
            columns = [[getattr(f, field) for f in chosen] for field in COLUMNS]
            print(f"{name} {phase:<24}" + "".join(f"{column_text(values):>28}" for values in columns))
    restored = sum(fault.back_seconds is not None for fault in faults)
    print(f"{len(faults)} faults, {restored} victims came back; {swarm.round} rounds, ", end="")
    print(f"{len(swarm.differing_rounds)} with differing fingerprints")


def column_text(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    lost = f" {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{Figure.of(known).text(digits=2)}, {Figure.of(known).p95:.2f}{lost}" if known else f"none{lost}"


if __name__ == "__main__":
    main()
