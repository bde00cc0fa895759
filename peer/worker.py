"""The `Worker` seam: where blocking work runs. The real one is a thread, so that the event loop goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ParamSpec, TypeVar, final

import anyio
import anyio.to_thread

P = ParamSpec("P")
T = TypeVar("T")


class Worker(ABC):
    """One piece of work at a time."""

    @abstractmethod
    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


@final
class ThreadWorker(Worker):
    """Runs in a thread of the process; a cancelled caller still waits for the work to end."""

    def __init__(self) -> None:
        self._limit = anyio.CapacityLimiter(1)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await anyio.to_thread.run_sync(lambda: work(*args, **kwargs), limiter=self._limit)
