"""How long a newcomer needs until it holds the swarm's model and contributes to it, and what it has to download.

python -m benchmarks.late_joiner [--quick] [--json FILE]

Three real peers train gpt-mini (1.05 million parameters) with `distro` on loopback. A fourth joins after some rounds,
leaves, and another newcomer joins after many. Measured from the start of its process, and from its first event (it
listens): until it knows the run ("ready"), until its fingerprint is that of the round which the swarm had reached when
it was ready or a later one ("level"), and until a round has its contribution. It tells whether it took a snapshot or
replayed the rounds. Bytes are what its daemon received by TCP until it was level: everything, the directory's included.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

import anyio

from benchmarks.figures import circumstances, end_cleanly_when_told, write_json
from benchmarks.resources import name_of
from benchmarks.swarm import Swarm, SwarmPeer, open_swarm, story_of
from network.traffic import TrafficMeter
from peer.build import build
from peer.spec import make_spec
from simulator.options import SimulateOptions

MODEL = "gpt-mini"
PRESET = "distro"
PEERS = 3
JOIN_SECONDS_MAX = 240.0
SAMPLE_SECONDS = 0.1


@final
@dataclass(frozen=True, slots=True)
class Join:
    """Seconds from the start of the process; `first_event_seconds` is to be taken off for the time since then."""

    swarm_round: int
    rounds_replayed: int
    snapshot: bool
    first_event_seconds: float
    ready_seconds: float
    level_seconds: float
    contributed_seconds: float
    bytes_received: int
    """Until level."""
    state_bytes: int
    """What a snapshot weighs at least."""
    story: str
    """What it said until it had contributed, in seconds since its start."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="join after 10 and 30 rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rounds = (10, 30) if options.quick else (10, 30, 100, 200, 300)
    end_cleanly_when_told()
    before = circumstances()
    joins = anyio.run(measure, rounds)
    write_json(options.json, {"joins": [{n: getattr(j, n) for n in Join.__slots__} for j in joins]}, before)


async def measure(rounds: tuple[int, ...]) -> list[Join]:
    options = SimulateOptions(peers=PEERS, rounds=1_000_000, model=MODEL, preset=PRESET)
    joins, size = [], state_bytes()
    with tempfile.TemporaryDirectory(prefix="peer-benchmark-") as folder:
        async with open_swarm(Path(folder), options) as swarm:
            for number, target in enumerate(rounds, start=PEERS):
                seconds_max = 120.0 + 10.0 * target
                await swarm.wait_until(lambda t=target: swarm.round >= t, seconds_max, f"round {target}")  # type: ignore[misc]
                joins.append(await one_join(swarm, number, size))
                print(f"{describe(joins[-1])}\n    {joins[-1].story}", flush=True)
    return joins


async def one_join(swarm: Swarm, number: int, size: int) -> Join:
    """A newcomer's life until its first contribution; then it leaves."""
    begin, reached = anyio.current_time(), swarm.round
    newcomer = swarm.add(number)
    async with anyio.create_task_group() as tasks:
        received: list[tuple[float, int]] = []
        tasks.start_soon(meter, newcomer, received)
        await swarm.wait_until(lambda: newcomer.last("Ready") is not None, JOIN_SECONDS_MAX, "the newcomer to be ready")
        goal = max(peer.round for peer in swarm.peers if peer is not newcomer)
        await swarm.wait_until(lambda: newcomer.round >= goal, JOIN_SECONDS_MAX, "the newcomer to be level")
        level = anyio.current_time()
        assert newcomer.fingerprints[newcomer.round] == swarm.fingerprints[newcomer.round], "it holds another model"
        await swarm.wait_until(lambda: contributed(newcomer), JOIN_SECONDS_MAX, "the newcomer's contribution")
        done = anyio.current_time()
        tasks.cancel_scope.cancel()
    ready = newcomer.last("Ready")
    assert ready is not None
    join = Join(
        swarm_round=reached,
        rounds_replayed=sum(e.kind == "RoundDone" and e.at <= level for e in newcomer.events),
        snapshot=any(e.kind == "Note" and "took the state" in e.fields["text"] for e in newcomer.events),
        first_event_seconds=newcomer.events[0].at - begin,
        ready_seconds=ready.at - begin,
        level_seconds=level - begin,
        contributed_seconds=done - begin,
        bytes_received=max((count for at, count in received if at <= level + SAMPLE_SECONDS), default=0),
        state_bytes=size,
        story=story_of(newcomer, begin),
    )
    newcomer.send(signal.SIGINT)
    await swarm.wait_until(lambda: newcomer.process is None, 30.0, "the newcomer to leave")
    swarm.peers.remove(newcomer)
    return join


def contributed(peer: SwarmPeer) -> bool:
    return any(event.kind == "RoundDone" and event.fields["mine"] for event in peer.events)


async def meter(peer: SwarmPeer, received: list[tuple[float, int]]) -> None:
    """Samples what the daemon of `peer` receives, from the moment there is one."""
    counter: TrafficMeter | None = None
    while True:
        if counter is None:
            daemons = [p for p in peer.processes if name_of(p) == "p2pd"]
            counter = TrafficMeter(daemons[0]) if daemons else None
        if counter is not None:
            received.append((anyio.current_time(), counter.sample().bytes_received))
        await anyio.sleep(SAMPLE_SECONDS)


def state_bytes() -> int:
    from network.identity import Identity

    me = Identity(bytes(32)).peer_id
    return build(make_spec(me, name="size", model=MODEL, preset=PRESET), me).engine.snapshot_bytes


def describe(join: Join) -> str:
    since = join.first_event_seconds
    way = "snapshot" if join.snapshot else f"replay of {join.rounds_replayed} rounds"
    return (
        f"joined at round {join.swarm_round}: first event {since:.1f} s, ready +{join.ready_seconds - since:.1f} s, "
        f"level +{join.level_seconds - since:.1f} s, contributed +{join.contributed_seconds - since:.1f} s; {way}; "
        f"received {join.bytes_received / 1e6:.2f} MB (state {join.state_bytes / 1e6:.2f} MB)"
    )


if __name__ == "__main__":
    main()
