"""One timer for whoever would else set a new one at every event, mostly for the same moment."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import final

import anyio


@final
class Alarm:
    """Calls `ring` at the moment set, or earlier: whoever is called in vain sets it anew."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._at = inf
        self._moved = anyio.Event()

    def set(self, at: float) -> None:
        """By the event loop's clock. A later moment than the last one that has not come changes nothing yet."""
        if at < self._at:
            self._at = at
            self._moved.set()

    async def run(self) -> None:
        """Rings until cancelled."""
        while True:
            with anyio.CancelScope(deadline=self._at):
                await self._moved.wait()
            self._moved = anyio.Event()
            if self._at <= anyio.current_time():
                self._at = inf
                self._ring()
