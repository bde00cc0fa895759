"""A real `peer start` ends when it is told to, and its daemon with it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS_MAX = 120.0
RUN = """
[run]
name = "leaving"
[model]
name = "gpt-nano"
[method]
preset = "distro"
[group]
start_peers = {start_peers}
"""


@contextmanager
def started(folder: Path, start_peers: int = 1) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A peer that trains (alone) or waits for others (`start_peers` of 2), and its `Ready` event."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(RUN.format(start_peers=start_peers))
    command = [sys.executable, "-m", "cli", "start", str(folder / "run.toml"), "--host", "127.0.0.1"]
    command += ["--folder", str(folder / "peer"), "--json-events", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, wait_event(process, "Ready")
        finally:
            process.kill()


def wait_event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        event: dict[str, Any] = json.loads(line)
        if event["event"] == name:
            return event
    raise AssertionError(f"the peer ended without {name}")


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_gone_within(process_id: int, seconds: float) -> bool:
    async def wait() -> None:
        with anyio.move_on_after(seconds):
            while is_running(process_id):  # noqa: ASYNC110
                await anyio.sleep(0.02)

    anyio.run(wait)
    return not is_running(process_id)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_training_peer_leaves_when_it_is_asked(how: signal.Signals, tmp_path: Path) -> None:
    with started(tmp_path / "run") as (process, ready):
        wait_event(process, "RoundDone")
        daemon = ready["daemon"]
        assert is_running(daemon)
        process.send_signal(how)
        left = wait_event(process, "Left")
        assert left["round"] > 0
        assert process.wait(5.0) == 130
        assert not is_running(daemon)


def test_a_waiting_peer_leaves_too(tmp_path: Path) -> None:
    with started(tmp_path / "run", start_peers=2) as (process, ready):
        process.send_signal(signal.SIGINT)
        assert process.wait(5.0) == 130
        assert not is_running(ready["daemon"])


def test_the_daemon_of_a_killed_peer_goes_too(tmp_path: Path) -> None:
    with started(tmp_path / "run") as (process, ready):
        assert is_running(ready["daemon"])
        process.kill()
        process.wait(5.0)
        assert is_gone_within(ready["daemon"], 2.0)


def test_a_killed_peer_goes_on_where_it_was(tmp_path: Path) -> None:
    with started(tmp_path / "run") as (process, first):
        for _ in range(3):
            done = wait_event(process, "RoundDone")
        process.kill()
    with started(tmp_path / "run") as (process, second):
        assert second["peer_id"] == first["peer_id"]
        again = wait_event(process, "RoundDone")
        assert again["round"] > done["round"] - 2, "at most the last, unwritten record is done again"
        process.kill()
