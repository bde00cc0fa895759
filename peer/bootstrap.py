"""An entry point: it introduces peers to each other and trains nothing."""

from __future__ import annotations

import os
import random
import time
from typing import final

import anyio

from dht.entry_point import follow_swarm
from peer.lines import emit
from peer.options import BootstrapOptions
from peer.world import open_world, print_join_line, run_to_the_end, watch_signals

ALIVE_SECONDS = 5.0


def run_bootstrap(options: BootstrapOptions) -> None:
    """Keeps an entry point up until it is told to stop; then raises `KeyboardInterrupt`."""
    run_to_the_end(_Bootstrap(options).run)


@final
class _Bootstrap:
    """An entry point: network and directory, nothing else."""

    def __init__(self, options: BootstrapOptions) -> None:
        self._options = options
        self._stop = anyio.Event()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch_signals, self._stop.set)
            async with open_world(self._options, self._options.initial_peers, alone_is_fine=True) as world:
                print_join_line(self._options.json_events, await world.network.addresses(), None)
                # With a copy of the facts, it answers observers wherever the keys happen to lie.
                tasks.start_soon(follow_swarm, world.directory, time.time, random.Random(os.urandom(16)))
                if self._options.json_events:
                    tasks.start_soon(_say_alive)
                await self._stop.wait()
            tasks.cancel_scope.cancel()
        raise KeyboardInterrupt


async def _say_alive() -> None:
    """Whoever reads the events sees that all is well; when nobody reads them any more, the process ends."""
    while True:
        emit({"event": "Alive"})
        await anyio.sleep(ALIVE_SECONDS)
