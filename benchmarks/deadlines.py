"""How long rounds wait for stragglers, and what a waiting swarm costs: the learnt grace beside the best fixed timeout.

python -m benchmarks.deadlines [--quick] [--json FILE]

Traces of 8 and 16 peers, each with a pace of its own; in every training a peer takes 5 to 20 times as long with a
chance of 10 %. `RoundClock` and `Timing` of production close the rounds of each trace; so does a constant after the
quorum, which is cut short when all who contributed lately are there. The constant is chosen afterwards, for each trace
anew: of a grid the one with the least waiting among those that leave out at most 2 % of the punctual. Waiting runs from
the quorum to the closing. Punctual is a training that does not straggle, of a peer whose pace is at most 1.5 times the
median; it is left out if its offer is not in the round with which it began. No processes, no sleeping.

Then whole peers on virtual time: operations on the directory and wake-ups of the node, for each peer and second, while
they train short rounds, while they train long ones, and while they wait for a peer that the first round needs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import anyio

from averaging.timing import TimingConfig
from benchmarks.figures import circumstances, write_json
from benchmarks.traces import Tally, Trace, TraceConfig, adaptive, fixed, play, total
from simulator.outcome import SwarmConfig
from simulator.swarm import Swarm
from simulator.virtual_time import run_virtual

LEFT_OUT_MAX = 0.02
FIXED_SECONDS = tuple(round(0.05 * 1.15**step, 3) for step in range(46))
"""Up to 27 s, five times the usual pace."""
TRACES = tuple(
    TraceConfig(name, peers, pace_sigma=sigma, slow_share=slow, change_factor=change)
    for name, sigma, slow, change in (
        ("paces alike (5 %)", 0.05, 0.0, 1.0),
        ("lognormal paces (25 %)", 0.25, 0.0, 1.0),
        ("and a quarter 3-6 times slower", 0.25, 0.25, 1.0),
        ("and 2.5 times slower from the middle on", 0.25, 0.0, 2.5),
        ("lognormal paces (50 %)", 0.5, 0.0, 1.0),
    )
    for peers in (8, 16)
)
WARM_SECONDS = 60.0
WATCHED_SECONDS = 120.0


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One rule on all traces of one kind."""

    trace: str
    peers: int
    rule: str
    wait_mean: float
    wait_p95: float
    left_out: float
    """Of the punctual, in 0..1; like the next."""
    stragglers_included: float
    contributions_per_second: float

    @staticmethod
    def of(config: TraceConfig, rule: str, tally: Tally) -> Row:
        waits = sorted(tally.waits)
        return Row(
            config.name,
            config.peers,
            rule,
            statistics.fmean(waits),
            waits[int(0.95 * len(waits))],
            tally.punctual_left_out / tally.punctual,
            tally.straggling_included / tally.straggling,
            tally.members / tally.seconds,
        )


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """For each peer and second of virtual time."""

    situation: str
    peers: int
    rounds: int
    directory_operations: float
    wakes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two traces of each kind instead of eight")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    before = circumstances()
    seeds, rounds = (2, 150) if options.quick else (8, 300)
    rows = [row for config in TRACES for row in compare(config, seeds, rounds)]
    costs = [cost for peers in (8, 16) for cost in costs_of(peers)]
    print(f"\n{'per peer and second':<44}{'peers':>6}{'rounds':>8}{'directory':>11}{'wake-ups':>10}")
    for cost in costs:
        print(
            f"{cost.situation:<44}{cost.peers:>6}{cost.rounds:>8}{cost.directory_operations:>11.2f}{cost.wakes:>10.1f}"
        )
    as_values = {"deadlines": [as_json(row) for row in rows], "costs": [as_json(cost) for cost in costs]}
    write_json(options.json, {**as_values, "traces": seeds, "rounds": rounds}, before)


def as_json(row: Row | Cost) -> dict[str, object]:
    return {name: getattr(row, name) for name in type(row).__slots__}


# Deadlines.


def compare(config: TraceConfig, seeds: int, rounds: int) -> list[Row]:
    """The learnt grace and the best constants, each over the same traces; prints as it goes."""
    traces = [Trace(config, seed, rounds) for seed in range(seeds)]
    learnt = [play(trace, adaptive(TimingConfig())) for trace in traces]
    constant = [best_fixed(trace) for trace in traces]
    rows = [Row.of(config, "learnt", total(learnt)), Row.of(config, "fixed", total(constant))]
    saved = 1 - rows[0].wait_mean / rows[1].wait_mean
    print(f"{config.name}, {config.peers} peers: {saved:.0%} less waiting")
    for row in rows:
        print(
            f"    {row.rule:<8} wait {row.wait_mean:6.2f} s, p95 {row.wait_p95:6.2f}; punctual left out"
            f" {row.left_out:6.2%}; stragglers in {row.stragglers_included:6.2%};"
            f" {row.contributions_per_second:.2f} contributions/s",
            flush=True,
        )
    return rows


def best_fixed(trace: Trace, grid: Sequence[float] = FIXED_SECONDS) -> Tally:
    """The constant that waits least and leaves out few enough; that which leaves out the fewest, if none does."""
    tallies = [play(trace, fixed(seconds)) for seconds in grid]
    good = [tally for tally in tallies if tally.punctual_left_out <= LEFT_OUT_MAX * tally.punctual]
    if good:
        return min(good, key=lambda tally: sum(tally.waits))
    return min(tallies, key=lambda tally: tally.punctual_left_out / tally.punctual)


# Costs.


def costs_of(peers: int) -> list[Cost]:
    return [
        run_virtual(watch_swarm, situation, config)
        for situation, config in (
            ("rounds of half a second", SwarmConfig(peers=peers, rounds=1_000_000)),
            ("rounds of a minute", SwarmConfig(peers=peers, rounds=1_000_000, train_seconds=60.0)),
            (
                "waiting for a peer that does not come",
                SwarmConfig(peers=peers, rounds=1_000_000, start_peers=peers + 1),
            ),
        )
    ]


async def watch_swarm(situation: str, config: SwarmConfig) -> Cost:
    swarm = Swarm(config)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(swarm.run)
        await anyio.sleep(WARM_SECONDS)
        before, round_before = counts(swarm), swarm.checker.newest
        await anyio.sleep(WATCHED_SECONDS)
        after, rounds = counts(swarm), swarm.checker.newest - round_before
        tasks.cancel_scope.cancel()
    operations, wakes = ((b - a) / WATCHED_SECONDS / config.peers for a, b in zip(before, after, strict=True))
    return Cost(situation, config.peers, rounds, operations, wakes)


def counts(swarm: Swarm) -> tuple[int, int]:
    """Operations on the directory, wake-ups of nodes; of all peers so far."""
    directories = [directory for _, directory in swarm.lives.values()]
    operations = sum(directory.num_stores + directory.num_gets for directory in directories)
    return operations, sum(member.node.num_steps for member in swarm.members.values())


if __name__ == "__main__":
    main()
