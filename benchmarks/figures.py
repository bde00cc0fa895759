"""What all benchmarks say with their figures: median, range, machine, commit, load; as text and as JSON."""

from __future__ import annotations

import datetime
import json
import os
import signal
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

MACHINE = "2 shared x86-64 cores, loopback"


@final
@dataclass(frozen=True, slots=True)
class Figure:
    """A sample of one quantity."""

    median: float
    least: float
    most: float
    p95: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Figure:
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        return Figure(statistics.median(ordered), ordered[0], ordered[-1], p95, len(ordered))

    def text(self, factor: float = 1.0, digits: int = 1) -> str:
        median, least, most = (f"{factor * v:.{digits}f}" for v in (self.median, self.least, self.most))
        return f"{median} ({least}-{most})"

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "min": self.least, "max": self.most, "p95": self.p95, "count": self.count}


def circumstances() -> dict[str, object]:
    """Date, commit and machine, for every result."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    load = [round(value, 1) for value in os.getloadavg()]
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"date": date, "commit": commit or "unknown", "machine": MACHINE, "load": load}


def end_cleanly_when_told() -> None:
    """SIGTERM ends a script as Ctrl+C does: with all processes that it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def write_json(path: Path | None, results: dict[str, object], before: dict[str, object]) -> None:
    """`before` are the circumstances at the start: the load then is that of others."""
    if path is not None:
        path.write_text(json.dumps({**before, **results}, indent=1) + "\n")
