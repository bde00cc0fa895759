"""`peer bootstrap`: an entry point that stays, and trains nothing."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import Command, initial_peers_option, listening_options
from cli.folder import claimed
from peer.options import BootstrapOptions


@click.command(cls=Command, name="bootstrap", short_help="Keep an entry point up that trains nothing.")
@listening_options
@initial_peers_option(required=False, help="Other entry points of the same swarm, so that they know each other.")
@click.option("--json-events", is_flag=True, help="Print one JSON object a line on stdout, for programs, not people.")
def command(
    host: str,
    port: int,
    announce: tuple[str, ...],
    folder: Path | None,
    initial_peers: tuple[str, ...],
    json_events: bool,
) -> None:
    """Keep an entry point up: a small process with a fixed address that introduces peers to each other.

    Any peer can be an entry point. A swarm needs this one only while no other address is known, and goes on training
    when it stops. Keep its folder: with it go its peer id and so the address that you have given to others.

    \b
    Example:
      peer bootstrap --port 31337
    """
    with claimed(folder, "bootstrap") as claimed_folder:
        options = BootstrapOptions(
            folder=claimed_folder,
            host=host,
            port=port,
            announce=announce,
            initial_peers=initial_peers,
            json_events=json_events,
        )
        from peer.bootstrap import run_bootstrap

        run_bootstrap(options)
