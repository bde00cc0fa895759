"""Real processes with real daemons on loopback, killed at random: the run reaches its goal and leaves nothing over."""

from __future__ import annotations

from pathlib import Path

import anyio

from simulator.local import run_local_swarm
from simulator.options import SimulateOptions


def processes_in(folder: Path) -> list[str]:
    """The command lines of living processes that name `folder`: peers, and daemons by their key file."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # It ended just now.
            if str(folder) in command:
                found.append(command)
    return found


async def wait_gone(folder: Path, seconds_max: float) -> list[str]:
    with anyio.move_on_after(seconds_max):
        while processes_in(folder):  # noqa: ASYNC110
            await anyio.sleep(0.1)
    return processes_in(folder)


def test_three_processes_train_through_kills(tmp_path: Path) -> None:
    options = SimulateOptions(
        peers=3, rounds=12, model="gpt-nano", kill_every_seconds=6.0, timeout_seconds=180.0, folder=tmp_path / "swarm"
    )
    seen: list[int] = []
    summary = run_local_swarm(options, lambda progress: seen.append(progress.round))
    print(summary)
    assert summary.rounds_committed >= options.rounds
    assert summary.fingerprints_equal
    assert summary.loss_last < summary.loss_first
    tokens = summary.tokens
    assert tokens.processed == tokens.merged + tokens.lost
    assert 0 < tokens.merged <= tokens.processed
    assert tokens.lost == 0 or summary.restarts > 0
    assert 0 < summary.packet_bytes_sent_per_peer_per_round <= summary.bytes_sent_per_peer_per_round
    assert summary.bytes_sent_per_peer_per_round < summary.dense_bytes_per_peer_per_round
    assert seen == sorted(seen) and seen[-1] == summary.rounds_committed
    assert anyio.run(wait_gone, tmp_path, 5.0) == []
