"""An alarm rings at the earliest moment that was set, and no two timers wait for one moment."""

from __future__ import annotations

import anyio
from hypothesis import given
from hypothesis import strategies as st

from averaging.alarm import Alarm
from simulator.virtual_time import run_virtual

moments = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 20)), max_size=8)


@given(moments)
def test_whoever_sets_it_anew_is_called_when_it_is_due(sets: list[tuple[float, float]]) -> None:
    """As its user does: after each call, and after each event, the next moment is set."""
    rung: list[float] = []
    due: list[float] = []

    async def program() -> None:
        alarm = Alarm(lambda: ring())

        def ring() -> None:
            now = anyio.current_time()
            rung.extend(at for at in due if at <= now)
            due[:] = [at for at in due if at > now]
            if due:
                alarm.set(min(due))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(alarm.run)
            wanted = []
            for pause, ahead in sets:
                await anyio.sleep(pause)
                due.append(anyio.current_time() + ahead)
                wanted.append(due[-1])
                alarm.set(due[-1])
            await anyio.sleep(30)
            assert rung == sorted(wanted)
            tasks.cancel_scope.cancel()

    run_virtual(program)


def test_what_is_due_already_rings_at_once() -> None:
    rung: list[float] = []

    async def program() -> None:
        alarm = Alarm(lambda: rung.append(anyio.current_time()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(alarm.run)
            await anyio.sleep(3)
            alarm.set(1.0)
            await anyio.sleep(3)
            tasks.cancel_scope.cancel()

    run_virtual(program)
    assert rung == [3.0]
