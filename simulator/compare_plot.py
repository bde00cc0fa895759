"""The two plots of a comparison: loss against bytes sent, and loss against time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simulator.compare import CompareOptions, CurvePoint, Row

INCHES = (11.0, 4.6)
DOTS_PER_INCH = 80
SHOWN = 0.3
MARGIN = 0.02


def draw(rows: Sequence[Row], options: CompareOptions, file: Path) -> None:
    """Writes a picture of the kind that the name of `file` says; needs matplotlib. Raises `ValueError`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_bytes, by_time) = pyplot.subplots(1, 2, figsize=INCHES, sharey=True, layout="constrained")
    for number, row in enumerate(rows):
        color = f"C{number % 10}"
        _lines(by_bytes, row, color, lambda point: point.bytes_sent_per_peer / 1000)
        _lines(by_time, row, color, lambda point: point.seconds)
    by_bytes.set_xscale("log")
    by_bytes.set_xlabel("kB sent a peer")
    by_bytes.set_ylabel("loss on held-out text, nats a byte")
    rate = "unlimited bandwidth" if options.bandwidth_mbit is None else f"{options.bandwidth_mbit:g} Mbit/s"
    by_time.set_xlabel(f"virtual seconds at {rate}, {options.latency_ms:g} ms, {options.step_seconds:g} s a step")
    by_time.legend(fontsize="small")
    for axes in (by_bytes, by_time):
        axes.grid(alpha=0.3)
    _show_the_end(by_bytes, rows)
    figure.suptitle(f"{options.model}, {options.peers} peers, {options.tokens:,} tokens, {options.seeds} seeds")
    try:
        figure.savefig(file, dpi=DOTS_PER_INCH)
    finally:
        pyplot.close(figure)


def _show_the_end(axes: Any, rows: Sequence[Row]) -> None:
    """Losses up to a share of the way from the start to the best: above, methods hardly differ. All ends are seen."""
    done = [row for row in rows if row.losses]
    if done and all(row.curve for row in done):
        best = min(min(row.losses) for row in done)
        start = max(row.curve[0].loss for row in done)
        worst = max(max(row.losses) for row in done)
        axes.set_ylim(top=max(worst, best + SHOWN * (start - best)) + MARGIN * (start - best))


def _lines(axes: Any, row: Row, color: str, across: Callable[[CurvePoint], float]) -> None:
    """The way there (without the start, where all are alike), and a dot with the range over the seeds at the end."""
    if not row.losses:
        return
    points = row.curve[1:]
    axes.plot([across(p) for p in points], [p.loss for p in points], color=color, alpha=0.5, linewidth=1)
    end = across(CurvePoint(row.loss, row.bytes_sent_per_peer, row.seconds))
    reach = [[row.loss - row.loss_interval[0]], [row.loss_interval[1] - row.loss]]
    axes.errorbar([end], [row.loss], yerr=reach, color=color, marker="o", capsize=3, label=row.preset)
