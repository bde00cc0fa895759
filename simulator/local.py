"""A swarm of real processes on loopback: a bootstrap peer and N training peers, each with its own daemon."""

from __future__ import annotations

import json
import random
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, final

import anyio
from anyio.abc import Process, TaskGroup

from optimizers.presets import method_from_settings
from peer.build import dense_bytes
from peer.errors import TrainingFailed
from simulator.group import group_of
from simulator.options import SimulateOptions, Summary, Tokens
from simulator.processes import environment, peer_command, run_process
from simulator.progress import Progress
from simulator.replicas import distance_max, saved_replicas

START_SECONDS_MAX = 120.0
"""For a process to import its libraries and listen, on a slow and busy machine."""
RESTART_SECONDS = 0.5
LINGER_SECONDS = 20.0
"""With kills: how long those at the goal wait for one that is just being started again."""
ERROR_LINES_KEPT = 20
RUN_NAME = "simulated"


def run_local_swarm(
    options: SimulateOptions, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Summary:
    """See `SimulateOptions`. Ends every process that it started, however it ends itself."""
    return anyio.run(_run, options, on_progress)


async def _run(options: SimulateOptions, on_progress: Callable[[Progress], None]) -> Summary:
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return await _LocalSwarm(options, options.folder, on_progress).run()
    with tempfile.TemporaryDirectory(prefix="peer-simulate-") as folder:
        return await _LocalSwarm(options, Path(folder), on_progress).run()


@final
@dataclass(slots=True)
class _Life:
    """What one process of a peer said."""

    bytes_sent: int = 0
    packet_bytes_sent: int = 0
    tokens_processed: int = 0
    rounds: int = 0
    """In which it took part."""


@final
@dataclass(slots=True)
class _Child:
    """One peer through all its processes."""

    number: int
    process: Process | None = None
    peer_id: str = ""
    lives: list[_Life] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)
    round: int = 0
    tokens: int = 0
    """As of its newest round: all merged by the swarm; in a gossip run its own."""
    loss: float = float("nan")
    finished: bool = False
    errors: list[str] = field(default_factory=list)

    @property
    def life(self) -> _Life:
        return self.lives[-1]


@final
class _LocalSwarm:
    def __init__(self, options: SimulateOptions, folder: Path, on_progress: Callable[[Progress], None]) -> None:
        self._options = options
        self._method = method_from_settings(options.preset, options.settings)
        self._folder = folder
        self._on_progress = on_progress
        self._rng = random.Random(options.seed)
        self._children = [_Child(number) for number in range(options.peers)]
        self._bootstrap = _Child(-1)
        self._address = anyio.Event()
        self._addresses: list[str] = []
        self._progress = Progress(peers_wanted=options.peers, rounds_goal=options.rounds)
        self._tokens_merged = 0
        self._parameters = 0
        self._inner_steps = 1
        self._losses: dict[int, float] = {}
        self._restarts = 0
        self._begun = 0.0

    async def run(self) -> Summary:
        self._begun = anyio.current_time()
        (self._folder / "run.toml").write_text(run_file(self._options))
        with anyio.move_on_after(self._options.timeout_seconds) as limit:
            await self._train()
        if limit.cancelled_caught:
            raise TrainingFailed(
                f"after {self._options.timeout_seconds:g} s only round {self._progress.round} of "
                f"{self._options.rounds} was committed; {self._last_words()}"
            )
        return self._summary()

    async def _train(self) -> None:
        async with anyio.create_task_group() as tasks:
            await self._start_bootstrap(tasks)
            for child in self._children:
                tasks.start_soon(self._live, child)
            if self._options.kill_every_seconds is not None:
                tasks.start_soon(self._kill_regularly, self._options.kill_every_seconds)
            while not all(child.finished for child in self._children):
                await anyio.sleep(0.2)
                self._tell()
            tasks.cancel_scope.cancel()

    # Processes.

    async def _start_bootstrap(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._keep_bootstrap)
        with anyio.move_on_after(START_SECONDS_MAX):
            await self._address.wait()
        if not self._addresses:
            raise TrainingFailed(f"the bootstrap peer did not start: {self._last_words()}")

    async def _keep_bootstrap(self) -> None:
        code = await self._run_process(self._bootstrap, self._command("bootstrap", "bootstrap"))
        raise TrainingFailed(f"the bootstrap peer ended with exit code {code}: {self._last_words(self._bootstrap)}")

    async def _live(self, child: _Child) -> None:
        """Runs a peer's process, again after each kill, until it ends well."""
        folder, entry = f"peer-{child.number}", ["--initial-peers", self._addresses[0]]
        linger = ["--linger", str(LINGER_SECONDS if self._options.kill_every_seconds else 0.0)]
        if child.number == 0:
            command = self._command("start", folder, str(self._folder / "run.toml"))
        else:
            command = self._command("join", folder, "--run", RUN_NAME)
        data = ["--data", *map(str, self._options.data)] if self._options.data else []
        while not child.finished:
            code = await self._run_process(child, [*command, *entry, *linger, *data, "--name", folder])
            if code == 0:
                child.finished = True
            elif code == -signal.SIGKILL:
                self._restarts += 1
                await anyio.sleep(RESTART_SECONDS)
            else:
                raise TrainingFailed(f"peer {child.number} ended with exit code {code}: {self._last_words(child)}")

    def _command(self, subcommand: str, folder: str, *arguments: str) -> list[str]:
        return peer_command(subcommand, self._folder / folder, *arguments)

    async def _run_process(self, child: _Child, command: list[str]) -> int:
        child.lives.append(_Life())

        def started(process: Process) -> None:
            child.process = process

        def on_line(line: str) -> None:
            child.errors.append(line)
            del child.errors[:-ERROR_LINES_KEPT]

        code = await run_process(
            command,
            environment(self._options.peers),
            on_start=started,
            on_event=lambda event: self._on_event(child, event),
            on_line=on_line,
        )
        child.process = None
        return code

    async def _kill_regularly(self, seconds: float) -> None:
        """SIGKILL to a random peer that trains, but never to the last one: that would be an outage, not churn."""
        while True:
            await anyio.sleep(seconds)
            running = [c for c in self._children if c.process is not None and c.life.rounds and not c.finished]
            if len(running) > 1 and self._progress.round < self._options.rounds:
                victim = self._rng.choice(running)
                assert victim.process is not None
                victim.process.kill()

    def _last_words(self, child: _Child | None = None) -> str:
        children = [child] if child is not None else [self._bootstrap, *self._children]
        words = [f"{'bootstrap' if c.number < 0 else f'peer {c.number}'}: {c.errors[-1]}" for c in children if c.errors]
        return "; ".join(words[:3]) or "no process said why"

    # What they say.

    def _on_event(self, child: _Child, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        life = child.life
        life.bytes_sent = max(life.bytes_sent, event.get("bytes_sent", 0))
        life.packet_bytes_sent = max(life.packet_bytes_sent, event.get("packet_bytes_sent", 0))
        life.tokens_processed = max(life.tokens_processed, event.get("tokens_processed", 0))
        if kind == "Listening" and child is self._bootstrap:
            self._addresses = event["addresses"]
            self._address.set()
        elif kind == "Ready":
            self._parameters, self._inner_steps = event["parameters"], event["inner_steps"]
            child.peer_id = event["peer_id"]
        elif kind == "RoundDone":
            child.round = event["round"]
            life.rounds += event["mine"]
            child.fingerprints[child.round] = event["fingerprint"]
            self._tokens_merged = max(self._tokens_merged, event["tokens"])
            child.tokens = event["tokens"]
            if child.round > self._progress.round:
                self._progress.round = child.round
                self._progress.members = len(event["members"])
                self._progress.fingerprint = event["fingerprint"]
                self._progress.train_loss = event["train_loss"]
        elif kind == "Validated" and event["loss"] is not None:
            self._losses[event["round"]] = child.loss = event["loss"]
            newest = max(self._losses)
            self._progress.loss, self._progress.loss_round = self._losses[newest], newest
        elif kind == "Note":
            child.errors.append(event["text"])

    def _tell(self) -> None:
        progress, rounds = self._progress, max(1, self._progress.round)
        progress.peers = sum(c.process is not None and bool(c.lives) and c.life.rounds > 0 for c in self._children)
        progress.seconds = anyio.current_time() - self._begun
        progress.restarts = self._restarts
        progress.bytes_sent = self._per_peer_and_round("bytes_sent", rounds)
        progress.dense_bytes = dense_bytes(self._parameters, self._inner_steps, self._options.peers)
        self._on_progress(progress)

    def _per_peer_and_round(self, name: str, rounds: int) -> float:
        total: int = sum(getattr(life, name) for child in self._children for life in child.lives)
        return total / self._options.peers / rounds

    def _summary(self) -> Summary:
        options, rounds = self._options, self._progress.round
        processed = sum(life.tokens_processed for child in self._children for life in child.lives)
        last = [child.fingerprints.get(rounds) for child in self._children]
        summary = Summary(
            preset=options.preset,
            model=options.model,
            parameters=self._parameters,
            seed=options.seed,
            peers=options.peers,
            rounds_committed=rounds,
            loss_first=self._losses.get(0, float("nan")),
            loss_last=self._losses.get(rounds, float("nan")),
            fingerprints_equal=None not in last and len(set(last)) == 1 and self._never_differed(),
            bytes_sent_per_peer_per_round=self._per_peer_and_round("bytes_sent", max(1, rounds)),
            packet_bytes_sent_per_peer_per_round=self._per_peer_and_round("packet_bytes_sent", max(1, rounds)),
            dense_bytes_per_peer_per_round=dense_bytes(self._parameters, self._inner_steps, options.peers),
            tokens=Tokens(processed, self._tokens_merged, processed - self._tokens_merged),
            seconds=anyio.current_time() - self._begun,
            restarts=self._restarts,
        )
        return summary if self._method.mode == "consensus" else self._of_replicas(summary)

    def _of_replicas(self, summary: Summary) -> Summary:
        """In a gossip run every peer has its own rounds, tokens, loss and replica."""
        merged = sum(child.tokens for child in self._children)
        losses = [child.loss for child in self._children if child.loss == child.loss]
        folders = [self._folder / f"peer-{child.number}" for child in self._children]
        return replace(
            summary,
            rounds_committed=min(child.round for child in self._children),
            loss_last=fmean(losses) if losses else float("nan"),
            tokens=Tokens(summary.tokens.processed, merged, summary.tokens.processed - merged),
            mode=self._method.mode,
            replicas_apart=distance_max(saved_replicas(folders)),
        )

    def _never_differed(self) -> bool:
        seen: dict[int, str] = {}
        return all(
            seen.setdefault(number, fingerprint) == fingerprint
            for child in self._children
            for number, fingerprint in child.fingerprints.items()
        )


def run_file(options: SimulateOptions) -> str:
    """The run's specification as `peer start` reads it."""
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.settings.items())
    return f"""
[run]
name = "{RUN_NAME}"
seed = {options.seed}
rounds = {options.rounds}
[model]
name = "{options.model}"
[method]
preset = "{options.preset}"
{settings}
[group]
start_peers = {options.peers}
max_peers = {group_of(options).max_peers}
parts = {options.parts}
"""
