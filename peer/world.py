"""What every real peer stands in: its daemon, its DHT node, its signals, and how it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import final

import anyio
from anyio.abc import TaskStatus

from averaging.journal import DamagedJournal
from dht.hivemind_directory import DirectoryUnavailable, HivemindDirectory, HivemindDirectoryConfig, open_directory
from dht.validator import SignedRecordValidator
from network.daemon import DaemonConfig, HivemindNetwork, NetworkStartError, open_network
from network.daemon_process import is_loopback
from network.identity import load_or_create
from peer.errors import NetworkFailed, TrainingFailed, TwinFound
from peer.lines import emit, say
from peer.options import IDENTITY_FILE, BootstrapOptions, PeerOptions


@final
@dataclass(frozen=True, slots=True)
class World:
    """The network and the directory of a real peer."""

    network: HivemindNetwork
    directory: HivemindDirectory


@asynccontextmanager
async def open_world(options: PeerOptions | BootstrapOptions, entries: tuple[str, ...]) -> AsyncIterator[World]:
    """The daemon and the DHT node, joined to the swarm if any of `entries` answers."""
    listen = f"/ip{'6' if ':' in options.host else '4'}/{options.host}/tcp/{options.port}"
    daemon = DaemonConfig(announce=options.announce, map_nat_port=not is_loopback(listen))
    # A peer that comes back may find nobody: it then waits for others to find it.
    alone_is_fine = isinstance(options, BootstrapOptions) or options.spec_file is not None
    directory_config = HivemindDirectoryConfig(must_join=not alone_is_fine)
    load_or_create(options.folder / IDENTITY_FILE)
    async with (
        open_network(options.folder / IDENTITY_FILE, listen, entries, daemon) as network,
        open_directory(
            network.p2p, entries, validator=SignedRecordValidator(time.time), config=directory_config
        ) as directory,
    ):

        async def rejoin() -> None:
            await directory.restart(network.p2p)

        network.on_restart(rejoin)
        yield World(network, directory)


def run_to_the_end(main: Callable[[], Awaitable[None]]) -> None:
    """Runs an asynchronous main function; what it raises comes out as one of `peer.errors` where that fits."""
    try:
        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
    except BaseException as error:
        cause = _plainest(error)
        if cause is error:
            raise
        raise cause from error


def _plainest(error: BaseException) -> BaseException:
    """The first cause inside nested groups, translated."""
    inner = getattr(error, "exceptions", None)
    if inner:
        return _plainest(inner[0])
    if isinstance(error, (NetworkStartError, DirectoryUnavailable)):
        return NetworkFailed(str(error))
    if isinstance(error, (DamagedJournal, TwinFound)):
        return TrainingFailed(str(error))
    return error


async def watch_signals(leave: Callable[[], object], *, task_status: TaskStatus[None]) -> None:
    """The first SIGINT or SIGTERM leaves cleanly, the second ends the process at once (the daemon follows)."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        count = 0
        async for _ in signals:
            count += 1
            if count > 1:
                os._exit(130)
            leave()


def print_join_line(as_json: bool, addresses: list[str], run: str | None) -> None:
    if as_json:
        emit({"event": "Listening", "addresses": addresses, "run": run})
        return
    if run is not None:
        say(f"run {run}")
    if not addresses:
        say("nobody can dial this peer from outside; it takes part by dialling others")
        return
    say(f"to join from another machine:\n  bin/peer join --initial-peers {addresses[0]}")
    if is_loopback(addresses[0]):
        say("  (this address works on this machine only; listen with --host 0.0.0.0 for others)")
