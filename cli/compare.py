"""`peer compare`: training methods side by side, on the same data, tokens and links."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.arguments import STDOUT, Command, Finite, OutputFile, Setting, data_option
from cli.exit_codes import ExitCode
from cli.simulate import MODELS, PRESETS, write_json
from peer.errors import TrainingFailed
from peer.lines import counted
from simulator.compare import ALONE, SEEDS_MAX, TOKENS_MAX, CompareOptions, Result, csv_text, loss_of, rows_of, table
from simulator.options import PEERS_MAX
from simulator.options import Setting as SettingValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simulator.compare import Row

KNOWN = ("allreduce", ALONE, *(preset for preset in PRESETS if preset != "allreduce"))
DEFAULTS = CompareOptions(presets=KNOWN)
MISSING = "--plot needs matplotlib, which is not installed here: `.venv/bin/pip install 'matplotlib>=3.9'`"
FIGURES = (".png", ".svg", ".pdf")


class Presets(click.ParamType[tuple[str, ...]]):
    """Names with commas between them."""

    name = "presets"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(","))
        for name in names:
            if name not in KNOWN:
                self.fail(f"{name!r} is none of {', '.join(KNOWN)}", param, ctx)
            if names.count(name) > 1:
                self.fail(f"{name!r} is named twice", param, ctx)
        return names


class PresetSetting(click.ParamType[tuple[str, str, str]]):
    """`PRESET:KEY=VALUE`."""

    name = "preset:key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str, str]:
        if isinstance(value, tuple):
            return value
        preset, colon, setting = str(value).partition(":")
        if not colon or preset not in KNOWN:
            self.fail(f"{value!r} is not PRESET:KEY=VALUE, such as diloco:outer.lr=0.7", param, ctx)
        return (preset, *Setting().convert(setting, param, ctx))


@click.command(cls=Command, name="compare", short_help="Training methods side by side, and a table of them.")
@click.option(
    "--presets",
    default=",".join(KNOWN),
    type=Presets(),
    metavar="A,B,...",
    help=f"What to compare; {ALONE} is one peer that trains on everybody's batches. The first is what losses are "
    "measured by.",
)
@click.option("--model", default=DEFAULTS.model, type=click.Choice(MODELS), help="The model to train.")
@click.option("--peers", default=DEFAULTS.peers, type=click.IntRange(1, PEERS_MAX), metavar="N", help="How many peers.")
@click.option(
    "--tokens",
    default=DEFAULTS.tokens,
    type=click.IntRange(1, TOKENS_MAX),
    metavar="N",
    help="What all peers together train on, in whole rounds.",
)
@click.option(
    "--seeds", default=DEFAULTS.seeds, type=click.IntRange(1, SEEDS_MAX), metavar="N", help="Runs of each method."
)
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1001), metavar="S", help="The first of the seeds.")
@click.option(
    "--latency",
    "latency_ms",
    default=DEFAULTS.latency_ms,
    type=Finite(min=0),
    metavar="MS",
    help="One way, every link.",
)
@click.option(
    "--bandwidth",
    "bandwidth_mbit",
    default=DEFAULTS.bandwidth_mbit,
    type=Finite(min=0.001),
    metavar="MBIT",
    help="Up and down, of every peer.",
)
@click.option(
    "--step-seconds",
    default=DEFAULTS.step_seconds,
    type=Finite(0.001, 3600),
    metavar="SECONDS",
    help="Of virtual time for one inner step of one peer, the same for all methods.",
)
@click.option(
    "--spread",
    "speed_spread",
    default=DEFAULTS.speed_spread,
    type=Finite(0, 0.9),
    metavar="SHARE",
    help="Peers differ in speed by up to this share.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    type=PresetSetting(),
    metavar="PRESET:KEY=VALUE...",
    help="Settings of a method that differ from the preset's, such as diloco:outer.lr=0.7.",
)
@data_option
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    metavar="N",
    show_default=False,
    help="Runs at a time. Default: as many as there are processors.",
)
@click.option("--json", "json_file", type=OutputFile(), metavar="FILE", help="Write the rows as JSON; - is stdout.")
@click.option("--csv", "csv_file", type=OutputFile(), metavar="FILE", help="Write the rows as CSV; - is stdout.")
@click.option("--plot", "plot_file", type=OutputFile(), metavar="FILE", help="Draw loss by bytes and by time.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    settings: tuple[tuple[str, str, str], ...],
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
    **values: Any,
) -> None:
    """Train with several methods on virtual swarms, each with the same budget of tokens, over the same simulated links.

    It ends with a table: the loss on held-out text with its range over the seeds, the bytes that a peer sent and how
    many times fewer that is than a dense float32 all-reduce after every inner step would send, and the virtual seconds
    that it took. Exits with 5 when a run failed.

    \b
    Examples:
      peer compare
      peer compare --presets allreduce,distro,muloco --tokens 1000000 --seeds 3 --json rows.json
      peer compare --latency 100 --bandwidth 5 --plot plots.png
      peer compare --presets diloco,muloco --set diloco:outer.lr=0.7 muloco:inner_steps=10
    """
    if json_file == STDOUT and csv_file == STDOUT:
        raise click.UsageError("--json - and --csv -: only one of them can be stdout")
    if plot_file is not None:
        check_plot(ctx, plot_file)
    options = CompareOptions(settings=by_preset(settings), **values)
    results = compared(options)
    rows = rows_of(options, results)
    click.echo(described(options, rows), err=STDOUT in (json_file, csv_file))
    if json_file is not None:
        write_json([row.as_json() for row in rows], json_file)
    if csv_file is not None:
        write_csv(rows, csv_file)
    if plot_file is not None:
        from simulator.compare_plot import draw

        draw(rows, options, plot_file)
    failures = [f"{result.name}, seed {result.seed}: {result.failure}" for result in results if result.failure]
    if failures:
        raise TrainingFailed(f"{len(failures)} of {len(results)} runs failed, the first is {failures[0]}")


def check_plot(ctx: click.Context, file: Path) -> None:
    """Before hours of training, not after."""
    if file.suffix not in FIGURES:
        raise click.UsageError(f"--plot {file}: the name must end with one of {', '.join(FIGURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        click.echo(f"peer: {MISSING}", err=True)
        ctx.exit(ExitCode.UNEXPECTED)


def by_preset(settings: Sequence[tuple[str, str, str]]) -> dict[str, dict[str, SettingValue]]:
    found: dict[str, dict[str, SettingValue]] = {}
    for preset, name, value in settings:
        found.setdefault(preset, {})[name] = value
    return found


def compared(options: CompareOptions) -> list[Result]:
    # Only now: what this imports takes seconds.
    from simulator.compare_runs import compare, rounding_of

    for sentence in rounding_of(options):
        click.echo(sentence, err=True)
    return compare(options, tell)


def tell(result: Result, done: int, total: int, seconds: float) -> None:
    """One line on stderr for each run that is over."""
    summary = result.summary
    what = f"failed: {result.failure}" if summary is None else f"loss {loss_of(summary):.3f}"
    click.echo(f"{seconds:5.0f} s  {done}/{total}  {result.name}, seed {result.seed}: {what}", err=True)


def described(options: CompareOptions, rows: Sequence[Row]) -> str:
    rate = "unlimited bandwidth" if options.bandwidth_mbit is None else f"{options.bandwidth_mbit:g} Mbit/s"
    failed = [f"{row.preset}, {failure}" for row in rows for failure in row.failures]
    return "\n".join(
        (
            f"{options.model}, {counted(options.peers, 'peer')}, {counted(options.tokens, 'token')}, "
            f"{counted(options.seeds, 'seed')} from {options.seed}; {rate}, "
            f"{options.latency_ms:g} ms, {options.step_seconds:g} s a step",
            table(rows),
            *failed,
        )
    )


def write_csv(rows: Sequence[Row], file: Path) -> None:
    if file == STDOUT:
        click.echo(csv_text(rows), nl=False)
    else:
        file.write_text(csv_text(rows))
