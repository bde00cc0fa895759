"""One p2pd process: started in a session of its own, with every failure to start named; stopped for certain."""

from __future__ import annotations

import enum
import errno
import hashlib
import importlib.resources
import logging
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

logger = logging.getLogger(__name__)

_LINE_BYTES_MAX = 65536
_OUTPUT_LINES_KEPT = 20


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    """How the daemon is run, and how long each thing with it may take."""

    dial_seconds_max: float = 10.0
    start_seconds_max: float = 20.0
    """One attempt to start."""
    port_seconds_max: float = 1.0
    """At each attempt: for whoever listens on the port to let go, such as the daemon of a peer that was just killed."""
    start_attempts_max: int = 4
    backoff_seconds: float = 0.5
    """After a failed start; doubles each time, up to `backoff_seconds_max`."""
    backoff_seconds_max: float = 30.0
    restart_attempts_max: int = 20
    """Failed starts in a row after the daemon died; then the network fails."""
    close_seconds_max: float = 1.0
    """From the request to stop to the kill."""
    peers_introduced_max: int = 4096
    addresses_per_peer_max: int = 16
    routing_attempts_max: int = 10
    """Dials again, at intervals of 0.1 s, while the daemon has no one to ask for the way."""
    reconnect_peers_max: int = 32
    """Of the peers introduced last, dialled again after a restart of the daemon."""
    streams_served_max: int = 1024
    """Incoming streams at one time; more are closed at once."""
    map_nat_port: bool = True
    """Ask the router to forward the port; not done on loopback."""
    use_relays: bool = False
    """Become reachable through the initial peers when nobody can dial this peer."""
    announce: tuple[str, ...] = ()
    """Addresses to announce instead of those found, such as a router's with a forwarded port."""


class StartFailure(enum.Enum):
    """Why the network could not start."""

    PORT_TAKEN = "port taken"
    BINARY_MISSING = "binary missing"
    BOOTSTRAP_UNREACHABLE = "bootstrap unreachable"
    BAD_IDENTITY = "bad identity"
    BAD_ADDRESS = "bad address"
    SLOW_MACHINE = "slow machine"
    OTHER = "other"


_HINTS = {
    StartFailure.PORT_TAKEN: "another program or peer listens on this port: choose another one, or 0 for any",
    StartFailure.BINARY_MISSING: "hivemind's p2pd is missing or not made for this machine: install hivemind again",
    StartFailure.BOOTSTRAP_UNREACHABLE: "no initial peer answers: check their addresses and this machine's connection",
    StartFailure.BAD_IDENTITY: "the daemon cannot read the key file: restore it from a backup or move it away",
    StartFailure.BAD_ADDRESS: "no such address on this machine: listen on /ip4/0.0.0.0/tcp/PORT",
    StartFailure.SLOW_MACHINE: "the daemon did not start in time: the machine is too busy",
    StartFailure.OTHER: "see the daemon's last words above",
}
# Words of the daemon's last line, in the order in which they are looked for.
_SIGNS = (
    ("address already in use", StartFailure.PORT_TAKEN),
    ("failed to connect to bootstrap peers", StartFailure.BOOTSTRAP_UNREACHABLE),
    ("cannot assign requested address", StartFailure.BAD_ADDRESS),
    ("failed to parse multiaddr", StartFailure.BAD_ADDRESS),
    ("cannot parse invalid wire-format data", StartFailure.BAD_IDENTITY),
    ("permission denied", StartFailure.BAD_IDENTITY),
)
_HOPELESS = {StartFailure.BINARY_MISSING, StartFailure.BAD_IDENTITY, StartFailure.BAD_ADDRESS}


class NetworkStartError(Exception):
    """The network could not start: `cause` for programs, `hint` for people."""

    def __init__(self, cause: StartFailure, details: str) -> None:
        self.cause = cause
        self.hint = _HINTS[cause]
        super().__init__(f"the network could not start ({cause.value}: {details}); {self.hint}")

    @property
    def is_hopeless(self) -> bool:
        """Whether another attempt would fail in the same way."""
        return self.cause in _HOPELESS


@final
class Daemon:
    """A running p2pd, controlled through the unix socket `control`."""

    def __init__(self, process: Process, control: Path) -> None:
        self._process = process
        self.control = control
        self.process_id = process.pid
        self.died = anyio.Event()

    async def watch(self) -> None:
        """Set `died` when the process has ended."""
        await self._process.wait()
        self.died.set()

    async def stop(self, seconds_max: float) -> None:
        """Ask the process to end, kill it after `seconds_max`, and remove its socket; never fails, never hangs."""
        with anyio.CancelScope(shield=True):
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.terminate()
                with anyio.move_on_after(seconds_max):
                    await self._process.wait()
            await self._process.aclose()  # Kills it, if it still runs.
            self.control.unlink(missing_ok=True)


async def start_daemon(
    tasks: TaskGroup, identity_path: Path, listen: str, initial_peers: Sequence[str], config: DaemonConfig
) -> Daemon:
    """One attempt; the daemon's output is read by `tasks`. Raises `NetworkStartError`."""
    await _wait_port(listen, config.port_seconds_max)
    control = socket_path(identity_path, "control")
    try:
        command = [str(_find_binary()), *_arguments(control, identity_path, listen, initial_peers, config)]
        # Shielded, for a cancelled start would leave a process that nobody waits for. A session of its own: Ctrl+C in
        # a terminal reaches us alone, so that we can still take leave through the daemon.
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(command, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        raise NetworkStartError(StartFailure.BINARY_MISSING, str(error)) from error
    daemon = Daemon(process, control)
    started = False
    try:
        assert process.stdout is not None
        output = BufferedByteReceiveStream(process.stdout)
        with anyio.move_on_after(config.start_seconds_max):
            await _wait_ready(output)
            started = True
        if not started:
            raise NetworkStartError(StartFailure.SLOW_MACHINE, f"not ready after {config.start_seconds_max} s")
    finally:
        if not started:
            await daemon.stop(config.close_seconds_max)
    tasks.start_soon(_log_output, output)
    tasks.start_soon(daemon.watch)
    return daemon


def socket_prefix(identity_path: Path) -> str:
    """How the names of all sockets of one peer begin, through all its processes: what a killed one left is known."""
    tag = hashlib.sha256(os.fsencode(identity_path.resolve())).hexdigest()[:8]
    return str(Path(tempfile.gettempdir()) / f"p2pd-{tag}-")


def socket_path(identity_path: Path, kind: str) -> Path:
    """A new name; short, for a socket's path has about 100 bytes at most."""
    return Path(f"{socket_prefix(identity_path)}{kind}-{secrets.token_hex(4)}.sock")


def choose_port(listen: str) -> str:
    """`listen` with a free port in the place of port 0, so that the daemon gets the same one when it starts again."""
    if not listen.endswith("/tcp/0"):
        return listen
    _, kind, host, *_ = listen.split("/")
    with socket.socket(socket.AF_INET6 if kind == "ip6" else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise NetworkStartError(StartFailure.BAD_ADDRESS, f"{listen}: {error}") from error
        return f"{listen[:-1]}{probe.getsockname()[1]}"


async def _wait_port(listen: str, seconds_max: float) -> None:
    """Until nobody listens on the port: the daemon would share it with another one, and get half of the dials to it."""
    with anyio.move_on_after(seconds_max):
        while _is_taken(listen):  # noqa: ASYNC110
            await anyio.sleep(0.1)
    if _is_taken(listen):
        raise NetworkStartError(StartFailure.PORT_TAKEN, listen)


def _is_taken(listen: str) -> bool:
    _, kind, host, _, port, *_ = listen.split("/")
    with socket.socket(socket.AF_INET6 if kind == "ip6" else socket.AF_INET) as probe:
        # Connections that have just ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def _find_binary() -> Path:
    binary = Path(str(importlib.resources.files("hivemind.hivemind_cli") / "p2pd"))
    if not binary.exists():
        raise FileNotFoundError(f"{binary} does not exist")
    return binary


def _arguments(
    control: Path, identity_path: Path, listen: str, initial_peers: Sequence[str], config: DaemonConfig
) -> list[str]:
    in_the_open = not is_loopback(listen)
    arguments = [
        f"-listen=/unix{control}",
        f"-id={identity_path}",
        f"-hostAddrs={listen}",
        "-dhtServer=1",
        "-connManager=1",
        "-tls=1",
        "-relay=1",
        "-idleTimeout=30s",  # It ends by itself if we die before we have a persistent connection to it.
        f"-autonat={int(in_the_open)}",
        f"-natPortMap={int(in_the_open and config.map_nat_port)}",
        f"-autoRelay={int(config.use_relays)}",
    ]
    if config.announce:
        # Announced without the peer id, which the daemon appends itself.
        arguments.append(f"-announceAddrs={','.join(a.partition('/p2p/')[0] for a in config.announce)}")
    if initial_peers:
        arguments += ["-b=1", f"-bootstrapPeers={','.join(initial_peers)}"]
    return arguments


async def _wait_ready(output: BufferedByteReceiveStream) -> None:
    lines: list[str] = []
    try:
        while True:
            lines.append(await _receive_line(output))
            if lines[-1].startswith("Peer ID:"):
                return
            del lines[:-_OUTPUT_LINES_KEPT]
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError) as error:
        last = next((line for line in reversed(lines) if line), "it said nothing")
        cause = next((cause for sign, cause in _SIGNS if any(sign in line for line in lines)), StartFailure.OTHER)
        raise NetworkStartError(cause, last) from error


async def _log_output(output: BufferedByteReceiveStream) -> None:
    """Read on, or the daemon would block on a full pipe."""
    try:
        while True:
            logger.debug("p2pd: %s", await _receive_line(output))
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass  # The daemon has ended; whoever watches it knows.


async def _receive_line(output: BufferedByteReceiveStream) -> str:
    try:
        return (await output.receive_until(b"\n", _LINE_BYTES_MAX)).decode(errors="replace").strip()
    except anyio.DelimiterNotFound:
        await output.receive(_LINE_BYTES_MAX)
        return "(a line of excessive length)"
