"""What every `Network` promises: the simulated one on virtual time, the real one with daemons on loopback."""

from __future__ import annotations

import logging
import os
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import final

import anyio
import pytest
from anyio.abc import ByteStream

from network.daemon import DaemonConfig, HivemindNetwork, open_network
from network.identity import load_or_create
from network.seam import Network, PeerID, PeerUnreachable
from network.simulated import Access, Link, World, WorldConfig
from simulator.virtual_time import run_virtual

DIAL_SECONDS_MAX = 3.0
SECONDS_MAX = 60.0
"""A test that takes longer hangs."""

Broken = (anyio.BrokenResourceError, anyio.EndOfStream)


class Places(ABC):
    """Opens networks that know each other, and runs programs on them."""

    @abstractmethod
    def run(self, program: Callable[[], Awaitable[None]]) -> None: ...

    @abstractmethod
    def open_network(self, name: str) -> AbstractAsyncContextManager[Network]: ...

    @abstractmethod
    def kill(self, network: Network) -> None:
        """The peer vanishes without a farewell."""

    @abstractmethod
    def stranger(self) -> PeerID:
        """The id of a peer that nobody can reach."""


@final
class SimulatedPlaces(Places):
    def __init__(self) -> None:
        link = Link(delay_seconds=0.05, jitter_seconds=0.02)
        self.world = World(7, WorldConfig(link=link, dial_seconds_max=DIAL_SECONDS_MAX))

    def run(self, program: Callable[[], Awaitable[None]]) -> None:
        run_virtual(_within, program)

    @asynccontextmanager
    async def open_network(self, name: str) -> AsyncIterator[Network]:
        async with self.world.open_network(PeerID(name), Access(uplink_bytes_per_second=1e7)) as network:
            yield network

    def kill(self, network: Network) -> None:
        self.world.crash(network.peer_id)

    def stranger(self) -> PeerID:
        return PeerID("stranger")


@final
class RealPlaces(Places):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.networks: list[Network] = []

    def run(self, program: Callable[[], Awaitable[None]]) -> None:
        anyio.run(_within, program)

    @asynccontextmanager
    async def open_network(self, name: str) -> AsyncIterator[Network]:
        key = self.folder / name
        load_or_create(key)
        config = DaemonConfig(dial_seconds_max=DIAL_SECONDS_MAX)
        async with open_network(key, "/ip4/127.0.0.1/tcp/0", config=config) as network:
            for other in self.networks:
                network.introduce(other.peer_id, await other.addresses())
                other.introduce(network.peer_id, await network.addresses())
            self.networks.append(network)
            yield network
            self.networks.remove(network)

    def kill(self, network: Network) -> None:
        assert isinstance(network, HivemindNetwork)
        os.kill(network.process_id, signal.SIGKILL)

    def stranger(self) -> PeerID:
        return load_or_create(self.folder / "stranger").peer_id


async def _within(program: Callable[[], Awaitable[None]]) -> None:
    with anyio.fail_after(SECONDS_MAX):
        await program()


@pytest.fixture(params=["simulated", "real"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    return SimulatedPlaces() if request.param == "simulated" else RealPlaces(tmp_path)


async def receive_all(stream: ByteStream) -> bytes:
    """Until the end of the stream."""
    parts = [part async for part in stream]
    return b"".join(parts)


async def receive_exactly(stream: ByteStream, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += await stream.receive(num_bytes - len(data))
    return data


async def echo(peer: PeerID, stream: ByteStream) -> None:
    async for part in stream:
        await stream.send(part)


async def measure(peer: PeerID, stream: ByteStream) -> None:
    """Answer only after the end of what comes."""
    data = await receive_all(stream)
    await stream.send(f"{peer} {len(data)}".encode())


def test_bytes_go_there_and_back(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            async with await b.open_stream(a.peer_id, "/echo/1") as stream:
                for word in (b"one", b"two", b"three"):
                    await stream.send(word)
                    assert await receive_exactly(stream, len(word)) == word

    places.run(program)


def test_the_handler_knows_who_calls_and_half_close_leaves_the_way_back_open(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/measure/1", measure)
            async with await b.open_stream(a.peer_id, "/measure/1") as stream:
                await stream.send(b"x" * 1000)
                await stream.send_eof()
                await stream.send_eof()  # A second time changes nothing.
                assert await receive_all(stream) == f"{b.peer_id} 1000".encode()
                with pytest.raises(anyio.EndOfStream):
                    await stream.receive()
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.send(b"more")

    places.run(program)


def test_a_large_transfer_arrives_intact_in_both_directions(places: Places) -> None:
    data = random.Random(1).randbytes(5_000_000)

    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            stream = await b.open_stream(a.peer_id, "/echo/1")

            async def send() -> None:
                await stream.send(data)
                await stream.send_eof()

            async with stream, anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                assert await receive_all(stream) == data

    places.run(program)


def test_what_was_sent_before_closing_arrives(places: Places) -> None:
    data = random.Random(2).randbytes(2_000_000)

    async def answer(peer: PeerID, stream: ByteStream) -> None:
        assert await receive_exactly(stream, 3) == b"ask"
        await stream.send(data)

    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/answer/1", answer)
            async with await b.open_stream(a.peer_id, "/answer/1") as stream:
                await stream.send(b"ask")
                assert await receive_all(stream) == data

    places.run(program)


def test_streams_run_side_by_side(places: Places) -> None:
    answers: dict[int, bytes] = {}

    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/measure/1", measure)

            async def ask(number: int) -> None:
                async with await b.open_stream(a.peer_id, "/measure/1") as stream:
                    await stream.send(bytes(number * 1000))
                    await stream.send_eof()
                    answers[number] = await receive_all(stream)

            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(ask, number)
            assert answers == {number: f"{b.peer_id} {number * 1000}".encode() for number in range(20)}

    places.run(program)


def test_a_peer_that_dialled_can_be_called_back(places: Places) -> None:
    async def program() -> None:
        async with AsyncExitStack() as stack:
            a, b, c = [await stack.enter_async_context(places.open_network(name)) for name in "abc"]
            called: list[PeerID] = []

            async def call_back(peer: PeerID, stream: ByteStream) -> None:
                async with await a.open_stream(peer, "/echo/1") as back:
                    await back.send(b"hello")
                    called.append(peer)
                    await stream.send(await back.receive())

            await a.serve("/call/1", call_back)
            for network in (b, c):
                await network.serve("/echo/1", echo)
                async with await network.open_stream(a.peer_id, "/call/1") as stream:
                    assert await receive_all(stream) == b"hello"
            assert called == [b.peer_id, c.peer_id]

    places.run(program)


def test_an_unknown_peer_is_unreachable_within_the_dial_limit(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a:
            with anyio.fail_after(2 * DIAL_SECONDS_MAX), pytest.raises(PeerUnreachable):
                await a.open_stream(places.stranger(), "/echo/1")

    places.run(program)


def test_an_unknown_protocol_is_unreachable(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            with pytest.raises(PeerUnreachable):
                await b.open_stream(a.peer_id, "/echo/2")
            async with await b.open_stream(a.peer_id, "/echo/1") as stream:
                await stream.send(b"still here")
                assert await receive_exactly(stream, 10) == b"still here"

    places.run(program)


def test_a_peer_that_left_is_unreachable(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a:
            async with places.open_network("b") as b:
                await b.serve("/echo/1", echo)
                async with await a.open_stream(b.peer_id, "/echo/1") as stream:
                    await stream.send(b"hello")
                    assert await receive_exactly(stream, 5) == b"hello"
            # Who has not noticed yet gets a stream, which then breaks.
            with anyio.fail_after(2 * DIAL_SECONDS_MAX), pytest.raises((PeerUnreachable, *Broken)):
                async with await a.open_stream(b.peer_id, "/echo/1") as stream:
                    await stream.send(b"hello")
                    await stream.receive()

    places.run(program)


def test_a_peers_death_ends_or_breaks_its_streams(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            stream = await b.open_stream(a.peer_id, "/echo/1")
            await stream.send(b"hello")
            assert await receive_exactly(stream, 5) == b"hello"
            places.kill(a)
            with pytest.raises(Broken):
                await stream.receive()
            with pytest.raises(Broken):
                while True:
                    await stream.send(bytes(10_000))
                    await anyio.lowlevel.checkpoint()
            await stream.aclose()

    places.run(program)


def test_a_handler_that_fails_is_logged_and_harms_no_other(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(peer: PeerID, stream: ByteStream) -> None:
        raise ValueError("a bug in a handler")

    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            await a.serve("/fail/1", fail)
            async with await b.open_stream(a.peer_id, "/echo/1") as good:
                async with await b.open_stream(a.peer_id, "/fail/1") as bad:
                    with pytest.raises(Broken):
                        await bad.receive()
                await good.send(b"hello")
                assert await receive_exactly(good, 5) == b"hello"

    with caplog.at_level(logging.ERROR, "network"):
        places.run(program)
    assert "a bug in a handler" in caplog.text


def test_closing_ends_the_stream_for_both_and_never_hangs(places: Places) -> None:
    outcome: list[type[BaseException]] = []
    done = anyio.Event()

    async def stuck(peer: PeerID, stream: ByteStream) -> None:
        try:
            while True:  # Nobody reads this.
                await stream.send(bytes(100_000))
        except anyio.BrokenResourceError as error:
            outcome.append(type(error))
            done.set()

    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/stuck/1", stuck)
            stream = await b.open_stream(a.peer_id, "/stuck/1")
            assert await stream.receive(1) == b"\0"
            await stream.aclose()
            await stream.aclose()
            for use in (stream.receive(), stream.send(b"x"), stream.send_eof()):
                with pytest.raises(anyio.ClosedResourceError):
                    await use
            await done.wait()

    places.run(program)
    assert outcome == [anyio.BrokenResourceError]


def test_closing_wakes_a_task_that_waits_on_the_stream(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            stream = await b.open_stream(a.peer_id, "/echo/1")

            async def wait() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await stream.receive()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await stream.aclose()

    places.run(program)


def test_a_cancelled_receive_loses_nothing(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            async with await b.open_stream(a.peer_id, "/echo/1") as stream:
                with anyio.move_on_after(0.2) as scope:
                    await stream.receive()
                assert scope.cancelled_caught
                await stream.send(b"hello")
                assert await receive_exactly(stream, 5) == b"hello"

    places.run(program)


def test_addresses_end_in_the_peer_id_and_wrong_hints_do_no_harm(places: Places) -> None:
    async def program() -> None:
        async with places.open_network("a") as a, places.open_network("b") as b:
            await a.serve("/echo/1", echo)
            addresses = await a.addresses()
            assert addresses and all(address.endswith(f"/p2p/{a.peer_id}") for address in addresses)
            b.introduce(a.peer_id, ["junk", "/ip4/127.0.0.1/tcp/1"])
            with suppress(PeerUnreachable):
                await (await b.open_stream(a.peer_id, "/echo/1")).aclose()
            b.introduce(a.peer_id, addresses)
            async with await b.open_stream(a.peer_id, "/echo/1") as stream:
                await stream.send(b"hello")
                assert await receive_exactly(stream, 5) == b"hello"

    places.run(program)
