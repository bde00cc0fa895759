"""An event loop whose time jumps to the next timer instead of waiting: hours of a swarm in seconds, repeatably."""

from __future__ import annotations

import asyncio
import heapq
import importlib
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import anyio
from typing_extensions import TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH = 1_700_000_000.0
"""The wall clock, in seconds since 1970, at loop time 0."""


CANCELLED_TIMERS_MAX = 100
"""So many are not worth looking for."""


@dataclass(frozen=True)
class VirtualConfig:
    """Where a simulation is declared endless."""

    virtual_seconds_max: float = 1e7
    """No loop time beyond this one; raises `VirtualTimeExceeded`."""

    turns_per_instant_max: int = 1_000_000
    """Turns of the loop without any progress of time; then a program that spins raises `VirtualTimeExceeded`."""


class VirtualDeadlock(RuntimeError):
    """Nothing can run and no timer is set: every task waits for another one."""


class VirtualTimeExceeded(RuntimeError):
    """The program ran past a limit of its `VirtualConfig`."""


def run_virtual(
    async_fn: Callable[[Unpack[Ts]], Awaitable[T]], *args: Unpack[Ts], config: VirtualConfig | None = None
) -> T:
    """Run an anyio program on a fresh `VirtualLoop` and return its result.

    The program may sleep and set deadlines, but not use sockets, processes, signals or threads: nothing wakes it
    then. The same program gives the same order of events, whatever the machine and its hash seed.
    """
    options = {"loop_factory": lambda: VirtualLoop(config or VirtualConfig())}
    with _ordered_cancellation():
        return anyio.run(async_fn, *args, backend="asyncio", backend_options=options)


def wall_time() -> float:
    """Seconds since 1970 on the running virtual loop."""
    return EPOCH + asyncio.get_running_loop().time()


@final
class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0; raises `VirtualDeadlock` where another loop would hang."""

    def __init__(self, config: VirtualConfig | None = None) -> None:
        self._config = config or VirtualConfig()
        self._now = 0.0
        self._num_tasks = 0
        self._num_turns = 0
        self._num_timers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_cancelled_count = 0
        super().__init__()
        # A timer fires when it is due within one resolution; below one ulp of the time it would never be.
        self._clock_resolution = 2 * math.ulp(self._config.virtual_seconds_max)
        self.set_task_factory(cast(Any, _make_task))

    def time(self) -> float:
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Timers of one instant fire in the order in which they were set."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, timer))
        cast(Any, timer)._scheduled = True  # So that a cancelled one is counted.
        return timer

    def _run_once(self) -> None:
        """One turn: what is ready, and the timers that are due. As asyncio's own without selectors, threads and
        debugging, which take most of its time.
        """
        asyncio_loop: Any = self
        ready, timers = asyncio_loop._ready, self._timers
        if len(timers) > CANCELLED_TIMERS_MAX and 2 * self._timer_cancelled_count > len(timers):
            # Nearly all timers are deadlines that nothing waits for any more.
            timers[:] = [entry for entry in timers if not entry[2].cancelled()]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
            self._timer_cancelled_count -= 1
        if not (ready or asyncio_loop._stopping):
            self._jump(timers[0][0] if timers else math.inf)
        else:
            self._count_turn()
        due = self._now + self._clock_resolution
        while timers and timers[0][0] < due:
            timer = heapq.heappop(timers)[2]
            cast(Any, timer)._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _count_turn(self) -> None:
        self._num_turns += 1
        if self._num_turns > self._config.turns_per_instant_max:
            self._num_turns = 0  # The clean-up gets its own turns.
            raise VirtualTimeExceeded(
                f"the program spins at {self._now:.3f} virtual seconds:"
                f" more than turns_per_instant_max={self._config.turns_per_instant_max}"
            )

    def _jump(self, timer: float) -> None:
        """What waiting for the first timer is here."""
        if timer == math.inf:
            raise VirtualDeadlock(
                f"at {self._now:.3f} virtual seconds nothing can run and no timer is set"
                " (work handed to a thread, a process or a socket cannot wake a virtual loop)"
            )
        if timer > self._now:
            self._num_turns = 0
            self._now = timer
        else:
            self._count_turn()
        if self._now > self._config.virtual_seconds_max:
            raise VirtualTimeExceeded(
                f"the program waits until {self._now:.3f} virtual seconds,"
                f" more than virtual_seconds_max={self._config.virtual_seconds_max}"
            )

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]
    ) -> asyncio.Future[T]:
        """Run `func` at once: it takes no virtual time, and no thread decides about the order."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # It belongs to whoever awaits the future, whatever it is.
            future.set_exception(error)
        return future

    def next_task_number(self) -> int:
        self._num_tasks += 1
        return self._num_tasks


class _Task(asyncio.Task[T]):
    """Hashed by its number: sets of tasks, as `asyncio.wait` returns, would else be in the order of addresses."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> _Task[T]:
    return _Task(cast(VirtualLoop, loop).next_task_number(), coroutine, loop=loop, **options)


class _OrderedSet(dict[T, None]):
    """As much of a set as anyio needs, in the order of adding."""

    def add(self, item: T) -> None:
        self[item] = None

    def remove(self, item: T) -> None:
        del self[item]

    def discard(self, item: T) -> None:
        self.pop(item, None)


@contextmanager
def _ordered_cancellation() -> Iterator[None]:
    """Make anyio cancel in the order of starting, for as long as the context lasts.

    Its cancel scopes keep their tasks and inner scopes in sets, whose order depends on addresses in memory, and offer
    no way to change it; a name in the module goes before the builtin one.
    """
    module: Any = importlib.import_module("anyio._backends._asyncio")
    module.set = _OrderedSet
    try:
        yield
    finally:
        del module.set
