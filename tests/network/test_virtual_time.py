"""Virtual time jumps, lands exactly, ends in clear errors instead of hanging, and orders events in one way only."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.virtual_time import (
    EPOCH,
    VirtualConfig,
    VirtualDeadlock,
    VirtualTimeExceeded,
    run_virtual,
    wall_time,
)


@given(st.lists(st.floats(0, 1e5), max_size=10))
def test_time_starts_at_zero_and_lands_on_every_timer(seconds: list[float]) -> None:
    async def program() -> None:
        assert anyio.current_time() == 0
        expected = 0.0
        for pause in seconds:
            await anyio.sleep(pause)
            expected += pause
            assert anyio.current_time() == expected
            assert wall_time() == EPOCH + expected

    run_virtual(program)


def test_results_and_errors_come_out() -> None:
    async def program(number: int) -> int:
        if number < 0:
            raise ValueError(number)
        return number + 1

    assert run_virtual(program, 1) == 2
    with pytest.raises(ValueError, match="-1"):
        run_virtual(program, -1)


def test_deadlines_hold_on_virtual_time() -> None:
    async def program() -> float:
        with anyio.move_on_after(3600):
            await anyio.sleep_forever()
        return anyio.current_time()

    assert run_virtual(program) == 3600


async def wait_for_nobody() -> None:
    await anyio.Event().wait()


@pytest.mark.parametrize("program", [wait_for_nobody, anyio.sleep_forever])
def test_a_deadlock_is_an_error(program: object) -> None:
    async def run() -> None:
        await program()  # type: ignore[operator]

    with pytest.raises(VirtualDeadlock, match="no timer is set"):
        run_virtual(run)


def test_a_thread_cannot_be_waited_for() -> None:
    async def program() -> None:
        await anyio.to_thread.run_sync(time.sleep, 0.05)

    with pytest.raises(VirtualDeadlock, match="thread"):
        run_virtual(program)


def test_work_for_an_executor_runs_at_once() -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        done: list[int] = []
        future = loop.run_in_executor(None, done.append, 1)
        assert done == [1]
        await future
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, divmod, 1, 0)

    run_virtual(program)


def test_endless_programs_are_ended() -> None:
    async def wait() -> None:
        for _ in range(1000):
            await anyio.sleep(60)

    async def spin() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    with pytest.raises(VirtualTimeExceeded, match="virtual_seconds_max=3600"):
        run_virtual(wait, config=VirtualConfig(virtual_seconds_max=3600))
    with pytest.raises(VirtualTimeExceeded, match="turns_per_instant_max=100"):
        run_virtual(spin, config=VirtualConfig(turns_per_instant_max=100))


def test_tasks_of_one_scope_are_cancelled_in_the_same_order_every_time() -> None:
    async def program() -> list[int]:
        order: list[int] = []

        async def wait(number: int) -> None:
            try:
                await anyio.sleep_forever()
            finally:
                order.append(number)

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(wait, number)
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        return order

    assert [run_virtual(program) for _ in range(5)] == 5 * [list(range(50))]


def test_a_set_of_tasks_has_the_same_order_every_time() -> None:
    async def program() -> list[str]:
        tasks = {asyncio.get_running_loop().create_task(asyncio.sleep(1), name=str(number)) for number in range(50)}
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    first, *others = (run_virtual(program) for _ in range(5))
    assert others == 4 * [first]


def test_late_timers_still_fire() -> None:
    async def program() -> None:
        await anyio.sleep_until(9_999_999)
        for _ in range(100):
            await anyio.sleep(1e-9)

    run_virtual(program, config=VirtualConfig(turns_per_instant_max=1000))
