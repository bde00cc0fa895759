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

ROOT = Path(__file__).resolve().parent.parent
OBSERVER_SECONDS_MAX = 120.0
MEMBERS_SHOWN_MAX = 100
MISSING = (
    "`peer status` needs libp2p, which is not installed here: "
    "run `apt-get install gcc libgmp-dev python3-dev` (or your system's like), then `peer setup`"
)


@click.command(cls=Command, name="status", short_help="What a swarm is doing, asked from outside.")
@initial_peers_option(required=True, help="Peers of the swarm; one that answers is enough.")
@click.option("--run", metavar="NAME", help="Only the run of this name or id. Default: all runs of the swarm.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.pass_context
def command(ctx: click.Context, initial_peers: tuple[str, ...], run: str | None, as_json: bool) -> None:
    """Show the runs of a swarm, who takes part and how far they are, without taking part.

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


def show(swarm: Mapping[str, Any]) -> None:
    """The swarm for people."""
    from rich import print_json

    print_json(data=swarm)
