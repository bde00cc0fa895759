"""Our DHT node among liars, after the death of its daemon, and after a partition."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from dht.hivemind_directory import DirectoryUnavailable, HivemindDirectoryConfig, open_directory
from dht.record import expiry, key_id, open_record, seal
from dht.validator import BoundedStorage, SignedRecordValidator, StorageLimits
from network.identity import Identity, load_or_create
from simulator.p2p import SimulatedP2P, SimulatedP2PNetwork, hivemind_time
from simulator.virtual_time import run_virtual, wall_time

KEY = "key"
HASHED = DHTID.from_bytes(key_id(KEY))


def run(test: Callable[[SimulatedP2PNetwork], Awaitable[None]]) -> None:
    with hivemind_time(wall_time):
        run_virtual(test, SimulatedP2PNetwork(seed=1))


def open_node(p2p: SimulatedP2P, *initial: SimulatedP2P, **config: Any) -> Any:
    peers = [peer.identity.peer_id for peer in initial]
    return open_directory(
        p2p, peers, validator=SignedRecordValidator(wall_time), config=HivemindDirectoryConfig(**config)
    )


async def say(directory: Any, identity: Identity, payload: bytes, seconds: float = 600) -> bool:
    expires = expiry(wall_time(), seconds)
    record = seal(identity, KEY, identity.peer_id, payload, expires)
    return bool(await directory.store(KEY, identity.peer_id, record, expires))


async def hear(directory: Any) -> dict[str, bytes]:
    records = await directory.get(KEY)
    return {peer: open_record(KEY, peer, value, expires) for peer, (value, expires) in records.items()}


def dictionary(maxsize: Any, latest: Any, items: list[Any]) -> bytes:
    """hivemind's wire form, with whatever a liar puts into it."""
    packed = MSGPackSerializer.dumps([maxsize, latest, items])
    real = DictionaryDHTValue()
    real.packb = lambda: packed
    return bytes(MSGPackSerializer.dumps(real))


def found(value: bytes, expires: float = 2e9) -> dict[str, Any]:
    return {"type": dht_pb2.FOUND_DICTIONARY, "value": value, "expiration_time": expires}


def honest_item(identity: Identity) -> list[Any]:
    expires = expiry(wall_time(), 300)
    return [
        identity.peer_id,
        MSGPackSerializer.dumps(seal(identity, KEY, identity.peer_id, b"relayed", expires)),
        expires,
    ]


CAROL = Identity(b"c" * 32)
LIES: dict[str, Callable[[SimulatedP2P], dict[str, Any]]] = {
    "nothing, for ever": lambda victim: found(dictionary(float("inf"), float("inf"), []), float("inf")),
    "nothing, until NaN": lambda victim: found(dictionary(float("inf"), float("nan"), []), float("nan")),
    "one record, for ever": lambda victim: found(
        dictionary(float("inf"), float("inf"), [honest_item(CAROL)]), float("inf")
    ),
    "a size that is no number": lambda victim: found(dictionary("x", 2e9, [honest_item(CAROL)])),
    "a size of one": lambda victim: found(dictionary(1, 2e9, [honest_item(CAROL)])),
    "a forged record": lambda victim: found(
        dictionary(float("inf"), 2e9, [[victim.identity.peer_id, MSGPackSerializer.dumps(b"\x01" * 70), 1.8e9]])
    ),
    "records of odd types": lambda victim: found(
        dictionary(float("inf"), 2e9, [[1, 2, 3.0], [b"x", [], 1.8e9], [None, "text", 1.8e9]])
    ),
    "no dictionary": lambda victim: found(MSGPackSerializer.dumps([1, 2, 3])),
    "no msgpack": lambda victim: found(b"\xc1"),
    "a plain value": lambda victim: {
        "type": dht_pb2.FOUND_REGULAR,
        "value": MSGPackSerializer.dumps("hello"),
        "expiration_time": 2e9,
    },
    "ourselves as a neighbour": lambda victim: {
        "nearest_node_ids": [DHTID.generate(victim.peer_id.to_bytes()).to_bytes(), HASHED.to_bytes()],
        "nearest_peer_ids": [victim.peer_id.to_bytes(), victim.peer_id.to_bytes()],
    },
    "neighbours that are none": lambda victim: {
        "nearest_node_ids": [b"\xff" * 30, b""],
        "nearest_peer_ids": [b"", b"garbage"],
    },
}


async def serve_lies(liar: SimulatedP2P, victim: SimulatedP2P, lie: Callable[[SimulatedP2P], dict[str, Any]]) -> None:
    """A node right at the key's hash, so that every search comes to it first."""
    info = dht_pb2.NodeInfo(node_id=(int(HASHED) ^ 1).to_bytes(20, "big"))

    async def ping(request: Any, context: Any) -> Any:
        return dht_pb2.PingResponse(peer=info, dht_time=wall_time(), available=True)

    async def find(request: Any, context: Any) -> Any:
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(**lie(victim)) for _ in request.keys], peer=info)

    async def store(request: Any, context: Any) -> Any:
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys), peer=info)

    await liar.add_protobuf_handler("DHTProtocol.rpc_ping", ping, dht_pb2.PingRequest)
    await liar.add_protobuf_handler("DHTProtocol.rpc_find", find, dht_pb2.FindRequest)
    await liar.add_protobuf_handler("DHTProtocol.rpc_store", store, dht_pb2.StoreRequest)
    request = dht_pb2.PingRequest(peer=info, validate=False)
    await liar.call_protobuf_handler(victim.peer_id, "DHTProtocol.rpc_ping", request, dht_pb2.PingResponse)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_node_hides_nobody(lie: str) -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, bob, liar = [network.make_peer() for _ in range(3)]
        async with open_node(alice) as at_alice, open_node(bob, alice) as at_bob:
            assert await say(at_bob, bob.identity, b"bob")
            await serve_lies(liar, alice, LIES[lie])
            with anyio.fail_after(5):
                heard = await hear(at_alice)
                assert heard.pop(bob.identity.peer_id) == b"bob"
                assert set(heard) <= {CAROL.peer_id}
                assert await say(at_alice, alice.identity, b"alice")
            assert (await hear(at_bob))[alice.identity.peer_id] == b"alice"

    run(test)


def test_one_bad_record_does_not_void_the_good_ones_beside_it() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, liar = network.make_peer(), network.make_peer()
        bad = [alice.identity.peer_id, MSGPackSerializer.dumps(b"\x01" * 70), 1.8e9]
        async with open_node(alice) as at_alice:
            await serve_lies(liar, alice, lambda _: found(dictionary(float("inf"), 2e9, [bad, honest_item(CAROL)])))
            assert await hear(at_alice) == {CAROL.peer_id: b"relayed"}

    run(test)


def test_a_node_keeps_no_plain_values_and_none_in_its_cache() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, stranger = network.make_peer(), network.make_peer()
        me, expires = CAROL.peer_id, expiry(wall_time(), 60)
        record = MSGPackSerializer.dumps(seal(CAROL, KEY, me, b"", expires))
        plain = MSGPackSerializer.dumps(None)
        async with open_node(alice) as at_alice:
            for subkey, value, in_cache, kept in (
                (plain, record, False, False),
                (MSGPackSerializer.dumps(me), record, True, False),
                (MSGPackSerializer.dumps(me), MSGPackSerializer.dumps(b"x"), False, False),
                (b"", dictionary(float("inf"), 2e9, [[me, b"x", expires]]), False, False),
                (MSGPackSerializer.dumps(me), record, False, True),
            ):
                request = dht_pb2.StoreRequest(
                    keys=[key_id(KEY)], subkeys=[subkey], values=[value], expiration_time=[expires], in_cache=[in_cache]
                )
                response = await stranger.call_protobuf_handler(
                    alice.peer_id, "DHTProtocol.rpc_store", request, dht_pb2.StoreResponse
                )
                assert list(response.store_ok) == [kept]
                assert set(await hear(at_alice)) == ({me} if kept else set())

    run(test)


def stored(storage: BoundedStorage, number: int, *, key: int = 1, size: int = 10, expires: float = 100.0) -> bool:
    return storage.store_subkey(DHTID(key), str(number), bytes(size), expires)


def test_a_full_node_refuses_what_is_new_and_renews_what_it_has() -> None:
    with hivemind_time(lambda: 0.0):
        for limits, fits in (
            (StorageLimits(num_subkeys_max=3), 3),
            (StorageLimits(key_bytes_max=35), 3),
            (StorageLimits(total_bytes_max=49), 4),
        ):
            storage = BoundedStorage(limits)
            assert [stored(storage, number) for number in range(6)] == [True] * fits + [False] * (6 - fits)
            assert stored(storage, 0, expires=101.0)
            assert not stored(storage, 0, expires=101.0)
            assert stored(storage, 1, size=100, expires=101.0) == (limits == StorageLimits(num_subkeys_max=3))


def test_a_full_node_has_room_again_when_records_expire() -> None:
    now = 0.0
    with hivemind_time(lambda: now):
        storage = BoundedStorage(StorageLimits(num_keys_max=2, total_bytes_max=25))
        assert stored(storage, 0, key=1, expires=10.0)
        assert stored(storage, 0, key=2, expires=20.0)
        assert not stored(storage, 0, key=3)
        now = 15.0
        assert stored(storage, 0, key=3)
        assert storage.get(DHTID(1)) is None
        assert storage.get(DHTID(2)) is not None


def test_renewals_do_not_fill_the_memory() -> None:
    with hivemind_time(lambda: 0.0):
        storage = BoundedStorage(StorageLimits())
        for number in range(1000):
            assert stored(storage, 0, expires=100.0 + number)
        assert len(storage.expiration_heap) < 100
        assert len(storage.data[DHTID(1)].value.expiration_heap) < 100


def test_what_get_returns_is_not_the_storage_itself() -> None:
    with hivemind_time(lambda: 0.0):
        storage = BoundedStorage(StorageLimits())
        assert stored(storage, 0)
        entry = storage.get(DHTID(1))
        assert entry is not None
        entry.value.store("a stranger's", b"x", 100.0)
        again = storage.get(DHTID(1))
        assert again is not None
        assert set(again.value.data) == {"0"}


def test_after_the_death_of_its_daemon_a_peer_goes_on_with_a_new_one() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, bob = network.make_peer(), network.make_peer()
        async with open_node(alice) as at_alice, open_node(bob, alice) as at_bob:
            assert await say(at_alice, alice.identity, b"before")
            bob.die()
            bob_again = network.make_peer(bob.identity)
            await at_bob.restart(bob_again)
            assert await hear(at_bob) == {alice.identity.peer_id: b"before"}
            assert await say(at_bob, bob.identity, b"after")
            assert len(await hear(at_alice)) == 2
            # Bob still holds what he kept for others.
            alice.die()
            assert len(await hear(at_bob)) == 2

    run(test)


def test_after_a_restart_alone_a_peer_finds_the_others_later() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, bob = network.make_peer(), network.make_peer()
        async with open_node(alice) as at_alice, open_node(bob, alice) as at_bob:
            network.cut(alice, bob)
            bob.die()
            await at_bob.restart(network.make_peer(bob.identity))
            assert await say(at_bob, bob.identity, b"alone")
            assert await hear(at_alice) == {}
            network.mend()
            await anyio.sleep(60)
            await at_bob.get(KEY)
            assert await hear(at_alice) == {bob.identity.peer_id: b"alone"}

    run(test)


def test_two_halves_of_a_split_swarm_meet_again() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        peers = [network.make_peer() for _ in range(4)]
        async with AsyncExitStack() as stack:
            nodes = [await stack.enter_async_context(open_node(peer, *peers[:1], must_join=False)) for peer in peers]
            for left in peers[:2]:
                for right in peers[2:]:
                    network.cut(left, right)
            for _ in range(3):
                await anyio.sleep(30)
                for node, peer in zip(nodes, peers, strict=True):
                    await say(node, peer.identity, b"")
                    await hear(node)
            assert [len(await hear(node)) for node in nodes] == [2, 2, 2, 2]
            network.mend()
            for _ in range(4):
                await anyio.sleep(30)
                for node, peer in zip(nodes, peers, strict=True):
                    await say(node, peer.identity, b"")
            assert [len(await hear(node)) for node in nodes] == [4, 4, 4, 4]

    run(test)


def test_joining_fails_by_name_and_leaves_nothing_behind() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, bob = network.make_peer(), network.make_peer()
        alice.die()
        with pytest.raises(DirectoryUnavailable, match=alice.identity.peer_id):
            async with open_node(bob, alice):
                pass
        assert bob.served == {}
        async with open_node(bob, alice, must_join=False) as at_bob:
            assert await say(at_bob, bob.identity, b"alone")

    run(test)


def test_a_peer_whose_clock_is_wrong_is_told_so() -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        alice, bob = network.make_peer(), network.make_peer()
        async with open_node(alice):
            real = alice.served["DHTProtocol.rpc_ping"].handler

            async def late(request: Any, context: Any) -> Any:
                response = await real(request, context)
                response.dht_time -= 60
                return response

            del alice.served["DHTProtocol.rpc_ping"]
            await alice.add_protobuf_handler("DHTProtocol.rpc_ping", late, dht_pb2.PingRequest)
            with pytest.raises(DirectoryUnavailable, match="local time must be within"):
                async with open_node(bob, alice):
                    pass

    run(test)


@pytest.mark.parametrize("peer", ["", "/ip4/127.0.0.1/tcp/1", "not base58 0OIl"])
def test_an_initial_peer_without_an_id_is_named(peer: str) -> None:
    async def test(network: SimulatedP2PNetwork) -> None:
        validator = SignedRecordValidator(wall_time)
        with pytest.raises(ValueError, match="does not end in"):
            async with open_directory(network.make_peer(), [peer], validator=validator):
                pass

    run(test)


def test_a_real_peer_goes_on_after_the_death_of_its_daemon(tmp_path: Path, open_p2p: Any) -> None:
    def at(p2p: Any, entry: list[str]) -> Any:
        return open_directory(p2p, entry, validator=SignedRecordValidator(time.time))

    async def test() -> None:
        async with AsyncExitStack() as stack:
            alice = await open_p2p(stack, tmp_path / "alice", [])
            entry = [str(address) for address in await alice.get_visible_maddrs()]
            bob = await open_p2p(stack, tmp_path / "bob", entry)
            at_alice = await stack.enter_async_context(at(alice, []))
            at_bob = await stack.enter_async_context(at(bob, entry))
            me, expires = load_or_create(tmp_path / "bob"), expiry(time.time(), 60)
            await bob.shutdown()
            await at_bob.restart(await open_p2p(stack, tmp_path / "bob", entry))
            assert await at_bob.store(KEY, me.peer_id, seal(me, KEY, me.peer_id, b"after", expires), expires)
            assert set(await at_alice.get(KEY)) == {me.peer_id}

    anyio.run(test)
