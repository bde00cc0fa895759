"""The real network: streams through hivemind's go-libp2p daemon (p2pd), which is started again when it dies."""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast, final

import anyio
from anyio.abc import ByteStream, SocketStream, TaskGroup
from hivemind.p2p import P2P, P2PDaemonError
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from network import daemon_control as control
from network.background import open_background, run_handler
from network.daemon_control import DaemonError, DaemonGone, UnixStream
from network.daemon_process import (
    Daemon,
    DaemonConfig,
    NetworkStartError,
    StartFailure,
    choose_port,
    is_loopback,
    socket_path,
    socket_prefix,
    start_daemon,
)
from network.end_mark import EndMarkedStream
from network.seam import Handler, Network, PeerID, PeerUnreachable

__all__ = ["DaemonConfig", "HivemindNetwork", "NetworkStartError", "StartFailure", "open_network"]

logger = logging.getLogger(__name__)

_NO_ROUTES = "failed to find any peer in table"
_ROUTING_SECONDS = 0.1
_STALE_SECONDS = 60.0

OnRestart = Callable[[], Awaitable[None]]


@asynccontextmanager
async def open_network(
    identity_path: Path, listen: str, initial_peers: Sequence[str] = (), config: DaemonConfig | None = None
) -> AsyncIterator[HivemindNetwork]:
    """This peer's network, with the Ed25519 key file at `identity_path` (see `network.identity`).

    `listen` is one TCP multiaddress, `/ip4/0.0.0.0/tcp/PORT` for the world; port 0 takes a free one and keeps it.
    Raises `NetworkStartError`, then or later, when the daemon cannot be started (again).
    """
    config = config or DaemonConfig()
    _quieten_hivemind()
    _remove_stale_sockets(identity_path)
    async with open_background() as tasks:
        network = HivemindNetwork(tasks, identity_path, choose_port(listen), tuple(initial_peers), config)
        listener = await anyio.create_unix_listener(network.listener_path)
        try:
            tasks.start_soon(listener.serve, network.accept, tasks)
            await network.start(config.start_attempts_max)
            tasks.start_soon(network.keep_running)
            yield network
        finally:
            tasks.cancel_scope.cancel()  # First, or the end of the daemon would be taken for its death.
            with anyio.CancelScope(shield=True):
                await network.stop()
                await listener.aclose()
                network.listener_path.unlink(missing_ok=True)
                _remove_stale_sockets(identity_path)


@final
class HivemindNetwork(Network):
    """Made by `open_network`."""

    def __init__(
        self, tasks: TaskGroup, identity_path: Path, listen: str, initial_peers: tuple[str, ...], config: DaemonConfig
    ) -> None:
        self.listener_path = socket_path(identity_path, "streams")
        self._tasks = tasks
        self._identity_path = identity_path
        self._listen = listen
        self._initial_peers = initial_peers
        self._config = config
        self._daemon: Daemon | None = None
        self._p2p: Any = None
        self._up = anyio.Event()
        self._peer_id = PeerID("")
        self._handlers: dict[str, Handler] = {}
        self._hints: OrderedDict[PeerID, tuple[str, ...]] = OrderedDict()
        self._hints_to_try: set[PeerID] = set()
        self._on_restart: list[OnRestart] = []
        self._num_served = 0

    @property
    def peer_id(self) -> PeerID:
        return self._peer_id

    @property
    def p2p(self) -> Any:
        """The live `hivemind.p2p.P2P`, another one after each restart of the daemon: see `on_restart`."""
        assert self._p2p is not None, "the network is not open"
        return self._p2p

    @property
    def listen(self) -> str:
        """The multiaddress listened on, with the port that was chosen."""
        return self._listen

    @property
    def process_id(self) -> int:
        """The daemon's, at present."""
        assert self._daemon is not None, "the network is not open"
        return self._daemon.process_id

    def on_restart(self, callback: OnRestart) -> None:
        """Await `callback` each time the daemon was started again, with the new `p2p` in place, in order of adding."""
        self._on_restart.append(callback)

    async def open_stream(self, peer: PeerID, protocol: str) -> ByteStream:
        try:
            with anyio.fail_after(self._config.dial_seconds_max):
                while True:
                    await self._up.wait()
                    assert self._daemon is not None
                    try:
                        return await self._dial(peer, protocol)
                    except DaemonGone:
                        await self._daemon.died.wait()
        except TimeoutError as error:
            raise PeerUnreachable(f"{peer} did not answer within {self._config.dial_seconds_max} s") from error
        except (DaemonError, ValueError) as error:
            raise PeerUnreachable(f"{peer} cannot be reached: {error}") from error

    async def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler
        if self._daemon is not None and self._up.is_set():
            try:
                await control.register(self._daemon.control, protocol, self.listener_path)
            except DaemonError:
                logger.info("the daemon is away; %s is served when it is back", protocol)

    def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        if peer == self._peer_id or not addresses:
            return
        self._hints[peer] = tuple(addresses[: self._config.addresses_per_peer_max])
        self._hints.move_to_end(peer)
        self._hints_to_try.add(peer)
        while len(self._hints) > self._config.peers_introduced_max:
            oldest, _ = self._hints.popitem(last=False)
            self._hints_to_try.discard(oldest)

    async def addresses(self) -> list[str]:
        """Those that other machines can dial, else those on loopback; empty while the daemon is away."""
        try:
            with anyio.fail_after(self._config.dial_seconds_max):
                await self._up.wait()
                assert self._daemon is not None
                _, addresses = await control.identify(self._daemon.control)
        except (DaemonError, TimeoutError):
            return []
        outside = [address for address in addresses if not is_loopback(address)]
        return [f"{address}/p2p/{self._peer_id}" for address in outside or addresses]

    async def start(self, attempts_max: int) -> None:
        """Start the daemon, trying again for as long as it makes sense; raises `NetworkStartError`."""
        initial_peers = self._initial_peers
        for attempt in range(attempts_max):
            try:
                await self._start_once(initial_peers)
                return
            except NetworkStartError as error:
                if error.is_hopeless or attempt + 1 == attempts_max:
                    raise
                logger.info("%s; trying again", error)
                if self._peer_id and error.cause is StartFailure.BOOTSTRAP_UNREACHABLE:
                    initial_peers = ()  # We were in the swarm before: better to wait inside than to fail outside.
            await anyio.sleep(min(self._config.backoff_seconds * 2**attempt, self._config.backoff_seconds_max))

    async def keep_running(self) -> None:
        """Start the daemon again each time it dies."""
        while True:
            assert self._daemon is not None
            await self._daemon.died.wait()
            logger.warning("the network daemon (process %d) died; starting it again", self._daemon.process_id)
            self._up = anyio.Event()
            await self._release()
            await self.start(self._config.restart_attempts_max)
            logger.warning("the network daemon is back (process %d)", self._daemon.process_id)
            self._tasks.start_soon(self._reconnect)
            for callback in self._on_restart:
                await callback()

    async def stop(self) -> None:
        self._up = anyio.Event()
        await self._release()

    async def accept(self, connection: SocketStream) -> None:
        """Serve one stream that the daemon hands over."""
        stream = UnixStream(connection)
        if self._num_served >= self._config.streams_served_max:
            await stream.aclose()
            return
        self._num_served += 1
        try:
            peer, protocol = await control.accept(stream)
            marked = EndMarkedStream(stream, self._config.close_seconds_max)
            await run_handler(self._handlers[protocol], peer, marked)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            logger.info("the daemon took back a stream")
        finally:
            self._num_served -= 1
            await stream.aclose()

    async def _start_once(self, initial_peers: Sequence[str]) -> None:
        daemon = await start_daemon(self._tasks, self._identity_path, self._listen, initial_peers, self._config)
        self._daemon = daemon
        try:
            with anyio.fail_after(self._config.start_seconds_max):
                client = _client_class(self._identity_path)
                self._p2p = await client.replicate(Multiaddr(f"/unix{daemon.control}"))
                self._peer_id, _ = await control.identify(daemon.control)
                for protocol in self._handlers:
                    await control.register(daemon.control, protocol, self.listener_path)
        except TimeoutError as error:
            await self._release()
            raise NetworkStartError(StartFailure.SLOW_MACHINE, "the daemon does not answer") from error
        except (DaemonError, P2PDaemonError, EOFError, OSError) as error:
            await self._release()
            raise NetworkStartError(StartFailure.OTHER, f"the daemon failed at once: {error}") from error
        self._hints_to_try.update(self._hints)
        self._up.set()

    async def _release(self) -> None:
        if self._p2p is not None:
            await self._p2p.shutdown()
            await anyio.lowlevel.checkpoint()
        if self._daemon is not None:
            await self._daemon.stop(self._config.close_seconds_max)

    async def _dial(self, peer: PeerID, protocol: str) -> ByteStream:
        assert self._daemon is not None
        daemon = self._daemon.control
        if peer in self._hints_to_try:
            await self._try_hints(daemon, peer)
        opened = False
        try:
            stream = await self._open_routed(daemon, peer, protocol)
            opened = True
            return EndMarkedStream(stream, self._config.close_seconds_max)
        finally:
            if not opened and peer in self._hints:
                self._hints_to_try.add(peer)

    async def _open_routed(self, daemon: Path, peer: PeerID, protocol: str) -> UnixStream:
        """A newcomer's daemon knows nobody to ask for the way until a moment after its first connection."""
        for _ in range(self._config.routing_attempts_max if self._initial_peers else 0):
            try:
                return await control.open_stream(daemon, peer, protocol)
            except DaemonError as error:
                if _NO_ROUTES not in str(error):
                    raise
            await anyio.sleep(_ROUTING_SECONDS)
        return await control.open_stream(daemon, peer, protocol)

    async def _try_hints(self, daemon: Path, peer: PeerID) -> None:
        """Connect to `peer` where it was said to be, if it is there."""
        hints = self._hints.get(peer, ())
        # Half of the time, so that wrong hints leave enough for what the daemon may know by itself.
        with anyio.move_on_after(self._config.dial_seconds_max / 2):
            try:
                await control.connect(daemon, peer, hints)
            except (DaemonError, ValueError) as error:
                logger.debug("the hints for %s do not help: %s", peer, error)
        if self._hints.get(peer, ()) is hints:  # Only now: dials at the same time have to wait for it too.
            self._hints_to_try.discard(peer)

    async def _reconnect(self) -> None:
        """Dial the peers introduced last: those that missed us refuse to dial us for the next seconds."""
        assert self._daemon is not None
        async with anyio.create_task_group() as tasks:
            for peer in list(self._hints)[-self._config.reconnect_peers_max :]:
                tasks.start_soon(self._try_hints, self._daemon.control, peer)


def _quieten_hivemind() -> None:
    """hivemind prints by a handler of its own: let its warnings go the way of all others."""
    cast(Any, use_hivemind_log_handler)("nowhere")
    logging.getLogger("hivemind").setLevel(logging.WARNING)


def _client_class(identity_path: Path) -> Any:
    """hivemind's client, whose socket then bears this peer's name: else nobody would know what a killed one left."""
    return type("Client", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{socket_prefix(identity_path)}"})


def _remove_stale_sockets(identity_path: Path) -> None:
    """Remove what killed processes left: of this peer all; of others what is old, for it may just not listen yet."""
    own = Path(socket_prefix(identity_path)).name
    for path in Path(tempfile.gettempdir()).glob("p2pd-*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if path.name.startswith(own) or time.time() - path.stat().st_mtime > _STALE_SECONDS:
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
