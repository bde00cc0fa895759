"""Peers as processes of their own: started through the command line, heard line by line, ended for certain."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

LINE_BYTES_MAX = 1 << 20
STOP_SECONDS_MAX = 8.0
ROOT = Path(__file__).resolve().parent.parent


def peer_command(subcommand: str, folder: Path, *arguments: str) -> list[str]:
    """A peer on loopback that keeps its state in `folder` and prints JSON events."""
    place = ["--host", "127.0.0.1", "--folder", str(folder), "--json-events"]
    return [sys.executable, "-m", "cli", subcommand, *arguments, *place]


def environment(peers: int) -> dict[str, str]:
    """For a child: this checkout's code, and its share of the processors."""
    threads = str(max(1, (os.cpu_count() or 1) // peers))
    # As in bin/environment.sh: threads sleep while they wait, and memory stays in one arena.
    lean = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_ARENA_MAX": "1"}
    return {**os.environ, **lean, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


async def run_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    on_start: Callable[[Process], None],
    on_event: Callable[[Mapping[str, Any]], None],
    on_line: Callable[[str], None],
) -> int:
    """Runs to the end and returns the exit code, negative for a signal; a cancelled caller stops the process.

    `on_event` gets the JSON objects on stdout, `on_line` all else that is printed.
    """
    async with await anyio.open_process(command, env=environment, cwd=ROOT) as process:
        on_start(process)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_read_errors, process, on_line)
                await _read_events(process, on_event, on_line)
            return await process.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


async def _stop(process: Process) -> None:
    """SIGINT, and SIGKILL if it is not gone in time."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        # Who is killed leaves its daemon's sockets behind.
        with anyio.move_on_after(STOP_SECONDS_MAX):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()


async def _read_events(
    process: Process, on_event: Callable[[Mapping[str, Any]], None], on_line: Callable[[str], None]
) -> None:
    assert process.stdout is not None
    rest = ""
    async for text in TextReceiveStream(process.stdout, errors="replace"):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                on_line(line)
                continue
            on_event(event)
        if len(rest) > LINE_BYTES_MAX:
            rest = ""


async def _read_errors(process: Process, on_line: Callable[[str], None]) -> None:
    assert process.stderr is not None
    async for text in TextReceiveStream(process.stderr, errors="replace"):
        for line in text.splitlines():
            if line.strip():
                on_line(line)
