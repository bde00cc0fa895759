"""`peer start RUN.toml`: begin a run that others can join, or go on with it."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import Command, ExistingPath, initial_peers_option, listening_options, peer_options
from cli.folder import claimed
from peer.options import PeerOptions


@click.command(cls=Command, name="start", short_help="Begin a run that others can join.")
@click.argument("spec_file", metavar="RUN.toml", type=ExistingPath())
@initial_peers_option(required=False, help="Entry points of the swarm, if there are some already. Others join anyway.")
@listening_options
@peer_options
def command(
    spec_file: Path,
    initial_peers: tuple[str, ...],
    host: str,
    port: int,
    announce: tuple[str, ...],
    folder: Path | None,
    data: tuple[Path, ...],
    device: str,
    precision: str,
    micro_batch: int,
    name: str,
    linger_seconds: float,
    json_events: bool,
) -> None:
    """Start the run that RUN.toml describes, train in it, and print the line with which others join.

    Whoever starts a run is a peer like any other: once others have joined, it may stop. Started again from the same
    folder it goes on where the swarm is. RUN.toml stands before the options; examples/run.toml explains every line.

    \b
    Examples:
      peer start examples/run.toml
      peer start run.toml --port 31337 --announce /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...
    """
    with claimed(folder, f"start-{spec_file.stem}") as claimed_folder:
        options = PeerOptions(
            folder=claimed_folder,
            spec_file=spec_file,
            initial_peers=initial_peers,
            linger_seconds=linger_seconds,
            host=host,
            port=port,
            announce=announce,
            data=data,
            device=device,
            precision=precision,
            micro_batch=micro_batch,
            name=name,
            json_events=json_events,
        )
        from peer.run import run_peer

        run_peer(options)
