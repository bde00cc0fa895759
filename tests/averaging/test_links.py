"""Links on virtual time: whichever of two streams survives, what is queued is written to it; who is needed is kept."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import ByteStream

from averaging.links import Links, LinksConfig
from network.framing import FrameReader
from network.seam import Network, PeerID
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


@dataclass
class End:
    """One peer's links, whom it needs, and what it heard of them."""

    network: Network
    needed: set[PeerID] = field(default_factory=set)
    heard: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links = Links(
            self.network,
            PROTOCOL,
            LinksConfig(frame_bytes_max=1000),
            random.Random(0),
            on_message=lambda peer, frame: self.heard.append(frame.decode()),
            on_up=lambda peer: self.heard.append("up"),
            on_down=lambda peer: self.heard.append("down"),
            is_needed=self.needed.__contains__,
        )


@asynccontextmanager
async def open_pair() -> AsyncIterator[tuple[World, End, End]]:
    """Two peers with a link that neither needs."""
    world = World(1, WorldConfig(link=Link(0.1)))
    async with world.open_network(A) as a, world.open_network(B) as b, anyio.create_task_group() as tasks:
        one, other = End(a), End(b)
        for end in (one, other):
            tasks.start_soon(end.links.run)
        await anyio.lowlevel.checkpoint()
        one.links.know(B)
        await anyio.sleep(1)
        assert one.heard == other.heard == ["up"]
        yield world, one, other
        tasks.cancel_scope.cancel()


def test_a_closed_link_stays_closed_until_its_peer_is_known_again() -> None:
    async def program() -> None:
        async with open_pair() as (_, one, other):
            one.links.close(B)
            await anyio.sleep(3600)
            assert one.heard == other.heard == ["up", "down"], "both hear of it, and neither dials"
            for end in (one, other):
                assert not end.links.linked and not end.links.known
            one.links.know(B)
            await anyio.sleep(1)
            one.links.send(B, b"hello")
            await anyio.sleep(1)
            assert other.heard == ["up", "down", "up", "hello"]

    run_virtual(program)


def test_what_was_said_before_a_link_is_closed_arrives() -> None:
    async def program() -> None:
        async with open_pair() as (_, one, other):
            one.links.send(B, b"last word")
            one.links.close(B)
            await anyio.sleep(1)
            assert other.heard == ["up", "last word", "down"]

    run_virtual(program)


def test_a_link_that_either_needs_is_made_again() -> None:
    async def program() -> None:
        async with open_pair() as (_, one, other):
            other.needed.add(A)
            one.links.close(B)
            await anyio.sleep(1)
            assert one.links.linked == [B] and other.links.linked == [A]
            assert one.heard == other.heard == ["up", "down", "up"]

    run_virtual(program)


def test_a_link_that_breaks_is_made_again_only_while_it_is_needed() -> None:
    async def program() -> None:
        async with open_pair() as (world, one, other):
            one.needed.add(B)
            world.break_streams(lambda: True)
            await anyio.sleep(1)
            assert one.links.linked == [B]
            one.needed.clear()
            world.break_streams(lambda: True)
            await anyio.sleep(3600)
            assert not one.links.linked and not one.links.known
            assert one.heard == other.heard == ["up", "down"] * 2

    run_virtual(program)


def test_to_close_what_is_not_there_changes_nothing() -> None:
    async def program() -> None:
        async with open_pair() as (_, one, _):
            one.links.close(PeerID("c"))
            await anyio.sleep(1)
            assert one.links.linked == [B] and one.heard == ["up"]
            one.links.close(B)
            one.links.close(B)
            await anyio.sleep(1)
            one.links.close(B)
            assert one.heard == ["up", "down"]

    run_virtual(program)
