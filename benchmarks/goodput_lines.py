"""What a run under failures was worth, the table of all runs, and their picture."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from benchmarks.failures import DOWN_SECONDS, RATES


@final
@dataclass(slots=True)
class Run:
    """What one contender made of one trace, until `seconds`; times in peer-seconds, tokens of all peers."""

    contender: str
    rate: str
    seed: int
    goodput: float = math.nan
    possible: float = math.nan
    all_up: float = math.nan
    down: float = 0.0
    standing: float = 0.0
    in_vain: float = 0.0
    """Down, standing, in vain and the goodput are shares of all peer-seconds; their sum is 1."""
    tokens_processed: int = 0
    tokens_merged: float = 0.0
    tokens_lost: int = 0
    """Processed by then or after, and in the end, when all were back and had committed, not in the model."""
    rounds: int = 0
    members: float = 0.0
    longest_gap: float = 0.0
    """Between two commits."""
    crashes: int = 0
    recoveries: int = 0
    loss: float = math.nan
    points: list[tuple[float, float, float]] = field(default_factory=list)
    """Seconds, tokens merged, loss."""


@final
@dataclass(frozen=True, slots=True)
class Line:
    """A contender at a rate; means over the seeds."""

    rate: str
    contender: str
    goodput: tuple[float, float, float]
    """Mean, least, most."""
    down: float
    standing: float
    in_vain: float
    processed: float
    merged: float
    lost: float
    tokens: float
    """What all contenders reached, with every seed."""
    seconds_to_tokens: float
    loss_at_tokens: float
    loss_at_end: float


def lines_of(runs: Sequence[Run]) -> list[Line]:
    lines = []
    for rate in dict.fromkeys(run.rate for run in runs):
        tokens = min(run.tokens_merged for run in runs if run.rate == rate)
        for name in dict.fromkeys(run.contender for run in runs):
            found = [run for run in runs if run.rate == rate and run.contender == name]
            if found:
                lines.append(line_of(found, tokens))
    return lines


def line_of(runs: Sequence[Run], tokens: float) -> Line:
    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    goodputs = [run.goodput for run in runs]
    return Line(
        runs[0].rate,
        runs[0].contender,
        (mean("goodput"), min(goodputs), max(goodputs)),
        mean("down"),
        mean("standing"),
        mean("in_vain"),
        mean("tokens_processed"),
        mean("tokens_merged"),
        mean("tokens_lost"),
        tokens,
        statistics.fmean(interpolated([(merged, at) for at, merged, _ in run.points], tokens) for run in runs),
        statistics.fmean(interpolated([(merged, loss) for _, merged, loss in run.points], tokens) for run in runs),
        mean("loss"),
    )


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = [
        "| failures | contender | goodput (range) | down | standing | in vain "
        "| tokens, thousands: processed / merged / lost | s to N tokens | loss there | loss at the end |",
        "|" + " --- |" * 10,
    ]
    for line in lines:
        mean, least, most = (f"{100 * share:.1f}" for share in line.goodput)
        shares = " | ".join(f"{100 * share:.1f} %" for share in (line.down, line.standing, line.in_vain))
        counts = " / ".join(f"{count / 1000:.1f}" for count in (line.processed, line.merged, line.lost))
        rows.append(
            f"| {line.rate} | {line.contender} | {mean} % ({least}-{most}) | {shares} | {counts} "
            f"| {line.seconds_to_tokens:.0f} (N = {line.tokens / 1000:.0f}) "
            f"| {line.loss_at_tokens:.3f} | {line.loss_at_end:.3f} |"
        )
    return "\n".join(rows)


def draw(runs: Sequence[Run], peers: int, file: Path) -> None:
    """Goodput against the failures of the swarm in an hour; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def hourly(rate: str) -> float:
        return peers * 3600 / (RATES[rate] + DOWN_SECONDS)

    figure, axes = pyplot.subplots(figsize=(7.0, 4.5), layout="constrained")
    lines, rates = lines_of(runs), list(dict.fromkeys(run.rate for run in runs))
    for attribute, style in (("possible", "--"), ("all_up", ":")):
        shares = [statistics.fmean(getattr(run, attribute) for run in runs if run.rate == rate) for rate in rates]
        axes.plot([hourly(r) for r in rates], [100 * s for s in shares], f"k{style}", label=attribute.replace("_", " "))
    for name in dict.fromkeys(run.contender for run in runs):
        mine = [line for line in lines if line.contender == name]
        means, least, most = ([100 * line.goodput[at] for line in mine] for at in range(3))
        reach = [[m - a for m, a in zip(means, least, strict=True)], [b - m for m, b in zip(means, most, strict=True)]]
        axes.errorbar([hourly(line.rate) for line in mine], means, yerr=reach, marker="o", capsize=3, label=name)
    axes.set_xlabel(f"failures an hour in a swarm of {peers}, each {DOWN_SECONDS:g} s long")
    axes.set_ylabel("goodput, % of the swarm's compute")
    axes.set_ylim(0, 103)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of the line through the points, in order of their x; NaN outside."""
    for (left, low), (right, high) in itertools.pairwise(points):
        if left <= x <= right:
            return low if right == left else low + (high - low) * (x - left) / (right - left)
    return math.nan
