"""`peer status`: what a swarm is doing, asked from outside."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cli.arguments import Command, initial_peers_option
from cli.exit_codes import ExitCode
from peer.errors import NetworkFailed
from peer.lines import counted

ROOT = Path(__file__).resolve().parent.parent
OBSERVER_SECONDS_MAX = 120.0
MEMBERS_SHOWN_MAX = 100
MISSING = (
    "`peer status` needs libp2p, which is not installed here: "
    "run `apt-get install gcc libgmp-dev python3-dev` (or your system's like), then `peer setup`"
)


@click.command(cls=Command, name="status", short_help="What a swarm is doing, asked from outside.")
@initial_peers_option(required=True, help="Peers of the swarm; one that answers is enough.")
@click.option("--run", metavar="NAME", help="The run of this name or id. Default: the one that most peers announce.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.pass_context
def command(ctx: click.Context, initial_peers: tuple[str, ...], run: str | None, as_json: bool) -> None:
    """Show a run of a swarm, who takes part and how far they are, without taking part.

    Exits with 3 when nobody answers and with 4 when there is no such run.

    \b
    Examples:
      peer status --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...
      peer status --initial-peers ADDR --run example --json
    """
    if importlib.util.find_spec("libp2p") is None:
        click.echo(f"peer: {MISSING}", err=True)
        ctx.exit(ExitCode.UNEXPECTED)
    # A process of its own: libp2p and hivemind cannot be imported into the same one.
    arguments = ["--initial-peers", *initial_peers, *(["--run", run] if run else []), "--json"]
    code, output = observed(arguments)
    if code != ExitCode.OK:
        ctx.exit(code if code in set(ExitCode) else ExitCode.UNEXPECTED)
    if as_json:
        click.echo(output.rstrip())
    else:
        show(json.loads(output))


def observed(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit code of the observer and what it printed; its complaints go to our own stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dht.observer", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=OBSERVER_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NetworkFailed(f"no answer within {OBSERVER_SECONDS_MAX:.0f} s") from error
    return done.returncode, done.stdout


def show(run: Mapping[str, Any]) -> None:
    """The observer's JSON for people."""
    # Only now: rich takes longer to import than everything else that `peer --help` needs.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    members = run["members"]
    training = sum(bool(member["trains"]) for member in members)
    console.print(Text(f"run {plain(run['name'])}  ({run['run_id']})"))
    console.print(Text(f"{counted(training, 'peer')} training, round {number(run['round'])}, loss {loss(run['loss'])}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("peer", "name", "round", "loss", "tokens", "reached", "heard until", "version"):
        table.add_column(title, justify="right" if title in ("round", "loss", "tokens") else "left")
    ahead = sorted(members, key=lambda member: (-member["round"], member["peer_id"]))
    for member in ahead[:MEMBERS_SHOWN_MAX]:
        table.add_row(*(Text(cell) for cell in row(member)))
    console.print(table)
    for line in notes(run, len(members) - MEMBERS_SHOWN_MAX):
        console.print(Text(line))


def row(member: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        member["peer_id"][-8:],
        plain(member["name"]),
        number(member["round"]),
        loss(member["loss"]),
        number(member["tokens"]),
        "directly" if member["reachable"] else "dials out only",
        f"in {member['expires_in_seconds']:.0f} s",
        plain(member["version"]),
    )


def notes(run: Mapping[str, Any], hidden: int) -> list[str]:
    """What is worth a line below the table."""
    lines = [f"and {hidden} more: see --json"] if hidden > 0 else []
    for other in run["other_runs"]:
        lines.append(f"also here: run {plain(other['name'])} ({other['run_id'][:12]}), see --run")
    for reason, count in sorted(run["refused_reasons"].items()):
        lines.append(f"{counted(count, 'record')} not believed: {plain(reason)}")
    return lines


def plain(text: str) -> str:
    """A stranger's text without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)


def number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
