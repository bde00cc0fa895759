"""That a swarm goes on: what is watched beside it while it runs, and asked of it once nothing is wrong any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from simulator.checkers import NoProgress

if TYPE_CHECKING:
    from simulator.swarm import Swarm

GOODBYE_SECONDS_MAX = 60.0
"""In the end, for all to leave."""


async def watch(swarm: Swarm) -> None:
    """Some round is committed, or some peer done, within `stall_seconds_max`."""
    while True:
        before = swarm.checker.newest, len(swarm.done)
        await anyio.sleep(swarm.config.stall_seconds_max)
        if (swarm.checker.newest, len(swarm.done)) == before:
            raise NoProgress(f"no commit after round {before[0]}; {swarm.situations()}")


async def break_and_mend(swarm: Swarm) -> None:
    """The faults, and then life: see `SwarmConfig.live_seconds`."""
    await swarm.injector.run(swarm)
    swarm.open_doors()
    if swarm.config.live_seconds is None:
        return
    while True:
        await _all_commit(swarm, swarm.config.live_seconds)
        if swarm.checker.newest >= swarm.config.rounds:
            break
    swarm.leave_all()
    await anyio.sleep(GOODBYE_SECONDS_MAX)
    raise NoProgress(f"not all have left {GOODBYE_SECONDS_MAX:g} s after they were told to; {swarm.situations()}")


async def _all_commit(swarm: Swarm, seconds_max: float) -> None:
    """Until every peer has committed a round later than all that were committed when this began."""
    before, committed = swarm.checker.newest, swarm.checker.committed_at

    def behind() -> list[int]:
        return [number for number in swarm.all_numbers() if committed.get(number, (0.0, 0))[1] <= before]

    with anyio.move_on_after(seconds_max):
        while behind():  # noqa: ASYNC110
            await anyio.sleep(0.25)
    if behind():
        raise NoProgress(
            f"without any fault for {seconds_max:g} s, peers {behind()} committed nothing after round {before}; "
            f"{swarm.situations()}"
        )


async def kill_regularly(swarm: Swarm, seconds: float) -> None:
    """Crashes one random peer each time, for ever."""
    while True:
        await anyio.sleep(seconds)
        if swarm.lives:
            swarm.crash(swarm.rng.choice(sorted(swarm.lives)))
