"""`peer identity`: show, back up and restore the key that is a peer."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cli.arguments import ExistingPath
from cli.folder import claimed, home
from network.identity import InvalidIdentity, load
from network.seam import PeerID
from peer.options import IDENTITY_FILE

FolderOption = click.option(
    "--folder", type=ExistingPath(), metavar="DIR", help="The peer's folder. Default: the only one under ~/.peer."
)


@click.group(name="identity", short_help="Show, back up, restore the key that is a peer.", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Show the keys that are this machine's peers, back one up, or restore it.

    A peer is its key: whoever has the file is that peer, and whoever loses it becomes another one.

    \b
    Examples:
      peer identity
      peer identity backup /media/stick/peer.key --folder ~/.peer/join
      peer identity restore /media/stick/peer.key --folder ~/.peer/join
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(show, folder=None)


@command.command(name="show")
@FolderOption
def show(folder: Path | None) -> None:
    """Print the peer id of each identity on this machine, with its folder.

    \b
    Example:
      peer identity show --folder ~/.peer/join
    """
    found = identity_folders() if folder is None else [folder]
    if not found:
        click.echo(f"no identity under {home()} yet: the first `peer start` or `peer join` makes one", err=True)
    for each in found:
        try:
            click.echo(f"{peer_id_in(each)}  {each}")
        except InvalidIdentity as error:
            if folder is not None:
                raise
            click.echo(f"{error}", err=True)


@command.command(name="backup")
@click.argument("file", type=click.Path(path_type=Path))
@FolderOption
def backup(file: Path, folder: Path | None) -> None:
    """Copy the key to FILE, readable by you alone. Never overwrites.

    \b
    Example:
      peer identity backup ~/peer-backup.key
    """
    source = the_folder(folder)
    peer_id = copy_key(source / IDENTITY_FILE, file)
    click.echo(f"{peer_id}: copied to {file}; keep it where nobody else reads it")


@command.command(name="restore")
@click.argument("file", type=ExistingPath())
@click.option("--folder", required=True, type=click.Path(path_type=Path), metavar="DIR", help="The peer's folder.")
def restore(file: Path, folder: Path) -> None:
    """Put the key in FILE back into a peer's folder, which is made if it is not there. Never overwrites.

    \b
    Example:
      peer identity restore ~/peer-backup.key --folder ~/.peer/join
    """
    with claimed(folder, "restore"):
        peer_id = copy_key(file, folder / IDENTITY_FILE)
    click.echo(f"{peer_id}: restored to {folder}")


def identity_folders() -> list[Path]:
    """The folders under the default one that hold a key."""
    return sorted(path.parent for path in home().glob(f"*/{IDENTITY_FILE}"))


def the_folder(given: Path | None) -> Path:
    """The folder that is meant; raises `ValueError` if that is not clear."""
    if given is not None:
        return given
    found = identity_folders()
    if not found:
        raise FileNotFoundError(f"no identity under {home()}; name the peer's folder with --folder")
    if len(found) > 1:
        raise ValueError(f"several peers here: choose one with --folder {' or --folder '.join(map(str, found))}")
    return found[0]


def peer_id_in(folder: Path) -> PeerID:
    return load(folder / IDENTITY_FILE).peer_id


def copy_key(source: Path, target: Path) -> PeerID:
    """Copies a valid key file; raises `InvalidIdentity` for another, `ValueError` if the target is there."""
    identity = load(source)
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    except FileExistsError as error:
        raise ValueError(f"{target}: is there already, and no key is ever overwritten; move it away first") from error
    with open(descriptor, "wb") as file:
        file.write(source.read_bytes())
        file.flush()
        os.fsync(file.fileno())
    return identity.peer_id
