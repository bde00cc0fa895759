"""Membership on virtual time: who joins is seen, who leaves is gone, and the directory is asked rarely."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from dht.facts import MemberFact, RunFact, SpecFact, members_key, runs_key, spec_key
from dht.hivemind_directory import open_directory
from dht.membership import Announcement, Membership, MembershipConfig, open_membership
from dht.record import expiry, seal
from dht.runs import SpecNotFound, fetch_spec, find_runs
from dht.validator import SignedRecordValidator
from network.identity import Identity
from network.seam import PeerID
from simulator.directory import SharedFacts, SimulatedDirectory, SimulatedDirectoryConfig
from simulator.p2p import SimulatedP2PNetwork, hivemind_time
from simulator.virtual_time import run_virtual, wall_time

CREATOR = Identity(b"c" * 32)
SPEC = SpecFact.by(CREATOR, b"the whole specification")
RUN = RunFact(SPEC.run_id, "tiny", CREATOR.peer_id)
HEARTBEAT = MembershipConfig().heartbeat_seconds


def member(nonce: int = 1, **fields: Any) -> MemberFact:
    usual: dict[str, Any] = {
        "version": "1.0",
        "name": "",
        "addresses": ("/ip4/127.0.0.1/tcp/1",),
        "nonce": nonce,
        "head": b"",
        "round": 0,
        "tokens": 0,
        "loss": None,
        "reachable": True,
        "trains": True,
    }
    return MemberFact(**{**usual, **fields})


@dataclass
class World:
    """A swarm whose directory is one shared dictionary."""

    facts: SharedFacts
    met: list[tuple[str, PeerID]] = field(default_factory=list)

    def view(self, name: str) -> SimulatedDirectory:
        return SimulatedDirectory(self.facts, random.Random(name))

    @asynccontextmanager
    async def join(
        self,
        name: str,
        *,
        nonce: int = 1,
        fact: Callable[[], MemberFact] | None = None,
        directory: SimulatedDirectory | None = None,
        config: MembershipConfig | None = None,
    ) -> Any:
        async with open_membership(
            directory or self.view(name),
            identity(name),
            Announcement(RUN, SPEC, fact or (lambda: member(nonce))),
            wall_time=wall_time,
            rng=random.Random(name),
            config=config,
            on_member=lambda peer, _: self.met.append((name, peer)),
        ) as membership:
            yield membership


def identity(name: str) -> Identity:
    return Identity(name.encode().ljust(32, b"."))


def peer_id(name: str) -> PeerID:
    return identity(name).peer_id


def run(test: Callable[[World], Awaitable[None]], **config: Any) -> None:
    async def start() -> None:
        await test(World(SharedFacts(wall_time, SimulatedDirectoryConfig(delay_seconds_max=0.1, **config))))

    run_virtual(start)


def test_who_joins_is_seen_within_a_heartbeat() -> None:
    async def test(world: World) -> None:
        async with world.join("alice") as at_alice:
            await anyio.sleep(1)
            async with world.join("bob", fact=lambda: member(2, round=7)) as at_bob:
                await anyio.sleep(1)
                assert list(at_bob.members) == [peer_id("alice")]
                with anyio.fail_after(HEARTBEAT):
                    await at_alice.wait_changed()
                assert at_alice.members == {peer_id("bob"): member(2, round=7)}
            assert world.met == [("bob", peer_id("alice")), ("alice", peer_id("bob"))]

    run(test)


def test_progress_is_seen_without_calling_it_a_new_member() -> None:
    async def test(world: World) -> None:
        number = 0
        async with world.join("alice") as at_alice, world.join("bob", fact=lambda: member(round=number)):
            for number in range(5):
                await anyio.sleep(2 * HEARTBEAT)
                assert at_alice.members[peer_id("bob")].round == number
            assert world.met.count(("alice", peer_id("bob"))) == 1

    run(test)


def test_who_leaves_is_gone_within_a_heartbeat() -> None:
    async def test(world: World) -> None:
        async with world.join("alice") as at_alice:
            async with world.join("bob"):
                await anyio.sleep(2 * HEARTBEAT)
                assert peer_id("bob") in at_alice.members
            await anyio.sleep(HEARTBEAT)
            assert at_alice.members == {}

    run(test)


def test_leaving_takes_a_second_when_nobody_answers() -> None:
    async def test(world: World) -> None:
        directory = world.view("bob")
        async with world.join("bob", directory=directory):
            await anyio.sleep(1)
            directory.is_cut = True
            before = anyio.current_time()
        assert anyio.current_time() - before == MembershipConfig().leave_seconds_max

    run(test)


def test_a_heartbeat_cut_short_by_leaving_does_not_outlive_the_last_word() -> None:
    async def test(world: World) -> None:
        async with world.join("alice") as at_alice:
            for number in range(40):
                async with world.join("bob", nonce=number) as at_bob:
                    await anyio.sleep(0.01 * number)
                    assert isinstance(at_bob, Membership)
            await anyio.sleep(HEARTBEAT)
            assert at_alice.members == {}

    run(test)


def test_who_dies_is_forgotten_when_its_word_expires() -> None:
    async def test(world: World) -> None:
        directory = world.view("bob")
        async with world.join("alice") as at_alice, world.join("bob", directory=directory):
            await anyio.sleep(2 * HEARTBEAT)
            directory.is_cut = True
            await anyio.sleep(HEARTBEAT)
            assert peer_id("bob") in at_alice.members
            await anyio.sleep(MembershipConfig().member_seconds)
            assert at_alice.members == {}

    run(test)


def test_members_are_remembered_while_nobody_answers() -> None:
    async def test(world: World) -> None:
        directory = world.view("alice")
        async with world.join("alice", directory=directory) as at_alice, world.join("bob"):
            await anyio.sleep(2 * HEARTBEAT)
            directory.is_cut = True
            await anyio.sleep(2 * HEARTBEAT)
            assert peer_id("bob") in at_alice.members

    run(test)


def test_a_restart_is_seen_as_a_new_member_and_not_as_a_twin() -> None:
    async def test(world: World) -> None:
        async with world.join("alice") as at_alice:
            directory = world.view("bob")
            async with world.join("bob", nonce=1, directory=directory):
                await anyio.sleep(2 * HEARTBEAT)
                directory.is_cut = True  # It is killed: no last word.
            async with world.join("bob", nonce=2) as at_bob:
                await anyio.sleep(3 * HEARTBEAT)
                assert at_alice.members[peer_id("bob")].nonce == 2
                assert world.met.count(("alice", peer_id("bob"))) == 2
                assert not at_bob.has_twin

    run(test)


def test_a_peer_that_moved_is_announced_again() -> None:
    async def test(world: World) -> None:
        address = "/ip4/10.0.0.1/tcp/1"
        async with world.join("alice"), world.join("bob", fact=lambda: member(addresses=(address,))):
            await anyio.sleep(2 * HEARTBEAT)
            address = "/ip4/10.0.0.2/tcp/1"
            await anyio.sleep(2 * HEARTBEAT)
            assert world.met.count(("alice", peer_id("bob"))) == 2

    run(test)


def test_two_processes_with_one_key_notice_each_other() -> None:
    async def test(world: World) -> None:
        async with world.join("bob", nonce=1) as one:
            await anyio.sleep(0.4 * HEARTBEAT)
            async with world.join("bob", nonce=2) as other:
                await anyio.sleep(2 * HEARTBEAT)
                assert one.has_twin
                assert other.has_twin

    run(test)


def test_a_clock_set_back_does_not_silence_a_peer() -> None:
    async def test(world: World) -> None:
        ahead = expiry(wall_time(), 1000)
        me, key = peer_id("bob"), members_key(RUN.run_id)
        old = seal(identity("bob"), key, me, member(1).encode(), ahead)
        assert await world.view("bob").store(key, me, old, ahead)
        async with world.join("alice") as at_alice, world.join("bob", nonce=2) as at_bob:
            await anyio.sleep(3 * HEARTBEAT)
            assert at_alice.members[me].nonce == 2
            assert not at_bob.has_twin

    run(test)


def test_what_is_worth_telling_is_told_soon() -> None:
    async def test(world: World) -> None:
        number = 1
        async with world.join("bob", fact=lambda: member(round=number)) as at_bob:
            await anyio.sleep(5)
            number = 2
            at_bob.announce_now()
            await anyio.sleep(0.5)
            ((value, _),) = (await world.view("alice").get(members_key(RUN.run_id))).values()
            assert MemberFact.decode(value[65:]).round == 2
            before = at_bob.num_heartbeats
            for _ in range(100):
                at_bob.announce_now()
                await anyio.sleep(0.1)
            assert at_bob.num_heartbeats - before <= 5

    run(test)


def test_a_heartbeat_costs_one_store_and_one_get() -> None:
    async def test(world: World) -> None:
        directory = world.view("alice")
        async with AsyncExitStack() as stack:
            for number in range(9):
                await stack.enter_async_context(world.join(f"peer {number}"))
            at_alice = await stack.enter_async_context(world.join("alice", directory=directory))
            await anyio.sleep(60)
            beats, stores, gets = at_alice.num_heartbeats, directory.num_stores, directory.num_gets
            await anyio.sleep(3600)
            beats = at_alice.num_heartbeats - beats
            assert 120 <= beats <= 160
            # Four to five times an hour there is one more get, and two more stores where too few announce the run.
            assert beats <= directory.num_gets - gets <= beats + 6
            assert beats <= directory.num_stores - stores <= beats + 12

    run(test)


def test_a_run_stays_findable_after_its_creator_left_and_few_announce_it() -> None:
    async def test(world: World) -> None:
        async with AsyncExitStack() as stack:
            for number in range(12):
                await stack.enter_async_context(world.join(f"peer {number}", config=MembershipConfig(announcers=3)))
                await anyio.sleep(3)
            for _ in range(12):
                await anyio.sleep(600)
                assert 3 <= len(await world.view("x").get(runs_key())) <= 6
                assert len(await world.view("x").get(spec_key(RUN.run_id))) <= 6
                (found,) = await find_runs(world.view("x"), wall_time)
                assert found.fact == RUN
                assert await fetch_spec(world.view("x"), RUN.run_id, wall_time) == SPEC

    run(test)


def test_a_swarm_survives_a_directory_that_fails_often() -> None:
    async def test(world: World) -> None:
        async with AsyncExitStack() as stack:
            peers = [await stack.enter_async_context(world.join(f"peer {number}")) for number in range(5)]
            seen = 0
            for _ in range(50):
                await anyio.sleep(60)
                seen += sum(len(peer.members) for peer in peers)
            # A member is missed after three failures in a row, one time in a thousand.
            assert seen >= 0.98 * 50 * 5 * 4

    run(test, failure_rate=0.1, call_seconds_max=5.0)


def test_lies_under_the_members_key_are_counted_and_left_out() -> None:
    async def test(world: World) -> None:
        mallory, key, expires = identity("mallory"), members_key(RUN.run_id), expiry(wall_time(), 600)
        record = seal(mallory, key, mallory.peer_id, b"signed nonsense", expires)
        assert await world.view("mallory").store(key, mallory.peer_id, record, expires)
        async with world.join("alice") as at_alice, world.join("bob"):
            await anyio.sleep(2 * HEARTBEAT)
            assert list(at_alice.members) == [peer_id("bob")]
            assert at_alice.num_refused == at_alice.num_heartbeats

    run(test)


def test_a_specification_is_found_at_the_announcer_that_holds_it() -> None:
    async def test(world: World) -> None:
        expires = expiry(wall_time(), 600)
        with pytest.raises(SpecNotFound, match="nobody announces"):
            await fetch_spec(world.view("x"), RUN.run_id, wall_time)
        for name, payload in (("liar", b"nonsense"), ("other", SpecFact.by(CREATOR, b"another").encode())):
            me, key = identity(name), spec_key(RUN.run_id)
            record = seal(me, key, me.peer_id, payload, expires)
            assert await world.view(name).store(key, me.peer_id, record, expires)
        with pytest.raises(SpecNotFound, match="no announcer"):
            await fetch_spec(world.view("x"), RUN.run_id, wall_time)
        async with world.join("alice"):
            await anyio.sleep(1)
            assert await fetch_spec(world.view("x"), RUN.run_id, wall_time) == SPEC

    run(test)


@pytest.mark.parametrize("wrong", [{"jitter": 1.0}, {"member_seconds": 20.0}, {"announcers": 0}])
def test_settings_that_cannot_work_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MembershipConfig(**wrong)


def test_a_swarm_on_the_real_dht_code_meets_and_parts() -> None:
    async def test() -> None:
        network, entry = SimulatedP2PNetwork(seed=1), ""
        async with AsyncExitStack() as stack:
            peers, p2ps = [], []
            for number in range(8):
                p2p = network.make_peer()
                validator = SignedRecordValidator(wall_time)
                opened = open_directory(p2p, [entry] if entry else [], validator=validator)
                directory = await stack.enter_async_context(opened)
                entry = entry or p2p.identity.peer_id
                announcement = Announcement(RUN, SPEC, lambda number=number: member(number))  # type: ignore[misc]
                membership = open_membership(
                    directory, p2p.identity, announcement, wall_time=wall_time, rng=random.Random(number)
                )
                peers.append(await stack.enter_async_context(membership))
                p2ps.append(p2p)
            await anyio.sleep(2 * HEARTBEAT)
            assert [len(peer.members) for peer in peers] == [7] * 8
            p2ps[0].die()
            p2ps[1].freeze()
            await anyio.sleep(MembershipConfig().member_seconds + 2 * HEARTBEAT)
            assert [len(peer.members) for peer in peers[2:]] == [5] * 6

    with hivemind_time(wall_time):
        run_virtual(test)
