"""`peer join`: take part in a run that others have started."""

from __future__ import annotations

from pathlib import Path

import click

from cli.arguments import Command, initial_peers_option, listening_options, peer_options
from cli.folder import claimed
from peer.options import PeerOptions


@click.command(cls=Command, name="join", short_help="Take part in a run.")
@initial_peers_option(
    required=False,
    help="Peers of the swarm; one that answers is enough. Needed only the first time: later the remembered ones do.",
)
@click.option("--run", metavar="NAME", help="The run's name or id, where the swarm trains several.")
@click.option(
    "--rounds",
    "rounds_max",
    type=click.IntRange(min=1),
    metavar="N",
    help="Leave after N committed rounds. Default: stay until the run ends, or Ctrl+C.",
)
@listening_options
@peer_options
def command(
    initial_peers: tuple[str, ...],
    run: str | None,
    rounds_max: int | None,
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
    """Join a swarm: fetch its model, train, and share what was learned. The swarm says what to train and how.

    Ctrl+C leaves cleanly. The same command again, even without --initial-peers, goes on as the same peer.

    \b
    Examples:
      peer join --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...
      peer join --data ~/texts --device cuda --name "Anna's desktop" --rounds 100
    """
    with claimed(folder, "join") as claimed_folder:
        options = PeerOptions(
            folder=claimed_folder,
            run=run,
            initial_peers=initial_peers,
            host=host,
            port=port,
            announce=announce,
            data=data,
            device=device,
            precision=precision,
            micro_batch=micro_batch,
            name=name,
            rounds_max=rounds_max,
            linger_seconds=linger_seconds,
            json_events=json_events,
        )
        from peer.run import run_peer

        run_peer(options)
