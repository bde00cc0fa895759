"""Heartbeats in large swarms: the more members, the rarer, and never so rare that a word expires before the next."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import anyio
import pytest

from dht.facts import members_key, runs_key, spec_key
from dht.membership import Membership, MembershipConfig
from dht.record import DEFAULT_LIMITS, expiry, seal
from simulator.virtual_time import wall_time
from tests.dht.test_membership import RUN, World, identity, member, peer_id, run

CONFIG = MembershipConfig()
PAUSE_MAX = CONFIG.run_seconds / 4
HOURS = 1.75
"""Within the life of a record."""
SLOW = MembershipConfig(fact_seconds=30.0)
"""So that a few members are a large swarm."""


async def fill(world: World, members: int) -> None:
    """So many others have said for long that they are there."""
    directory, key = world.view("crowd"), members_key(RUN.run_id)
    expires = expiry(wall_time(), DEFAULT_LIMITS.lifetime_seconds_max)
    for number in range(members):
        one = identity(f"crowd {number}")
        assert await directory.store(
            key, one.peer_id, seal(one, key, one.peer_id, member(1).encode(), expires), expires
        )


@pytest.mark.parametrize(
    ("members", "pause"), [(0, 30.0), (30, 30.0), (60, 60.0), (200, 200.0), (450, PAUSE_MAX), (700, PAUSE_MAX)]
)
def test_operations_of_a_peer_become_fewer_as_the_swarm_grows(members: int, pause: float) -> None:
    async def test(world: World) -> None:
        await fill(world, members)
        directory = world.view("alice")
        async with world.join("alice", directory=directory) as at_alice:
            await anyio.sleep(1)
            assert len(at_alice.members) == members
            beats, operations = at_alice.num_heartbeats, directory.num_gets + directory.num_stores
            seconds = 3600 * HOURS
            await anyio.sleep(seconds)
            beats = at_alice.num_heartbeats - beats
            operations = directory.num_gets + directory.num_stores - operations
            # A heartbeat comes up to a fifth early; it is one look and one word.
            assert 0.95 * seconds / pause <= beats <= seconds / (0.8 * pause) + 1
            renewals = seconds / (0.8 * CONFIG.run_seconds / 2) + 1
            assert 2 * beats <= operations <= 2 * beats + 3 * renewals
            # What looks bring does not grow with the swarm, before the pause is as long as it may be.
            assert pause == PAUSE_MAX or beats * members <= seconds / 0.8 + members

    run(test)


@pytest.mark.parametrize("members", [0, 60, 450, 700])
def test_in_a_swarm_of_any_size_a_peers_word_holds_until_its_next(members: int) -> None:
    async def test(world: World) -> None:
        await fill(world, members)
        async with world.join("alice"):
            await anyio.sleep(1)
            for _ in range(round(360 * HOURS)):
                await anyio.sleep(10)
                assert peer_id("alice") in world.facts.alive(members_key(RUN.run_id))

    run(test)


def test_who_lives_is_never_missed_while_a_swarm_grows_and_shrinks() -> None:
    """Its pace changes by seven times, from 30 s to 210 s and back."""
    rng = random.Random(1)

    async def test(world: World) -> None:
        here: dict[str, tuple[Membership, AsyncExitStack]] = {}
        known: dict[str, set[str]] = {}

        async def look(seconds: float) -> None:
            """Whom anybody has once met, it sees as long as that one is there."""
            for _ in range(round(seconds / 20)):
                await anyio.sleep(20)
                said = world.facts.alive(members_key(RUN.run_id))
                for name, (membership, _) in here.items():
                    assert peer_id(name) in said, f"the word of {name} has expired"
                    seen = {other for other in here if peer_id(other) in membership.members}
                    assert known[name] & here.keys() <= seen, f"{name} misses one that lives"
                    known[name] |= seen

        for number in range(8):
            name, stack = f"peer {number}", AsyncExitStack()
            here[name] = await stack.enter_async_context(world.join(name, config=SLOW)), stack
            known[name] = set()
            await look(rng.uniform(60, 300))
        await look(3600)
        assert all(len(known[name]) == 7 for name in here), "everybody has met everybody"
        beats = [membership.num_heartbeats for membership, _ in here.values()]
        await look(3600)
        for before, (membership, _) in zip(beats, here.values(), strict=True):
            assert 3600 / 210 - 1 <= membership.num_heartbeats - before <= 3600 / (0.8 * 210) + 1
        while len(here) > 1:
            _, stack = here.pop(max(here))
            await stack.aclose()
            await look(rng.uniform(60, 300))
        await look(1800)
        (last, _), *_ = here.values()
        beats = [last.num_heartbeats]
        await look(3600)
        assert last.num_heartbeats - beats[0] >= 3600 / 30 - 1, "alone it speaks as often as at first"
        await next(iter(here.values()))[1].aclose()

    run(test)


def test_a_run_stays_findable_though_its_announcer_knows_thousands() -> None:
    """A pause that went on growing would outlast the facts that are to be renewed at half of their life."""

    async def test(world: World) -> None:
        await fill(world, 240)
        async with world.join("alice", config=SLOW):
            await anyio.sleep(10)
            for _ in range(round(60 * HOURS)):
                for key in (runs_key(), spec_key(RUN.run_id)):
                    assert world.facts.alive(key).keys() == {peer_id("alice")}
                await anyio.sleep(60)

    run(test)
