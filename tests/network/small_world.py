"""A world of two to four peers on virtual time, and what they serve."""

from __future__ import annotations

import anyio
from anyio.abc import ByteStream

from network.seam import PeerID
from network.simulated import Link, SimulatedNetwork, World, WorldConfig

A, B, C, D = (PeerID(name) for name in "abcd")
DELAY = 0.25
"""A power of two, so that sums of it are exact."""
Arrivals = list[tuple[float, int]]
"""Times and sizes of what a peer received."""


def make_world(**config: object) -> World:
    values: dict[str, object] = {"link": Link(DELAY), **config}
    return World(1, WorldConfig(**values))  # type: ignore[arg-type]


async def serve_log(network: SimulatedNetwork) -> Arrivals:
    """Receive on "/log" and note when how much came."""
    arrivals: Arrivals = []

    async def log(peer: PeerID, stream: ByteStream) -> None:
        async for part in stream:
            arrivals.append((anyio.current_time(), len(part)))

    await network.serve("/log", log)
    return arrivals


async def echo(peer: PeerID, stream: ByteStream) -> None:
    async for part in stream:
        await stream.send(part)
