"""Waiting for what others say and decide, with an explanation now and then of why it takes so long."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from averaging.node import Node
from peer.reports import Note, Report

HEADS_SECONDS = 0.05
"""How often it is looked whether the others have said where they stand."""


async def wait_news(node: Node, interrupt: anyio.Event, note_seconds: float, report: Callable[[Report], None]) -> None:
    """Until the node has something for the loop, or `interrupt` is set; explains itself every `note_seconds`."""
    async with anyio.create_task_group() as tasks:

        async def explain() -> None:
            while True:
                await anyio.sleep(note_seconds)
                report(Note(node.engine.situation(anyio.current_time())))

        async def heed() -> None:
            await interrupt.wait()
            tasks.cancel_scope.cancel()

        tasks.start_soon(explain)
        tasks.start_soon(heed)
        await node.wait_news()
        tasks.cancel_scope.cancel()


async def wait_heads(node: Node, interrupt: anyio.Event, seconds_max: float) -> None:
    """Until whoever is linked has said where it stands, somebody at least; or so long, or until `interrupt` is set."""
    with anyio.move_on_after(seconds_max):
        while not (node.knows_heads or interrupt.is_set()):  # noqa: ASYNC110
            await anyio.sleep(HEADS_SECONDS)
