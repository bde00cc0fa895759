"""Real peers on loopback through the command line, whose events are kept with the time at which they came."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import anyio
from anyio.abc import Process, TaskGroup

from averaging.record import Record, as_bytes, parse_record, unpack_list
from benchmarks.resources import processes_below
from simulator.local import RUN_NAME, run_file
from simulator.options import SimulateOptions
from simulator.processes import environment, peer_command, run_process

START_SECONDS_MAX = 120.0
WORDS_KEPT = 20
STORY_EVENTS_MAX = 30
_LOG_ENTRY_BYTES_MAX = 1 << 20


class SwarmFailed(Exception):
    """What had to come did not come; the text says what, and the peers' last words."""


@final
@dataclass(frozen=True, slots=True)
class Heard:
    """One event of one peer; `at` in this process's monotonic seconds."""

    at: float
    kind: str
    fields: Mapping[str, Any]


@final
@dataclass(slots=True)
class SwarmPeer:
    """One peer through all its processes; `events` are those of the process that runs, or ran last."""

    number: int
    folder: Path
    process: Process | None = None
    peer_id: str = ""
    round: int = 0
    events: list[Heard] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def last(self, kind: str) -> Heard | None:
        return next((event for event in reversed(self.events) if event.kind == kind), None)

    def first_after(self, at: float, kind: str, test: Callable[[Heard], bool] = lambda event: True) -> Heard | None:
        return next((e for e in self.events if e.at >= at and e.kind == kind and test(e)), None)

    @property
    def processes(self) -> list[int]:
        """The peer's own process and its daemon."""
        return [] if self.process is None else [self.process.pid, *processes_below(self.process.pid)]

    def send(self, number: signal.Signals) -> None:
        """To the peer, and to its daemon what freezes or wakes a whole machine."""
        for process_id in self.processes if number != signal.SIGKILL else self.processes[:1]:
            os.kill(process_id, number)


@asynccontextmanager
async def open_swarm(folder: Path, options: SimulateOptions) -> AsyncIterator[Swarm]:
    """A bootstrap peer, and `options.peers` training peers that start with the body; all are gone in the end."""
    (folder / "run.toml").write_text(run_file(options))
    async with anyio.create_task_group() as tasks:
        swarm = Swarm(folder, options, tasks)
        await swarm.start_bootstrap()
        for number in range(options.peers):
            swarm.add(number)
        yield swarm
        tasks.cancel_scope.cancel()


@final
class Swarm:
    """Made by `open_swarm`."""

    def __init__(self, folder: Path, options: SimulateOptions, tasks: TaskGroup) -> None:
        self.peers: list[SwarmPeer] = []
        self.fingerprints: dict[int, str] = {}
        """The anchor that somebody reported first after each round."""
        self.heads: dict[int, set[str]] = {}
        """The records committed as each round: more than one where the chain forked."""
        self.wrong: list[str] = []
        """Two anchors after one record, in words: must not happen."""
        self.counts: Counter[str] = Counter()
        """Events by kind, of all processes."""
        self.mark = str(folder / "temporary")
        """Stands in the environment of all processes; here they make their sockets."""
        self._folder = folder
        self._options = options
        self._tasks = tasks
        self._bootstrap = SwarmPeer(-1, folder / "bootstrap")
        self._anchors: dict[str, str] = {}
        self._news = anyio.Event()
        Path(self.mark).mkdir()

    @property
    def round(self) -> int:
        return max((peer.round for peer in self.peers), default=0)

    def add(self, number: int) -> SwarmPeer:
        peer = SwarmPeer(number, self._folder / f"peer-{number}")
        self.peers.append(peer)
        self.start(peer)
        return peer

    def start(self, peer: SwarmPeer) -> None:
        """(Again.)"""
        entry = ["--initial-peers", self._bootstrap.events[0].fields["addresses"][0], "--name", peer.folder.name]
        if peer.number == 0:
            command = peer_command("start", peer.folder, str(self._folder / "run.toml"), *entry)
        else:
            command = peer_command("join", peer.folder, "--run", RUN_NAME, *entry)
        peer.events = []
        self._tasks.start_soon(self._run, peer, command)

    async def start_bootstrap(self) -> None:
        self._tasks.start_soon(self._run, self._bootstrap, peer_command("bootstrap", self._bootstrap.folder))
        await self.wait_until(lambda: bool(self._bootstrap.events), START_SECONDS_MAX, "the bootstrap peer to listen")

    async def wait_until(self, condition: Callable[[], bool], seconds_max: float, what: str) -> None:
        """Looks after every event; raises `SwarmFailed`."""
        with anyio.move_on_after(seconds_max):
            while not condition():
                await self._news.wait()
            return
        words = [f"{p.folder.name} (round {p.round}, exits {p.exit_codes}): {p.words[-2:]}" for p in self.peers]
        raise SwarmFailed(f"waited {seconds_max:g} s for {what}; {'; '.join(words)}")

    def lead(self) -> SwarmPeer | None:
        """Who proposes, by the newest record."""
        record = self.newest()
        return next((peer for peer in self.peers if record is not None and peer.peer_id == record.lead), None)

    def newest(self) -> Record | None:
        """The newest record that is on disk; None while there is none."""
        logs = [path for peer in self.peers for path in peer.folder.glob("runs/*/log")]
        records = [record for path in logs if (record := newest_record(path)) is not None]
        return max(records, key=lambda record: record.round, default=None)

    async def _run(self, peer: SwarmPeer, command: list[str]) -> None:
        def started(process: Process) -> None:
            peer.process = process

        def on_line(line: str) -> None:
            peer.words.append(line)
            del peer.words[:-WORDS_KEPT]

        code = await run_process(
            command,
            {**environment(self._options.peers), "TMPDIR": self.mark},
            on_start=started,
            on_event=lambda event: self._on_event(peer, event),
            on_line=on_line,
        )
        peer.process = None
        peer.exit_codes.append(code)
        self._wake_all()

    def _wake_all(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()

    def _on_event(self, peer: SwarmPeer, event: Mapping[str, Any]) -> None:
        heard = Heard(anyio.current_time(), event["event"], event)
        self.counts[heard.kind] += 1
        peer.events.append(heard)
        if heard.kind == "Ready":
            peer.peer_id = event["peer_id"]
        elif heard.kind == "RoundDone":
            number, fingerprint = event["round"], event["fingerprint"]
            peer.round = number
            peer.fingerprints[number] = fingerprint
            self.fingerprints.setdefault(number, fingerprint)
            self.heads.setdefault(number, set()).add(event["head"])
            if self._anchors.setdefault(event["head"], fingerprint) != fingerprint:
                self.wrong.append(f"round {number}: {peer.folder.name} has another anchor")
        elif heard.kind == "Note":
            peer.words.append(event["text"])
        self._wake_all()


def story_of(peer: SwarmPeer, begin: float) -> str:
    """What a peer said since `begin`, in seconds from there."""
    told: list[str] = []
    for event in peer.events:
        if event.at >= begin and len(told) < STORY_EVENTS_MAX:
            more = event.fields.get("text", event.fields.get("round", ""))
            mark = " (with its own)" if event.fields.get("mine") else ""
            told.append(f"{event.at - begin:.1f} {event.kind} {more}".strip() + mark)
    return "; ".join(told)


def newest_record(path: Path) -> Record | None:
    """The last whole entry of a log that its owner may be writing to."""
    data, at, entry = path.read_bytes(), 0, b""
    while at + 8 <= len(data):  # The frames of `averaging.storage`: length, checksum, entries with their lengths.
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end > len(data):
            break
        place = at + 8
        while place < end:
            size = int.from_bytes(data[place : place + 4], "big")
            entry = data[place + 4 : place + 4 + size]
            place += 4 + size
        at = end
    if not entry:
        return None
    encoded, _ = unpack_list(entry, "log entry", _LOG_ENTRY_BYTES_MAX, 2)
    return parse_record(as_bytes(encoded, "log record", _LOG_ENTRY_BYTES_MAX))
