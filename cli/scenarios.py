"""`peer simulate --virtual` with `--scenario` or `--seeds`: swarms of toys under faults, and whether all held."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from peer.errors import TrainingFailed
from peer.lines import counted

if TYPE_CHECKING:
    from simulator.sweep import Figures
    from simulator.trial import Verdict

LINE_SECONDS_MIN = 2.0
FAILURES_SHOWN_MAX = 20


def run_one(file: Path) -> Verdict:
    """The scenario in `file`, run; raises `ValueError` that names the file and the field."""
    # Only now: what this imports takes seconds.
    from simulator.scenario import Scenario
    from simulator.trial import run_scenario

    try:
        scenario = Scenario.from_text(file.read_text(encoding="utf-8"))
    except (ValueError, IsADirectoryError) as error:
        raise ValueError(f"{file}: {error}") from error
    return run_scenario(scenario)


def described(verdict: Verdict) -> str:
    """What a scenario came to, for people."""
    outcome, scenario = verdict.outcome, verdict.scenario
    faults = ", ".join(f"{count} {kind}" for kind, count in outcome.faults.items()) or "none"
    tokens = [
        f"  {peer}: {processed:,} processed, {merged:,} merged, {processed - merged:,} lost"
        for peer, (processed, merged) in outcome.tokens_of.items()
    ]
    processed, merged = outcome.tokens_processed, outcome.tokens_merged
    return "\n".join(
        (
            f"{counted(outcome.rounds_committed, 'round')} committed by {counted(scenario.peers, 'peer')} "
            f"in {outcome.seconds:.1f} virtual "
            f"seconds ({verdict.seconds:.1f} real ones), seed {scenario.seed}, trace {outcome.trace[:16]}",
            f"faults   {faults}",
            f"lives    {outcome.restarts} ended early, after {outcome.recoveries} of these the peer committed again",
            f"tokens   {processed:,} processed, {merged:,} merged, {processed - merged:,} lost",
            *tokens,
            f"checks   {'all held' if verdict.failure is None else 'FAILED: ' + verdict.failure}",
        )
    )


def as_json(verdict: Verdict) -> dict[str, object]:
    """The same for programs."""
    outcome = verdict.outcome
    return {
        "scenario": verdict.scenario.to_text(),
        "failure": verdict.failure,
        "rounds_committed": outcome.rounds_committed,
        "restarts": outcome.restarts,
        "recoveries": outcome.recoveries,
        "faults": outcome.faults,
        "virtual_seconds": outcome.seconds,
        "seconds": verdict.seconds,
        "trace": outcome.trace,
        "tokens": {
            "processed": outcome.tokens_processed,
            "merged": outcome.tokens_merged,
            "lost": outcome.tokens_processed - outcome.tokens_merged,
            "by_peer": {peer: [done, merged, done - merged] for peer, (done, merged) in outcome.tokens_of.items()},
        },
        "peaks": outcome.peaks,
    }


def run_many(seed: int, count: int) -> Figures:
    """The random scenarios of `count` seeds from `seed` on, with progress on stderr."""
    from simulator.sweep import sweep

    spoke_at = time.monotonic()

    def on_result(figures: Figures) -> None:
        nonlocal spoke_at
        if time.monotonic() - spoke_at >= LINE_SECONDS_MIN:
            spoke_at = time.monotonic()
            print(f"{figures.seeds} of {count} seeds: {figures.line()}", file=sys.stderr, flush=True)

    return sweep(range(seed, seed + count), on_result)


def tell_failures(figures: Figures) -> None:
    """The seeds that failed, and the first of them as a small scenario; nothing if none did."""
    from simulator.scenario import Scenario
    from simulator.shrink import shrink

    for result in figures.failures[:FAILURES_SHOWN_MAX]:
        click.echo(f"seed {result.seed} FAILED: {result.failure}")
    if figures.failures:
        seed = figures.failures[0].seed
        print(f"making the scenario of seed {seed} smaller ...", file=sys.stderr, flush=True)
        click.echo(f"\n# Fails as seed {seed} does; run it with: peer simulate --virtual --scenario FILE")
        click.echo(shrink(Scenario.random(seed)).to_text())


def check_alone(ctx: click.Context, name: str, allowed: set[str]) -> None:
    """Raises `UsageError` if options are given that `--scenario` or `--seeds` has no use for."""
    from click.core import ParameterSource

    for param in ctx.command.params:
        given = param.name is not None and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if given and param.name not in allowed:
            raise click.UsageError(f"{param.opts[0]} does not go with {name}: its swarms are made of toys")


def simulate_scenario(ctx: click.Context, file: Path, json_file: Path | None) -> dict[str, object]:
    check_alone(ctx, "--scenario", {"scenario_file", "virtual", "json_file"})
    verdict = run_one(file)
    click.echo(described(verdict), err=json_file == Path("-"))
    return as_json(verdict)


def simulate_seeds(ctx: click.Context, seed: int, count: int, json_file: Path | None) -> dict[str, object]:
    """Ends with the one line of figures."""
    check_alone(ctx, "--seeds", {"seeds", "seed", "virtual", "json_file"})
    figures = run_many(seed, count)
    tell_failures(figures)
    click.echo(figures.line(), err=json_file == Path("-"))
    return {
        "seeds": figures.seeds,
        "first_seed": seed,
        "rounds": figures.rounds,
        "faults": dict(sorted(figures.faults.items())),
        "crashes": figures.crashes,
        "recoveries": figures.recoveries,
        "forced_records": figures.recovery_records,
        "seconds": figures.seconds,
        "failures": {result.seed: result.failure for result in figures.failures},
    }


def fail_if(summary: dict[str, object]) -> None:
    """Raises `TrainingFailed` unless all held."""
    failures = summary.get("failures") or summary.get("failure")
    if isinstance(failures, dict):
        raise TrainingFailed(f"{len(failures)} of {summary['seeds']} seeds failed, the first is {min(failures)}")
    if failures:
        raise TrainingFailed(f"the scenario failed: {failures}")
