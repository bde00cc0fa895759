"""The real network outlives its daemon, the daemon never outlives it, and failures to start are named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from network.daemon import DaemonConfig, HivemindNetwork, NetworkStartError, StartFailure, open_network
from network.daemon_process import socket_path
from network.identity import load_or_create
from network.seam import PeerID
from network.traffic import Traffic, TrafficMeter

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
CONFIG = DaemonConfig(dial_seconds_max=3, start_attempts_max=1, restart_attempts_max=3, backoff_seconds=0.1)
SECONDS_MAX = 60.0


def run(program: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(SECONDS_MAX):
            await program()

    anyio.run(main)


@asynccontextmanager
async def open_peer(key: Path, initial_peers: list[str] | None = None) -> AsyncIterator[HivemindNetwork]:
    load_or_create(key)
    async with open_network(key, LOOPBACK, initial_peers or [], CONFIG) as network:
        await network.serve("/echo/1", echo)
        yield network


async def echo(peer: PeerID, stream: ByteStream) -> None:
    async for part in stream:
        await stream.send(part)


async def check_echo(source: HivemindNetwork, target: PeerID, data: bytes = b"hello") -> None:
    async with await source.open_stream(target, "/echo/1") as stream:
        await stream.send(data)
        await stream.send_eof()
        assert b"".join([part async for part in stream]) == data


async def wait_restarted(network: HivemindNetwork, kill: signal.Signals = signal.SIGKILL) -> None:
    back = anyio.Event()

    async def notice() -> None:
        back.set()

    network.on_restart(notice)
    os.kill(network.process_id, kill)
    await back.wait()


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_daemon_comes_back_with_the_same_id_address_and_handlers(tmp_path: Path) -> None:
    async def program() -> None:
        async with open_peer(tmp_path / "a") as a, open_peer(tmp_path / "b") as b:
            b.introduce(a.peer_id, await a.addresses())
            await check_echo(b, a.peer_id)
            before = (a.peer_id, await a.addresses())
            process_id, p2p = a.process_id, a.p2p
            await wait_restarted(a)
            assert (a.peer_id, await a.addresses()) == before
            assert a.process_id != process_id
            assert a.p2p is not p2p
            assert a.p2p.peer_id.to_base58() == a.peer_id == load_or_create(tmp_path / "a").peer_id
            # b's daemon may have tried to reach a's in vain, and then refuses for seconds to dial it: a dials first.
            a.introduce(b.peer_id, await b.addresses())
            await check_echo(a, b.peer_id)
            await check_echo(b, a.peer_id)

    run(program)


def test_who_dials_while_its_daemon_is_away_waits_for_it(tmp_path: Path) -> None:
    async def program() -> None:
        async with open_peer(tmp_path / "a") as a, open_peer(tmp_path / "b") as b:
            b.introduce(a.peer_id, await a.addresses())
            os.kill(b.process_id, signal.SIGKILL)
            await check_echo(b, a.peer_id)

    run(program)


def test_a_daemon_comes_back_though_its_initial_peers_are_gone(tmp_path: Path) -> None:
    async def program() -> None:
        initial_peers: list[str] = []
        a_is_up, a_may_leave, a_is_gone = anyio.Event(), anyio.Event(), anyio.Event()

        async def a_lives() -> None:
            async with open_peer(tmp_path / "a") as a:
                initial_peers.extend(await a.addresses())
                a_is_up.set()
                await a_may_leave.wait()
            a_is_gone.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a_lives)
            await a_is_up.wait()
            async with open_peer(tmp_path / "b", initial_peers) as b:
                a_may_leave.set()
                await a_is_gone.wait()
                await wait_restarted(b)
                async with open_peer(tmp_path / "c", await b.addresses()) as c:
                    await check_echo(c, b.peer_id)

    run(program)


def test_a_peer_is_found_by_its_id_through_a_common_acquaintance(tmp_path: Path) -> None:
    async def program() -> None:
        async with (
            open_peer(tmp_path / "a") as a,
            open_peer(tmp_path / "b", await a.addresses()) as b,
            open_peer(tmp_path / "c", await a.addresses()) as c,
        ):
            await check_echo(c, b.peer_id)
            await check_echo(c, a.peer_id)

    run(program)


def test_leaving_ends_the_daemon_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))

    async def program() -> None:
        async with open_peer(tmp_path / "a") as a:
            process_id = a.process_id
            assert is_running(process_id)
            assert len(list(sockets.iterdir())) == 2
        assert not is_running(process_id)

    run(program)
    assert list(sockets.iterdir()) == []


def test_what_killed_peers_left_is_removed_and_what_lives_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stale, young, alive = (tmp_path / f"p2pd-streams-{name}.sock" for name in ("stale", "young", "alive"))

    async def program() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(alive))
            listener.listen()
            for path in (stale, young):
                with socket.socket(socket.AF_UNIX) as dead:
                    dead.bind(str(path))
            for path in (stale, alive):
                os.utime(path, (0, 0))
            async with open_peer(tmp_path / "a"):
                assert [path.exists() for path in (stale, young, alive)] == [False, True, True]

    run(program)


def test_what_a_peer_left_when_it_was_killed_is_removed_however_young(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    key = tmp_path / "a"
    own, of_another = socket_path(key, "streams"), socket_path(tmp_path / "b", "streams")
    assert own != socket_path(key, "streams"), "each process has a name of its own"
    for path in (own, of_another):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))

    async def program() -> None:
        async with open_peer(key):
            assert [path.exists() for path in (own, of_another)] == [False, True]

    run(program)


def test_an_error_in_the_body_passes_unwrapped(tmp_path: Path) -> None:
    async def program() -> None:
        with pytest.raises(LookupError):
            async with open_peer(tmp_path / "a"):
                raise LookupError

    run(program)


def test_the_terminals_interrupt_does_not_reach_the_daemon(tmp_path: Path) -> None:
    async def program() -> None:
        async with open_peer(tmp_path / "a") as a:
            assert os.getpgid(a.process_id) == a.process_id
            assert os.getsid(a.process_id) != os.getsid(0)

    run(program)


PARENT = """
import sys, anyio
from pathlib import Path
from network.daemon import open_network

async def main() -> None:
    async with open_network(Path(sys.argv[1]), "/ip4/127.0.0.1/tcp/0") as network:
        print(network.process_id, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


def test_the_daemon_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    load_or_create(tmp_path / "a")

    async def program() -> None:
        command = [sys.executable, "-W", "ignore", "-c", PARENT, str(tmp_path / "a")]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
        async with await anyio.open_process(command, stderr=subprocess.DEVNULL, env=environment) as parent:
            assert parent.stdout is not None
            daemon = int(await parent.stdout.receive())
            assert is_running(daemon)
            parent.kill()
            await parent.wait()
            while is_running(daemon):
                await anyio.lowlevel.checkpoint()

    run(program)


@pytest.mark.parametrize(
    ("listen", "initial_peers", "cause"),
    [
        ("/ip4/127.0.0.1/tcp/{taken}", [], StartFailure.PORT_TAKEN),
        ("/ip4/192.0.2.1/tcp/0", [], StartFailure.BAD_ADDRESS),
        ("/ip4/192.0.2.1/tcp/4001", [], StartFailure.BAD_ADDRESS),
        (LOOPBACK, ["/ip4/127.0.0.1/tcp/1/p2p/{stranger}"], StartFailure.BOOTSTRAP_UNREACHABLE),
    ],
)
def test_a_failure_to_start_is_named(
    tmp_path: Path, listen: str, initial_peers: list[str], cause: StartFailure
) -> None:
    load_or_create(tmp_path / "a")
    stranger = load_or_create(tmp_path / "stranger").peer_id

    async def program() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            address = listen.format(taken=other.getsockname()[1])
            peers = [peer.format(stranger=stranger) for peer in initial_peers]
            with pytest.raises(NetworkStartError) as caught:
                async with open_network(tmp_path / "a", address, peers, CONFIG):
                    pass
        assert caught.value.cause is cause
        assert caught.value.hint in str(caught.value)

    run(program)


def test_a_port_is_not_shared_with_another_peer(tmp_path: Path) -> None:
    load_or_create(tmp_path / "b")

    async def program() -> None:
        async with open_peer(tmp_path / "a") as a:
            port = (await a.addresses())[0].split("/")[4]
            with pytest.raises(NetworkStartError) as caught:
                async with open_network(tmp_path / "b", f"/ip4/127.0.0.1/tcp/{port}", config=CONFIG):
                    pass
            assert caught.value.cause is StartFailure.PORT_TAKEN

    run(program)


def test_a_damaged_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"no key")

    async def program() -> None:
        with pytest.raises(NetworkStartError) as caught:
            async with open_network(tmp_path / "a", LOOPBACK, config=CONFIG):
                pass
        assert caught.value.cause is StartFailure.BAD_IDENTITY

    run(program)


def test_the_meter_counts_what_the_daemon_sends(tmp_path: Path) -> None:
    async def program() -> None:
        async with open_peer(tmp_path / "a") as a, open_peer(tmp_path / "b") as b:
            b.introduce(a.peer_id, await a.addresses())
            meter = TrafficMeter(b.process_id)
            if not meter.available:
                pytest.skip("this system has no socket diagnostics")
            await check_echo(b, a.peer_id)
            before = meter.sample()
            await check_echo(b, a.peer_id, bytes(1_000_000))
            after = meter.sample()
            for first, last in (
                (before.bytes_sent, after.bytes_sent),
                (before.bytes_received, after.bytes_received),
            ):
                assert 1_000_000 < last - first < 1_250_000  # Much load means small pieces, and more overhead.
            await wait_restarted(b)
            assert meter.sample() == after  # What is gone keeps its count,
            meter.follow(b.process_id)
            await check_echo(b, a.peer_id, bytes(1_000_000))
            assert meter.sample().bytes_sent > after.bytes_sent + 1_000_000  # and the next daemon's is added.

    run(program)


def test_a_meter_of_no_process_counts_nothing() -> None:
    assert TrafficMeter(2**22 + 1).total == Traffic()
