"""What goes wrong in the simulated network is what was asked for: crashes, cuts, addresses behind a NAT, lost dials."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from anyio.abc import ByteStream

from network.seam import PeerID, PeerUnreachable
from network.simulated import Access, World
from simulator.virtual_time import run_virtual
from tests.network.small_world import DELAY, A, B, C, D, echo, make_world, serve_log


def test_a_crash_takes_back_what_had_not_left_and_refuses_dials() -> None:
    async def program() -> None:
        world = make_world()
        async with world.open_network(A, Access(uplink_bytes_per_second=1024)) as a, world.open_network(B) as b:
            arrivals = await serve_log(b)
            await a.serve("/echo", echo)
            stream = await a.open_stream(B, "/log")
            await stream.send(bytes(1024))
            await stream.send(bytes(1024))
            await anyio.sleep(1.5)
            world.crash(A)
            with pytest.raises(anyio.BrokenResourceError):
                await stream.send(b"x")
            await anyio.sleep(10)
            assert [size for _, size in arrivals] == [1024]
            with pytest.raises(PeerUnreachable):
                await b.open_stream(A, "/echo")
            with pytest.raises(PeerUnreachable):
                await a.open_stream(B, "/log")
            async with world.open_network(A) as again:  # It may come back at once.
                await again.serve("/echo", echo)
                await (await b.open_stream(A, "/echo")).aclose()

    run_virtual(program)


def test_a_crash_looks_like_an_end_or_like_a_break() -> None:
    async def program(seed: int) -> str:
        world = World(seed)
        async with world.open_network(A) as a, world.open_network(B) as b:
            await a.serve("/echo", echo)
            stream = await b.open_stream(A, "/echo")
            world.crash(A)
            try:
                await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
                return type(error).__name__
            return "data"

    assert {run_virtual(program, seed) for seed in range(20)} == {"EndOfStream", "BrokenResourceError"}


def cut_by_partition(world: World) -> Callable[[], None]:
    world.partition([A])
    return world.heal


def cut_by_freeze(world: World) -> Callable[[], None]:
    world.freeze(B)
    return lambda: world.thaw(B)


@pytest.mark.parametrize("cut", [cut_by_partition, cut_by_freeze])
def test_a_cut_delays_and_a_long_cut_breaks(cut: Callable[[World], Callable[[], None]]) -> None:
    async def program() -> None:
        world = make_world(stall_seconds_max=40, dial_seconds_max=10)
        async with world.open_network(A) as a, world.open_network(B) as b:
            arrivals = await serve_log(b)
            stream = await a.open_stream(B, "/log")
            start = anyio.current_time()
            await stream.send(b"first")
            mend = cut(world)
            await stream.send(b"second!")
            with pytest.raises(PeerUnreachable):
                await a.open_stream(B, "/log")
            assert anyio.current_time() == start + 10
            await anyio.sleep(20)
            assert arrivals == []
            mend()
            await stream.send(b"third...")
            await anyio.sleep(1)
            assert arrivals == [(start + 30 + DELAY, size) for size in (5, 7, 8)]
            cut(world)
            await anyio.sleep(40)
            with pytest.raises(anyio.BrokenResourceError):
                await stream.send(b"x")

    run_virtual(program)


def test_a_partition_leaves_each_side_whole() -> None:
    async def program() -> None:
        world = make_world()
        async with (
            world.open_network(A) as a,
            world.open_network(B) as b,
            world.open_network(C) as c,
            world.open_network(D) as d,
        ):
            for network in (a, b, c, d):
                await network.serve("/echo", echo)
            world.partition([A, B])
            await a.open_stream(B, "/echo")
            await c.open_stream(D, "/echo")
            for one, other in ((a, C), (d, B)):
                with pytest.raises(PeerUnreachable):
                    await one.open_stream(other, "/echo")
            world.heal()
            await a.open_stream(C, "/echo")

    run_virtual(program)


def test_a_peer_behind_a_nat_is_reached_only_over_its_own_connections() -> None:
    async def program() -> None:
        world = make_world()
        async with world.open_network(A, Access(dialable=False)) as a, world.open_network(B) as b:
            await a.serve("/echo", echo)
            await b.serve("/echo", echo)
            with pytest.raises(PeerUnreachable):
                await b.open_stream(A, "/echo")
            await a.open_stream(B, "/echo")
            await b.open_stream(A, "/echo")

    run_virtual(program)


def test_dials_are_lost_as_often_as_asked() -> None:
    async def program() -> int:
        world = make_world(dial_loss=0.25)
        lost = 0
        async with world.open_network(A) as a:
            for number in range(400):
                async with world.open_network(PeerID(f"{number}")) as b:
                    await b.serve("/echo", echo)
                    try:
                        await a.open_stream(b.peer_id, "/echo")
                    except PeerUnreachable:
                        lost += 1
        return lost

    assert 60 < run_virtual(program) < 140


def test_a_cancelled_dial_ends_the_stream_over_there() -> None:
    async def program() -> None:
        world = make_world()
        ended = anyio.Event()

        async def wait_end(peer: PeerID, stream: ByteStream) -> None:
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            ended.set()

        async with world.open_network(A) as a, world.open_network(B) as b:
            await b.serve("/wait", wait_end)
            with anyio.move_on_after(5.5 * DELAY):
                await a.open_stream(B, "/wait")
            with anyio.fail_after(10):
                await ended.wait()

    run_virtual(program)


def test_a_peer_is_in_the_world_once() -> None:
    async def program() -> None:
        world = make_world()
        async with world.open_network(A):
            with pytest.raises(ValueError, match="already"):
                async with world.open_network(A):
                    pass

    run_virtual(program)
