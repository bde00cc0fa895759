"""Loss against tokens, and against the first label at the same tokens and seed, from the lines that `tune` wrote.

python -m benchmarks.draw_points docs/results/distro.jsonl --plot distro.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib import pyplot

INCHES = (10.0, 4.2)
DOTS_PER_INCH = 80


@dataclass(frozen=True, slots=True)
class Ran:
    """One run; of several with one label, tokens and seed the last counts."""

    label: str
    tokens: int
    seed: int
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="lines of JSON from benchmarks.tune --json")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE")
    parser.add_argument("--labels", nargs="+", help="only these, in this order; the first is what is compared with")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.file.read_text().splitlines()]
    ran = [Ran(line["label"], line["tokens"], line["seed"], line["loss"]) for line in lines]
    draw(ran, options.labels or list(dict.fromkeys(run.label for run in ran)), options.plot)


def draw(ran: Sequence[Ran], labels: Sequence[str], file: Path) -> None:
    figure, (absolute, relative) = pyplot.subplots(1, 2, figsize=INCHES, layout="constrained")
    first = {(run.tokens, run.seed): run.loss for run in ran if run.label == labels[0]}
    for number, label in enumerate(labels):
        losses = {(run.tokens, run.seed): run.loss for run in ran if run.label == label}
        _line(absolute, label, f"C{number % 10}", losses)
        over = {key: 100 * (loss / first[key] - 1) for key, loss in losses.items() if key in first}
        _line(relative, label, f"C{number % 10}", over)
    absolute.set_ylabel("loss on held-out text, nats a byte")
    relative.set_ylabel(f"% above {labels[0]}, seed by seed")
    absolute.legend(fontsize="small")
    for axes in (absolute, relative):
        axes.set_xscale("log")
        budgets = sorted({run.tokens for run in ran if run.label in labels})
        axes.set_xticks(budgets, [f"{tokens / 1e6:.2g} M" for tokens in budgets])
        axes.minorticks_off()
        axes.set_xlabel("tokens, of all peers together")
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


def _line(axes: pyplot.Axes, label: str, color: str, values: Mapping[tuple[int, int], float]) -> None:
    """Means over the seeds, with their range."""
    tokens = sorted({key[0] for key in values})
    seeds = [[value for key, value in values.items() if key[0] == at] for at in tokens]
    means = [fmean(each) for each in seeds]
    reach = [[mean - min(s) for mean, s in zip(means, seeds, strict=True)]]
    reach.append([max(s) - mean for mean, s in zip(means, seeds, strict=True)])
    axes.errorbar(tokens, means, yerr=reach, color=color, marker="o", capsize=3, linewidth=1, label=label)


if __name__ == "__main__":
    main()
