"""Links on virtual time: whichever of two streams survives, what is queued is written to it."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ByteStream

from averaging.links import Links, LinksConfig
from network.framing import FrameReader
from network.seam import PeerID
from network.simulated import Link, World, WorldConfig
from simulator.virtual_time import run_virtual

A, B = PeerID("a"), PeerID("b")
PROTOCOL = "/link"


@pytest.mark.parametrize("breaks", [0, 1])
def test_one_of_two_streams_may_break(breaks: int) -> None:
    """Two peers that dial each other at the same time have two; a frame goes to the newest that lives."""
    received: list[bytes] = []
    heard: list[str] = []
    streams: list[ByteStream] = []

    async def read(stream: ByteStream) -> None:
        try:
            while True:
                received.append(await FrameReader(stream, 1000).receive(None))
        except anyio.BrokenResourceError:
            return

    async def program() -> None:
        world = World(1, WorldConfig(link=Link(0.1)))
        async with world.open_network(A) as a, world.open_network(B) as b, anyio.create_task_group() as tasks:
            links = Links(
                a,
                PROTOCOL,
                LinksConfig(frame_bytes_max=1000),
                random.Random(0),
                on_message=lambda peer, frame: None,
                on_up=lambda peer: heard.append("up"),
                on_down=lambda peer: heard.append("down"),
            )
            tasks.start_soon(links.run)
            await anyio.lowlevel.checkpoint()
            for _ in range(2):
                streams.append(await b.open_stream(A, PROTOCOL))
                tasks.start_soon(read, streams[-1])
            await anyio.sleep(1)
            await break_one(world)
            links.send(B, b"hello")
            await anyio.sleep(1)
            # What was on its way over the other stream is lost, and nobody else could tell.
            assert heard == ["up", "down", "up"]
            tasks.cancel_scope.cancel()

    async def break_one(world: World) -> None:
        asked: list[int] = []

        def is_hit() -> bool:
            asked.append(len(asked))
            return asked[-1] == breaks

        world.break_streams(is_hit)
        assert len(asked) == 2
        await anyio.sleep(1)

    run_virtual(program)
    assert received == [b"hello"]
