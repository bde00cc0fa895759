"""The contract of `Directory`, for every implementation."""

from __future__ import annotations

from typing import Any

import anyio

from dht.record import just_after, seal


def test_what_one_peer_stores_the_others_get(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice, bob, carol = [await swarm.join() for _ in range(3)]
        expires = swarm.expiry(60)
        assert await bob.say("key", b"hello", expires)
        for peer in (alice, bob, carol):
            ((value, until),) = (await peer.directory.get("key")).values()
            assert (value[65:], until) == (b"hello", expires)
            assert await peer.directory.get("another key") == {}

    swarm.run(test)


def test_every_peer_has_a_subkey_of_its_own(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        peers = [await swarm.join() for _ in range(3)]
        for number, peer in enumerate(peers):
            assert await peer.say("key", bytes([number]), swarm.expiry(60 + number))
        for peer in peers:
            assert await peer.hear("key") == {
                other.identity.peer_id: bytes([number]) for number, other in enumerate(peers)
            }

    swarm.run(test)


def test_a_later_expiry_replaces_and_an_earlier_one_does_not(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice, bob = await swarm.join(), await swarm.join()
        first = swarm.expiry(60)
        assert await alice.say("key", b"first", first)
        assert await alice.say("key", b"second", just_after(first))
        assert not await alice.say("key", b"third", first)
        assert await bob.hear("key") == {alice.identity.peer_id: b"second"}

    swarm.run(test)


def test_an_older_value_that_is_refused_does_not_shorten_the_life_of_the_newer(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice, bob = await swarm.join(), await swarm.join()
        assert await alice.say("key", b"new", swarm.expiry(60))
        assert not await alice.say("key", b"old", swarm.expiry(30))
        await swarm.wait(45)
        assert await bob.hear("key") == {alice.identity.peer_id: b"new"}

    swarm.run(test)


def test_what_has_expired_is_gone(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice, bob = await swarm.join(), await swarm.join()
        assert await alice.say("key", b"short", swarm.expiry(20))
        assert await bob.say("key", b"long", swarm.expiry(60))
        assert len(await alice.hear("key")) == len(await bob.hear("key")) == 2
        await swarm.wait(30)
        assert await alice.hear("key") == await bob.hear("key") == {bob.identity.peer_id: b"long"}
        await swarm.wait(31)
        assert await alice.hear("key") == await bob.hear("key") == {}
        assert not await bob.say("key", b"late", swarm.expiry(-1))

    swarm.run(test)


def test_records_that_are_not_to_be_believed_are_not_kept(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice, bob = await swarm.join(), await swarm.join()
        me, other, expires = alice.identity.peer_id, bob.identity.peer_id, swarm.expiry(60)
        mine = seal(alice.identity, "key", me, b"mine", expires)
        large = seal(alice.identity, "key", me, bytes(64 * 1024 + 1), expires)
        for_ever = swarm.expiry(1e6)
        for key, subkey, value, until in (
            ("key", other, mine, expires),
            ("key", me, mine[:-1] + b"?", expires),
            ("key", me, mine, just_after(expires)),
            ("another key", me, mine, expires),
            ("key", me, b"no record", expires),
            ("key", me, b"", expires),
            ("key", "no peer id", mine, expires),
            ("key", me, large, expires),
            ("key", me, seal(alice.identity, "key", me, b"", for_ever), for_ever),
        ):
            assert not await alice.directory.store(key, subkey, value, until)
            assert await bob.directory.get(key) == {}
        assert await alice.directory.store("key", me, mine, expires)
        assert await bob.hear("key") == {me: b"mine"}

    swarm.run(test)


def test_dead_and_frozen_members_do_not_block_the_others(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice, bob, carol, dave = [await swarm.join() for _ in range(4)]
        assert await carol.say("key", b"carol", swarm.expiry(600))
        carol.freeze()
        await dave.die()
        for peer in (alice, bob):
            # Two calls of 10 s at most, whatever the others do.
            with anyio.fail_after(25):
                assert await peer.say("key", b"alive", swarm.expiry(60))
                heard = await peer.hear("key")
            assert heard[peer.identity.peer_id] == b"alive"
            assert heard[carol.identity.peer_id] == b"carol"

    swarm.run(test)


def test_a_peer_alone_hears_itself(swarm: Any) -> None:
    async def test(swarm: Any) -> None:
        alice = await swarm.join()
        assert await alice.say("key", b"echo", swarm.expiry(60))
        assert await alice.hear("key") == {alice.identity.peer_id: b"echo"}

    swarm.run(test)
