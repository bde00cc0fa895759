"""A simulated swarm's progress on the terminal: one line, rewritten; or a line now and then where it cannot be."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from peer.lines import counted

if TYPE_CHECKING:
    from simulator.progress import Progress

LINE_SECONDS_MIN = 5.0


class Show(Protocol):
    def __call__(self, progress: Progress) -> None: ...


@contextmanager
def shown() -> Iterator[Show]:
    """Yields what to call with the progress, as often as one likes; everything goes to stderr."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield lambda progress: live.update(Text(line(progress)))
        return
    spoke_at = -LINE_SECONDS_MIN

    def speak(progress: Progress) -> None:
        nonlocal spoke_at
        if progress.seconds - spoke_at >= LINE_SECONDS_MIN:
            spoke_at = progress.seconds
            print(line(progress), file=sys.stderr, flush=True)

    yield speak


def line(progress: Progress) -> str:
    """The state in one line."""
    if not progress.round:
        return f"{progress.seconds:4.0f} s  starting {counted(progress.peers_wanted, 'peer')} ..."
    loss = f"loss {progress.train_loss:.3f} in training" if progress.train_loss == progress.train_loss else "loss -"
    if progress.loss == progress.loss:
        loss = f"loss {progress.loss:.3f}"
        if progress.loss_round < progress.round:
            loss += f" after round {progress.loss_round}"
    sent = ""
    if progress.bytes_sent:
        times = progress.dense_bytes / progress.bytes_sent
        sent = f"  {progress.bytes_sent / 1000:,.1f} kB a peer and round, {times:,.0f} times less than dense"
    restarts = f"  {counted(progress.restarts, 'restart')}" if progress.restarts else ""
    return (
        f"{progress.seconds:4.0f} s  round {progress.round}/{progress.rounds_goal}"
        f"  {counted(progress.peers, 'peer')} ({progress.members} in it)  {loss}"
        f"{sent}  anchor {progress.fingerprint[:8]}{restarts}"
    )
