"""A newcomer's first minute in the directory: it looks again soon, unless so many are there already that it is dear."""

from __future__ import annotations

import anyio
import pytest

from peer.member import ENOUGH_MEMBERS, look_around
from tests.dht.test_membership import HEARTBEAT, World, run
from tests.dht.test_pace import fill


@pytest.mark.parametrize(("members", "looks"), [(0, 4), (ENOUGH_MEMBERS - 1, 4), (ENOUGH_MEMBERS, 1), (200, 1)])
def test_a_newcomer_looks_again_soon_in_a_small_swarm_alone(members: int, looks: int) -> None:
    async def test(world: World) -> None:
        await fill(world, members)
        async with world.join("alice") as at_alice:
            await look_around(at_alice)
            await anyio.sleep(0.5 * HEARTBEAT)
            assert at_alice.num_heartbeats == looks

    run(test)


def test_who_joins_at_the_same_moment_is_met_within_seconds() -> None:
    """Each misses the other's first word."""

    async def test(world: World) -> None:
        async with world.join("alice") as at_alice, world.join("bob") as at_bob, anyio.create_task_group() as tasks:
            for membership in (at_alice, at_bob):
                tasks.start_soon(look_around, membership)
            await anyio.sleep(0.5 * HEARTBEAT)
            assert len(at_alice.members) == len(at_bob.members) == 1

    run(test)
