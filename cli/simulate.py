"""`peer simulate`: a whole swarm on this machine, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from cli import scenarios
from cli.arguments import STDOUT, Command, ExistingPath, Finite, OutputFile, Setting, data_option
from peer.errors import TrainingFailed
from peer.lines import counted
from simulator.options import PEERS_MAX, SimulateOptions, Summary

# Written out, for their own modules import torch, which takes seconds; a test holds them equal.
PRESETS = (
    "allreduce",
    "decoupled-diloco",
    "diloco",
    "distro",
    "muloco",
    "noloco",
    "sparseloco",
    "streaming-diloco",
)
MODELS = ("gpt-nano", "gpt-mini", "gpt-small")
ONLY_VIRTUAL = ("latency_ms", "bandwidth_mbit", "churn_rate")
DEFAULTS = SimulateOptions()
SEEDS_MAX = 1_000_000


@click.command(cls=Command, name="simulate", short_help="A whole swarm on this machine, and what came of it.")
@click.option("--peers", default=DEFAULTS.peers, type=click.IntRange(1, PEERS_MAX), metavar="N", help="How many peers.")
@click.option(
    "--rounds", default=DEFAULTS.rounds, type=click.IntRange(min=1), metavar="N", help="Stop after N committed rounds."
)
@click.option("--preset", default=DEFAULTS.preset, type=click.Choice(PRESETS), help="The training method.")
@click.option("--model", default=DEFAULTS.model, type=click.Choice(MODELS), help="The model to train.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    type=Setting(),
    metavar="KEY=VALUE...",
    help="Settings that differ from the preset's, such as inner_steps=10 or outer.lr=0.7.",
)
@data_option
@click.option("--seed", default=0, type=click.IntRange(0, 2**32 - 1), metavar="S", help="Of the weights and of chance.")
@click.option(
    "--kill-every",
    "kill_every_seconds",
    type=Finite(min=1),
    metavar="SECONDS",
    help="Kill a random peer this often, as with `kill -9`, and start it again.",
)
@click.option("--virtual", is_flag=True, help="One process on virtual time: faster, exactly repeatable, any network.")
@click.option("--latency", "latency_ms", type=Finite(min=0), metavar="MS", help="One way, every link; with --virtual.")
@click.option(
    "--bandwidth", "bandwidth_mbit", type=Finite(min=0.001), metavar="MBIT", help="Of every peer; with --virtual."
)
@click.option(
    "--parts",
    default=DEFAULTS.parts,
    type=click.IntRange(0, 256),
    metavar="P",
    help="For large swarms: P parts, each merged by its owner, so that downloads do not grow; 0: everyone gets all.",
)
@click.option(
    "--churn",
    "churn_rate",
    type=Finite(0, 1),
    metavar="RATE",
    help="The share of the peers that leave and come back in a round, 0 to 1; with --virtual.",
)
@click.option(
    "--scenario",
    "scenario_file",
    type=ExistingPath(),
    metavar="FILE",
    help="Run the swarm of toys and the faults that FILE describes (docs/SIMULATOR.md); with --virtual.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, SEEDS_MAX),
    metavar="N",
    help="Run N random scenarios, from that of --seed on, over all processors; with --virtual.",
)
@click.option(
    "--timeout",
    "timeout_seconds",
    default=DEFAULTS.timeout_seconds,
    type=Finite(min=1),
    metavar="SECONDS",
    help="Give up after so long.",
)
@click.option("--json", "json_file", type=OutputFile(), metavar="FILE", help="Write the summary as JSON; - is stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    settings: tuple[tuple[str, str], ...],
    virtual: bool,
    json_file: Path | None,
    scenario_file: Path | None,
    seeds: int | None,
    **values: object,
) -> None:
    """Train with a swarm on this machine: real processes that talk over loopback, or virtual ones.

    It ends with what the swarm did: the loss, whether all peers hold the same model bit for bit, and how many bytes
    they sent. Exits with 5 when the rounds did not all come, or the models differ (those of noloco may).

    \b
    Examples:
      peer simulate --peers 4 --rounds 10
      peer simulate --peers 4 --rounds 20 --kill-every 20 --json summary.json
      peer simulate --virtual --peers 50 --latency 80 --bandwidth 20 --churn 0.1
      peer simulate --preset sparseloco --set inner_steps=10 outer.lr=0.7
      peer simulate --virtual --seeds 100 --seed 1
    """
    if scenario_file is not None or seeds is not None:
        simulate_faults(ctx, scenario_file, seeds, json_file)
        return
    given = {name: value for name, value in values.items() if value is not None}
    for name in ONLY_VIRTUAL:
        if name in given and not virtual:
            raise click.UsageError(f"--{name.partition('_')[0]} is for --virtual: real processes share one loopback")
    options = SimulateOptions(settings=dict(settings), **given)  # type: ignore[arg-type]
    summary = simulated(options, virtual=virtual)
    click.echo(described(summary), err=json_file == STDOUT)
    if json_file is not None:
        write_json(summary.as_json(), json_file)
    if summary.rounds_committed < options.rounds:
        raise TrainingFailed(f"{summary.rounds_committed} of {options.rounds} rounds were committed")
    if not summary.fingerprints_equal and summary.mode == "consensus":
        raise TrainingFailed("the peers ended with different models")


def simulate_faults(ctx: click.Context, scenario_file: Path | None, seeds: int | None, json_file: Path | None) -> None:
    """One scenario from a file, or many random ones; raises `TrainingFailed` unless all held."""
    if not ctx.params["virtual"]:
        named = "--scenario" if scenario_file is not None else "--seeds"
        raise click.UsageError(f"{named} is for --virtual: only there faults can be made, and made again")
    if scenario_file is not None and seeds is not None:
        raise click.UsageError("--scenario and --seeds: one scenario from a file, or many random ones")
    if scenario_file is not None:
        summary = scenarios.simulate_scenario(ctx, scenario_file, json_file)
    else:
        assert seeds is not None
        summary = scenarios.simulate_seeds(ctx, ctx.params["seed"], seeds, json_file)
    if json_file is not None:
        write_json(summary, json_file)
    scenarios.fail_if(summary)


def simulated(options: SimulateOptions, *, virtual: bool) -> Summary:
    # Only now: what these import takes seconds.
    from cli.progress import shown

    with shown() as show:
        if virtual:
            from simulator.virtual import run_virtual_swarm

            return run_virtual_swarm(options, show)
        from simulator.local import run_local_swarm

        return run_local_swarm(options, show)


def write_json(value: object, file: Path) -> None:
    text = json.dumps(value, indent=2)
    if file == STDOUT:
        click.echo(text)
    else:
        file.write_text(f"{text}\n")


def described(summary: Summary) -> str:
    """The summary for people."""
    tokens = summary.tokens
    dense, sent = summary.dense_bytes_per_peer_per_round, summary.bytes_sent_per_peer_per_round
    times = f", {dense / sent:,.0f} times more" if sent > 0 else ""
    same = "the same bits at every peer" if summary.fingerprints_equal else "DIFFERENT between peers"
    if summary.replicas_apart is not None:
        same = f"one replica a peer, at most {summary.replicas_apart:.2%} of their norm apart"
    return "\n".join(
        (
            f"{counted(summary.rounds_committed, 'round')} committed by {counted(summary.peers, 'peer')} "
            f"in {summary.seconds:.1f} s "
            f"({summary.preset}, {summary.model} with {summary.parameters:,} parameters, seed {summary.seed})",
            f"loss     {summary.loss_first:.3f} at first, {summary.loss_last:.3f} at last",
            f"model    {same}",
            f"sent     {size(sent)} a peer and round, of which packets "
            f"{size(summary.packet_bytes_sent_per_peer_per_round)}; dense float32 every step: {size(dense)}{times}",
            f"tokens   {tokens.processed:,} processed, {tokens.merged:,} merged, {tokens.lost:,} lost",
            f"restarts {summary.restarts}",
        )
    )


def size(count: float) -> str:
    """Bytes, from 10,000 on in a larger unit."""
    units = [unit for unit, factor in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)) if count >= 10 * factor]
    return f"{count / 1000 ** len(units):,.1f} {units[-1]}" if units else f"{count:,.0f} B"
