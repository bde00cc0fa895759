"""Methods side by side: the same data, model, tokens and links for all; what is run, and a row for each in the end."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import final

from simulator.options import LossPoint, Setting, SimulateOptions, Summary

SEEDS_MAX = 1000
TOKENS_MAX = 10**12
ALONE = "diloco-1"
"""DiLoCo of one peer that trains on everybody's batches: what training without a network comes to."""


@final
@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Raises `ValueError` where something cannot be; whether the presets exist is seen when they are run."""

    presets: tuple[str, ...]
    """Names of presets, and `diloco-1`."""
    model: str = "gpt-nano"
    peers: int = 4
    tokens: int = 245_760
    """The budget of every method: what all peers together train on."""
    seeds: int = 2
    seed: int = 0
    """The first of the seeds; each is one of weights and of chance."""
    latency_ms: float = 50.0
    bandwidth_mbit: float | None = 20.0
    step_seconds: float = 0.5
    """Of virtual time for one inner step on one batch, the same for all methods."""
    speed_spread: float = 0.0
    """Peers differ in speed by up to this fraction."""
    data: tuple[Path, ...] = ()
    settings: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    """By preset: method settings that differ from the preset's."""
    processes: int | None = None
    """That run at a time; None: as many as there are processors."""

    def __post_init__(self) -> None:
        if not self.presets:
            raise ValueError("presets: name at least one")
        for name in self.presets:
            if self.presets.count(name) > 1:
                raise ValueError(f"presets: {name!r} is named twice")
        for name in self.settings:
            if name not in self.presets:
                raise ValueError(f"settings of {name!r}: it is not among the presets that are compared")
        for name, most in (("tokens", TOKENS_MAX), ("seeds", SEEDS_MAX)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} {getattr(self, name)} is not in 1..{most}")


@final
@dataclass(frozen=True, slots=True)
class Job:
    """One run of one method; `name` is what it is compared as."""

    name: str
    options: SimulateOptions


@final
@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job: a summary, or in a sentence why there is none."""

    name: str
    seed: int
    summary: Summary | None
    failure: str = ""


@final
@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What the loss was so far into a run; means over the seeds."""

    loss: float
    bytes_sent_per_peer: float
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One method; all figures are means over the seeds that came to an end. NaN where none did."""

    preset: str
    loss: float
    """On held-out text, nats a byte; of replicas that differ the mean."""
    loss_interval: tuple[float, float]
    """The least and the most over the seeds."""
    bytes_sent_per_peer: float
    """All that a peer handed to the network in the whole run."""
    dense_bytes_per_peer: float
    """What a ring all-reduce of float32 gradients after every inner step would send in the same run."""
    seconds: float
    """Virtual, until the last peer had the last round."""
    rounds: int
    tokens: int
    """Merged."""
    packet_bytes_sent_per_peer: float = math.nan
    """Of the bytes sent, the contributions alone: what is left of a large model's traffic."""
    losses: tuple[float, ...] = ()
    """By seed, in order."""
    loss_over_first: float | None = None
    """Mean over the seeds of loss / (loss of the first row with the same seed) - 1."""
    curve: tuple[CurvePoint, ...] = ()
    failures: tuple[str, ...] = ()

    @property
    def times_below_dense(self) -> float | None:
        """None where nobody would have to send anything."""
        if not (self.bytes_sent_per_peer > 0 and self.dense_bytes_per_peer > 0):
            return None
        return self.dense_bytes_per_peer / self.bytes_sent_per_peer

    def as_json(self) -> dict[str, object]:
        """Plain values; what nobody measured is null."""
        fields = {**dataclasses.asdict(self), "times_below_dense": self.times_below_dense}
        return {name: _plain(value) for name, value in fields.items()}


def row_of(name: str, results: Sequence[Result], first: Sequence[Result] = ()) -> Row:
    """Of the results of one method, one a seed; `first` are those of the method that all are measured by."""
    done = [(result.seed, result.summary) for result in results if result.summary is not None]
    failures = tuple(f"seed {result.seed}: {result.failure}" for result in results if result.summary is None)
    if not done:
        nothing = math.nan
        return Row(name, nothing, (nothing, nothing), nothing, nothing, nothing, 0, 0, failures=failures)
    summaries = [summary for _, summary in done]
    by = {result.seed: loss_of(result.summary) for result in first if result.summary is not None}
    ratios = [loss_of(summary) / by[seed] - 1 for seed, summary in done if seed in by]
    losses = tuple(loss_of(summary) for summary in summaries)
    return Row(
        preset=name,
        loss=fmean(losses),
        loss_interval=(min(losses), max(losses)),
        bytes_sent_per_peer=fmean(s.bytes_sent_per_peer_per_round * s.rounds_committed for s in summaries),
        dense_bytes_per_peer=fmean(s.dense_bytes_per_peer_per_round * s.rounds_committed for s in summaries),
        seconds=fmean(s.seconds_to_goal or s.seconds for s in summaries),
        rounds=round(fmean(s.rounds_committed for s in summaries)),
        tokens=round(fmean(s.tokens.merged for s in summaries)),
        packet_bytes_sent_per_peer=fmean(
            s.packet_bytes_sent_per_peer_per_round * s.rounds_committed for s in summaries
        ),
        losses=losses,
        loss_over_first=fmean(ratios) if ratios else None,
        curve=_curve(summaries),
        failures=failures,
    )


def rows_of(options: CompareOptions, results: Sequence[Result]) -> list[Row]:
    """In the order of the presets."""
    by_name = {name: [result for result in results if result.name == name] for name in options.presets}
    first = by_name[options.presets[0]]
    return [row_of(name, found, first) for name, found in by_name.items()]


COLUMNS = (
    "preset",
    "loss",
    "least..most",
    "vs first",
    "sent a peer",
    "of it packets",
    "below dense",
    "seconds",
    "rounds",
    "tokens",
)


def table(rows: Sequence[Row]) -> str:
    """For people; a dash where there is no figure."""
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def csv_text(rows: Sequence[Row]) -> str:
    """One line a method; the interval in two columns, without curves."""
    names = [
        *("preset", "loss", "loss_least", "loss_most", "bytes_sent_per_peer", "packet_bytes_sent_per_peer"),
        *("dense_bytes_per_peer", "seconds", "rounds", "tokens", "times_below_dense", "loss_over_first"),
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = {**row.as_json(), "loss_least": row.loss_interval[0], "loss_most": row.loss_interval[1]}
        writer.writerow(_plain(values[name]) for name in names)
    return text.getvalue()


def loss_of(summary: Summary) -> float:
    """What a run is judged by."""
    return summary.loss_last if summary.loss_held_out is None else summary.loss_held_out


def _curve(summaries: Sequence[Summary]) -> tuple[CurvePoint, ...]:
    """The rounds that were looked at with every seed."""
    by_round: dict[int, list[tuple[LossPoint, Summary]]] = {}
    for summary in summaries:
        for point in summary.curve:
            by_round.setdefault(point.round, []).append((point, summary))
    return tuple(
        CurvePoint(
            fmean(point.loss for point, _ in found),
            fmean(number * summary.bytes_sent_per_peer_per_round for _, summary in found),
            fmean(point.seconds for point, _ in found),
        )
        for number, found in sorted(by_round.items())
        if len(found) == len(summaries)
    )


def _cells(row: Row) -> tuple[str, ...]:
    times, over = row.times_below_dense, row.loss_over_first
    if not row.losses:
        return (row.preset, "failed", *["-"] * (len(COLUMNS) - 2))
    return (
        row.preset,
        f"{row.loss:.4f}",
        f"{row.loss_interval[0]:.4f}..{row.loss_interval[1]:.4f}",
        "-" if over is None else f"{over:+.2%}",
        f"{row.bytes_sent_per_peer / 1000:,.1f} kB",
        f"{row.packet_bytes_sent_per_peer / 1000:,.1f} kB",
        "-" if times is None else f"{times:,.1f}",
        f"{row.seconds:,.1f}",
        f"{row.rounds}",
        f"{row.tokens:,}",
    )


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value
