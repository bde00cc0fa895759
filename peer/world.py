"""What every real peer stands in: its daemon, its DHT node, its signals, and how it ends."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import anyio
from anyio.abc import TaskStatus

from averaging.journal import DamagedJournal
from averaging.storage import DamagedStorage
from dht.hivemind_directory import DirectoryUnavailable, HivemindDirectory, HivemindDirectoryConfig, open_directory
from dht.validator import SignedRecordValidator
from network.daemon import DaemonConfig, HivemindNetwork, NetworkStartError, StartFailure, open_network
from network.daemon_process import is_loopback
from network.identity import load_or_create
from network.seam import PeerID
from peer.errors import NetworkFailed, TrainingFailed, TwinFound
from peer.lines import emit, say
from peer.options import IDENTITY_FILE, BootstrapOptions, PeerOptions

log = logging.getLogger(__name__)

PORT_FILE = "port"


@final
@dataclass(frozen=True, slots=True)
class World:
    """The network and the directory of a real peer."""

    network: HivemindNetwork
    directory: HivemindDirectory


@asynccontextmanager
async def open_world(
    options: PeerOptions | BootstrapOptions, entries: tuple[str, ...], *, alone_is_fine: bool
) -> AsyncIterator[World]:
    """The daemon and the DHT node, joined to the swarm if any of `entries` answers.

    Raises `NetworkStartError` or `DirectoryUnavailable` if none does, unless `alone_is_fine`: others may come later.
    """
    load_or_create(options.folder / IDENTITY_FILE)
    directory_config = HivemindDirectoryConfig(must_join=not alone_is_fine)
    async with AsyncExitStack() as stack:
        network = await stack.enter_async_context(_open_network(options, entries, alone_is_fine))
        validator = SignedRecordValidator(time.time)
        directory = await stack.enter_async_context(
            open_directory(network.p2p, entries, validator=validator, config=directory_config)
        )

        async def rejoin() -> None:
            await directory.restart(network.p2p)

        network.on_restart(rejoin)
        for address in entries:
            network.introduce(peer_of(address), [address])
        yield World(network, directory)


@asynccontextmanager
async def _open_network(
    options: PeerOptions | BootstrapOptions, entries: tuple[str, ...], alone_is_fine: bool
) -> AsyncIterator[HivemindNetwork]:
    """The daemon, on the port of the last time unless the user names one: so that remembered addresses stay true."""
    kept = options.folder / PORT_FILE
    port = options.port or _kept_port(kept)
    while True:
        listen = f"/ip{'6' if ':' in options.host else '4'}/{options.host}/tcp/{port}"
        daemon = DaemonConfig(announce=options.announce, map_nat_port=not is_loopback(listen))
        async with AsyncExitStack() as stack:
            try:
                opened = open_network(options.folder / IDENTITY_FILE, listen, entries, daemon)
                network = await stack.enter_async_context(opened)
            except NetworkStartError as error:
                if error.cause is StartFailure.PORT_TAKEN and port != options.port:
                    port = 0
                elif error.cause is StartFailure.BOOTSTRAP_UNREACHABLE and alone_is_fine and entries:
                    entries = ()
                else:
                    raise
                log.info("%s; trying otherwise", error)
                continue
            kept.write_text(str(port_of(network.listen)))
            yield network
            return


def _kept_port(path: Path) -> int:
    """That of the last time; 0, for any free one, if there was none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def peer_of(address: str) -> PeerID:
    """The peer id at the end of a multiaddress that `check_address` accepted."""
    return PeerID(address.rpartition("/")[2])


def port_of(listen: str) -> int:
    return int(listen.rpartition("/tcp/")[2])


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
    if isinstance(error, (DamagedJournal, DamagedStorage, TwinFound)):
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
