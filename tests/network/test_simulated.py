"""The simulated network's arithmetic is exact on virtual time, and its chances repeat."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from anyio.abc import ByteStream
from hypothesis import given, settings
from hypothesis import strategies as st

from network.seam import PeerID, PeerUnreachable
from network.simulated import Access, Link, World, WorldConfig
from simulator.virtual_time import run_virtual
from tests.network.small_world import DELAY, A, B, C, echo, make_world, serve_log


def test_a_first_dial_takes_three_round_trips_and_the_next_one_takes_one() -> None:
    async def program() -> None:
        world = make_world()
        async with world.open_network(A) as a, world.open_network(B) as b:
            await serve_log(b)
            await a.open_stream(B, "/log")
            assert anyio.current_time() == 6 * DELAY
            await a.open_stream(B, "/log")
            assert anyio.current_time() == 8 * DELAY

    run_virtual(program)


def test_bytes_take_the_delay_and_their_time_on_the_uplink() -> None:
    async def program() -> None:
        world = make_world()
        async with world.open_network(A, Access(uplink_bytes_per_second=1024)) as a, world.open_network(B) as b:
            arrivals = await serve_log(b)
            stream = await a.open_stream(B, "/log")
            start = anyio.current_time()
            await stream.send(bytes(512))
            await stream.send(bytes(1024))
            assert anyio.current_time() == start  # They wait in the window, not in `send`.
            await anyio.sleep(10)
            assert arrivals == [(start + 0.5 + DELAY, 512), (start + 1.5 + DELAY, 1024)]
            assert world.bytes_sent == {A: 1536}
            assert world.bytes_received == {B: 1536}

    run_virtual(program)


def test_concurrent_streams_share_an_uplink_and_a_downlink() -> None:
    async def program() -> None:
        world = make_world()
        slow_down = Access(downlink_bytes_per_second=256)
        async with (
            world.open_network(A, Access(uplink_bytes_per_second=1024)) as a,
            world.open_network(B) as b,
            world.open_network(C, slow_down) as c,
        ):
            at_b, at_c = await serve_log(b), await serve_log(c)
            to_b, to_c = await a.open_stream(B, "/log"), await a.open_stream(C, "/log")
            from_b = await b.open_stream(C, "/log")
            start = anyio.current_time()
            await to_b.send(bytes(1024))
            await to_c.send(bytes(512))
            await from_b.send(bytes(256))
            await anyio.sleep(20)
            assert at_b == [(start + 1 + DELAY, 1024)]
            # b's bytes are first, at once; a's wait for their uplink until 1.5, then take 2 seconds of c's downlink.
            assert at_c == [(start + DELAY + 1, 256), (start + 1.5 + DELAY + 2, 512)]

    run_virtual(program)


def test_a_sender_waits_when_the_receiver_does_not_read() -> None:
    async def program() -> None:
        world = make_world(stream_bytes_max=1000)
        may_read = anyio.Event()

        async def late(peer: PeerID, stream: ByteStream) -> None:
            await may_read.wait()
            while True:
                await stream.receive(100)

        async with world.open_network(A) as a, world.open_network(B) as b:
            await b.serve("/late", late)
            stream = await a.open_stream(B, "/late")
            with anyio.move_on_after(100) as scope:
                await stream.send(bytes(1001))
            assert scope.cancelled_caught
            assert world.bytes_sent[A] == 1000
            may_read.set()
            with anyio.fail_after(10):
                await stream.send(bytes(10_000))

    run_virtual(program)


@settings(max_examples=30, deadline=None)
@given(st.integers(0), st.lists(st.integers(1, 3000), max_size=20), st.integers(1, 2000))
def test_a_stream_stays_in_order_whatever_the_jitter(seed: int, sizes: list[int], window: int) -> None:
    async def program() -> None:
        link = Link(0.01, jitter_seconds=5)
        world = World(seed, WorldConfig(link=link, stream_bytes_max=window, dial_seconds_max=100))
        async with world.open_network(A, Access(1000, 700)) as a, world.open_network(B, Access(500, 900)) as b:
            await b.serve("/echo", echo)
            sent = b"".join(bytes([number]) * size for number, size in enumerate(sizes))
            received = b""
            async with await a.open_stream(B, "/echo") as stream, anyio.create_task_group() as tasks:

                async def send() -> None:
                    for number, size in enumerate(sizes):
                        await stream.send(bytes([number]) * size)
                    await stream.send_eof()

                tasks.start_soon(send)
                async for part in stream:
                    received += part
            assert received == sent
            assert world.bytes_sent == world.bytes_received == ({A: len(sent), B: len(sent)} if sent else {})

    run_virtual(program)


async def chatter(seed: int) -> str:
    """A small swarm with every kind of trouble; returns a digest of all that its peers saw and when."""
    world = World(seed, WorldConfig(link=Link(0.05, jitter_seconds=0.1), dial_loss=0.1, stall_seconds_max=5))
    trace = hashlib.sha256()
    peers = [PeerID(f"peer{number}") for number in range(5)]

    def note(*what: object) -> None:
        trace.update(repr((anyio.current_time(), *what)).encode())

    async def live(me: PeerID) -> None:
        async with world.open_network(me, Access(1e5, 2e5)) as network:

            async def answer(peer: PeerID, stream: ByteStream) -> None:
                async for part in stream:
                    note(me, "got", len(part), peer)
                    await stream.send(part * 3)

            async def ask(peer: PeerID) -> None:
                try:
                    with anyio.fail_after(3):
                        async with await network.open_stream(peer, "/ask") as stream:
                            await stream.send(bytes(world.rng.randrange(1, 5000)))
                            note(me, "answered", len(await stream.receive()), peer)
                except (PeerUnreachable, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
                    note(me, type(error).__name__, peer)

            await network.serve("/ask", answer)
            for _ in range(5):
                async with anyio.create_task_group() as tasks:
                    for peer in peers:
                        if peer != me:
                            tasks.start_soon(ask, peer)
                await anyio.sleep(world.rng.random())

    async def trouble() -> None:
        await anyio.sleep(2)
        world.partition(peers[:2])
        await anyio.sleep(3)
        world.heal()
        world.crash(peers[3])
        world.freeze(peers[4])
        await anyio.sleep(6)
        world.thaw(peers[4])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trouble)
        for peer in peers:
            tasks.start_soon(live, peer)
    note(sorted(world.bytes_sent.items()))
    return trace.hexdigest()


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    program = "from test_simulated import chatter, run_virtual\nprint(run_virtual(chatter, 7))\n"
    folder = Path(__file__).parent
    path = f"{folder}{os.pathsep}{folder.parents[1]}"
    traces = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert traces == {run_virtual(chatter, 7)}
    assert traces != {run_virtual(chatter, 8)}


def test_the_world_survives_what_peers_do_in_the_wrong_order() -> None:
    """Crashes of strangers, of the dead, and cuts of nobody change nothing."""

    async def program() -> None:
        world = make_world()
        world.crash(A)
        world.heal()
        world.thaw(A)
        async with world.open_network(A):
            world.crash(A)
            world.crash(A)

    check: Callable[[], Awaitable[None]] = program
    run_virtual(check)
