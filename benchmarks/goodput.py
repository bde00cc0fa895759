"""How much of a swarm's compute ends in the model when peers fail all the time, for four ways to train together.

python -m benchmarks.goodput [--peers N] [--seconds S] [--seeds N] [--rates NAME ...] [--json FILE] [--plot FILE]

The same failures (from the seed alone: each peer is up for exponential times, then down for a fixed one; now and then
it freezes or is slow) hit production peers on virtual time. `non-elastic` is the preset `allreduce` in a group in which
no round commits without everybody; `elastic` is `allreduce` as it comes; so are `diloco` and `decoupled-diloco`. All
train a letter model of 1,592 weights on the same text, with the same batch, one virtual second a step.

Goodput: the tokens merged until `--seconds`, of those that the peers could train in that time if they were always up
and never waited, each at its usual pace. What is missing to one is split, in shares of all peer-seconds: down; standing
(up, but in no inner step: frozen, joining, waiting for others); in vain (trained and not merged: cut off or lost in a
crash, or slowed down). `possible` is what the failures alone leave over, `all up` the time without anybody away.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import anyio
import torch

from benchmarks.failures import RATES, Trouble, loss_by, trace_of
from benchmarks.figures import circumstances, write_json
from benchmarks.goodput_lines import Run, draw, interpolated, lines_of, table
from benchmarks.letters import CONTEXT, Material
from network.identity import Identity
from network.seam import PeerID
from network.simulated import Link
from optimizers.presets import Method, method_from_settings
from peer.build import payload_bytes_max
from peer.learner import TorchLearner
from peer.reports import Report, RoundDone
from simulator.outcome import SwarmConfig
from simulator.swarm import Swarm
from simulator.virtual_time import VirtualConfig, run_virtual

STEP_SECONDS = 1.0
BATCH = 8
SPREAD = 0.05
"""By so much peers differ in speed, and one step from the next."""
SAVED_STEPS = 10
LOOK_SECONDS = 30.0
"""So often the loss is looked at."""


@final
@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train together."""

    name: str
    preset: str
    needs_all: bool = False


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("non-elastic", "allreduce", needs_all=True),
        Contender("elastic", "allreduce"),
        Contender("diloco", "diloco"),
        Contender("decoupled-diloco", "decoupled-diloco"),
    )
}


@final
class Watch:
    """Looks at a swarm from outside."""

    def __init__(self, material: Material, contender: Contender, seed: int, seconds: float) -> None:
        self.method = method_of(contender)
        self.commits: dict[bytes, float] = {}
        """When each record was first committed."""
        self.points: list[tuple[float, float, float]] = []
        self.trained = 0.0
        self.processed = 0
        self._learners: dict[PeerID, TorchLearner] = {}
        self._material = material
        self._seed = seed
        self._seconds = seconds
        self._look_at = 0.0

    def learner(self, me: PeerID) -> TorchLearner:
        self._learners[me] = self._material.learner(me, self.method, self._seed)
        return self._learners[me]

    def see(self, peer: PeerID, report: Report) -> None:
        if not isinstance(report, RoundDone) or report.head in self.commits:
            return
        now = self.commits[report.head] = anyio.current_time()
        if now >= self._look_at:
            # The last look is at the first commit after the end.
            self._look_at = min(now + LOOK_SECONDS, self._seconds) if now < self._seconds else math.inf
            self.points.append((now, float(report.tokens), self._material.loss(self._learners[peer].state.anchor)))

    async def read_at_the_end(self, swarm: Swarm) -> None:
        await anyio.sleep(self._seconds)
        self.trained = sum(swarm.trained_seconds.values())
        self.processed = sum(swarm.checker.processed.values())


def run_one(material: Material, contender: Contender, rate: str, seed: int, peers: int, seconds: float) -> Run:
    faults = trace_of(seed, peers, RATES[rate], seconds)
    watch = Watch(material, contender, seed, seconds)
    state = watch.learner(PeerID(Identity(bytes(32)).peer_id)).state
    # As in a real run; but a save after every step would cost more time than all that is measured here.
    snapshot_bytes = 4 * sum(t.numel() for t in [*state.anchor.values(), *state.outer.values()])
    snapshot_bytes *= max(1, SAVED_STEPS // watch.method.round_steps)
    config = SwarmConfig(
        peers=peers,
        rounds=1,
        seed=seed,
        link=Link(0.01, 0.005),
        faults=faults,
        faults_end=seconds,
        live_seconds=600.0,
        train_seconds=STEP_SECONDS * watch.method.round_steps,
        train_spread=(1 - SPREAD, 1 + SPREAD),
        speed_spread=SPREAD,
        stepwise=True,
        min_peers=peers if contender.needs_all else 1,
        recovery_share=1.0 if contender.needs_all else 0.0,
        snapshot_bytes=snapshot_bytes,
        validate_rounds=1_000_000,
        stall_seconds_max=2 * seconds,
    )
    swarms: list[Swarm] = []

    async def program() -> None:
        limit = payload_bytes_max(state.anchor, watch.method)
        swarms.append(Swarm(config, watch.learner, payload_bytes_max=limit, on_report=watch.see))
        await swarms[0].run(watch.read_at_the_end)

    run_virtual(program, config=VirtualConfig(virtual_seconds_max=100 * seconds))
    return summed_up(Run(contender.name, rate, seed), watch, swarms[0], faults, seconds)


def summed_up(run: Run, watch: Watch, swarm: Swarm, faults: Sequence[Trouble], seconds: float) -> Run:
    peers = swarm.config.peers
    chain = [(watch.commits[r.hash], r) for r in swarm.checker.chain()]
    merged = [(0.0, 0.0), *((at, float(record.tokens)) for at, record in chain)]
    at_pace = sum(1 / speed for speed in swarm.speeds) / STEP_SECONDS * BATCH * CONTEXT
    run.tokens_merged = interpolated(merged, seconds)
    run.goodput = run.tokens_merged / (at_pace * seconds)
    loss = loss_by(faults, peers, seconds)
    run.possible, run.all_up, run.down = loss.possible, loss.all_up, loss.down
    run.standing = 1 - run.down - watch.trained / (peers * seconds)
    run.in_vain = 1 - run.goodput - run.down - run.standing
    run.tokens_processed = watch.processed
    run.tokens_lost = sum(swarm.checker.processed.values()) - sum(swarm.checker.merged().values())
    until = [(at, record) for at, record in chain if at <= seconds]
    run.rounds = len(until)
    run.members = statistics.fmean(len(record.members) for _, record in until)
    times = [0.0, *(at for at, _ in until), seconds]
    run.longest_gap = max(b - a for a, b in itertools.pairwise(times))
    run.crashes = swarm.injector.done["crash"]
    run.recoveries = swarm.checker.recovery_records
    run.points = watch.points
    run.loss = interpolated([(at, held_out) for at, _, held_out in watch.points], seconds)
    return run


def method_of(contender: Contender) -> Method:
    return method_from_settings(contender.preset, {"batch": BATCH, "schedule.kind": "constant"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0, help="virtual; how long a run lasts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=["none", "mild", "harsh"])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the kind that its name says")
    options = parser.parse_args()
    before = circumstances()
    torch.set_num_threads(1)
    material, runs = Material(), list[Run]()
    jobs = [(r, s, c) for r in options.rates for s in range(options.seeds) for c in options.contenders]
    for rate, seed, name in jobs:
        begun = time.process_time()
        run = run_one(material, CONTENDERS[name], rate, seed, options.peers, options.seconds)
        runs.append(run)
        print(
            f"{len(runs)}/{len(jobs)} {rate}, seed {seed}, {name}: goodput {run.goodput:.1%} of {run.possible:.1%}, "
            f"standing {run.standing:.1%}, in vain {run.in_vain:.1%}, {run.crashes} crashes, {run.rounds} rounds of "
            f"{run.members:.1f}, loss {run.loss:.3f} ({time.process_time() - begun:.0f} s)",
            flush=True,
        )
        write_json(options.json, {"peers": options.peers, "runs": [asdict(each) for each in runs]}, before)
    print(table(lines_of(runs)))
    if options.plot:
        draw(runs, options.peers, options.plot)


if __name__ == "__main__":
    main()
