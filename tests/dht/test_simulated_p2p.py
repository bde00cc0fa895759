"""The simulated P2P keeps the promises of p2pd that `DHTNode` and streams rely on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import hivemind.dht.protocol as protocol
import pytest
from hivemind.p2p import P2PDaemonError, P2PHandlerError
from hivemind.proto import test_pb2

from simulator.p2p import SimulatedP2PNetwork, hivemind_time
from simulator.virtual_time import run_virtual

Request, Response = test_pb2.TestRequest, test_pb2.TestResponse


def run(test: Callable[[Any, Any, SimulatedP2PNetwork], Awaitable[None]]) -> None:
    async def start() -> None:
        network = SimulatedP2PNetwork(seed=1)
        await test(network.make_peer(), network.make_peer(), network)

    run_virtual(start)


def test_a_call_reaches_the_handler_with_the_id_of_the_caller() -> None:
    async def test(alice: Any, bob: Any, network: SimulatedP2PNetwork) -> None:
        callers = []

        async def double(request: Any, context: Any) -> Any:
            callers.append(context.remote_id)
            return Response(number=2 * request.number)

        await bob.add_protobuf_handler("double", double, Request)
        answer = await alice.call_protobuf_handler(bob.peer_id, "double", Request(number=21), Response)
        assert (answer.number, callers) == (42, [alice.peer_id])
        assert network.num_calls == {"double": 1}
        assert network.bytes_sent == {alice.identity.peer_id: 2, bob.identity.peer_id: 2}
        assert anyio.current_time() > 2 * network.links.delay_seconds_min

    run(test)


def test_failures_have_the_names_that_hivemind_expects() -> None:
    async def test(alice: Any, bob: Any, network: SimulatedP2PNetwork) -> None:
        async def fail(request: Any, context: Any) -> Any:
            raise KeyError("mine")

        await bob.add_protobuf_handler("fail", fail, Request)
        with pytest.raises(P2PHandlerError, match="mine"):
            await alice.call_protobuf_handler(bob.peer_id, "fail", Request(), Response)
        with pytest.raises(P2PDaemonError, match="not supported"):
            await alice.call_protobuf_handler(bob.peer_id, "unknown", Request(), Response)
        with pytest.raises(P2PDaemonError, match="already set"):
            await bob.add_protobuf_handler("fail", fail, Request)
        bob.die()
        with pytest.raises(P2PDaemonError, match="failed to dial"):
            await alice.call_protobuf_handler(bob.peer_id, "fail", Request(), Response)

    run(test)


def test_cancelling_a_call_cancels_the_handler() -> None:
    async def test(alice: Any, bob: Any, network: SimulatedP2PNetwork) -> None:
        ended = []

        async def wait(request: Any, context: Any) -> Any:
            try:
                await anyio.sleep(1000)
            finally:
                ended.append(anyio.current_time())

        await bob.add_protobuf_handler("wait", wait, Request)
        with anyio.move_on_after(3):
            await alice.call_protobuf_handler(bob.peer_id, "wait", Request(), Response)
        assert ended == [3]

    run(test)


def test_a_frozen_peer_never_answers() -> None:
    async def test(alice: Any, bob: Any, network: SimulatedP2PNetwork) -> None:
        bob.freeze()
        with anyio.move_on_after(1e5) as scope:
            await alice.call_protobuf_handler(bob.peer_id, "any", Request(), Response)
        assert scope.cancelled_caught

    run(test)


def test_streams_carry_messages_both_ways_until_they_are_closed() -> None:
    async def test(alice: Any, bob: Any, network: SimulatedP2PNetwork) -> None:
        served = []

        async def double(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                served.append(request.number)
                yield Response(number=2 * request.number)

        async def numbers() -> AsyncIterator[Any]:
            for number in range(1000):
                yield Request(number=number)

        await bob.add_protobuf_handler("double", double, Request, stream_input=True, stream_output=True)
        answers = await alice.iterate_protobuf_handler(bob.peer_id, "double", numbers(), Response)
        assert [(await answers.__anext__()).number for _ in range(5)] == [0, 2, 4, 6, 8]
        await answers.aclose()
        await anyio.sleep(100)
        # What was on its way may still have arrived, but no more than the queue holds.
        assert len(served) <= 5 + network.links.queue_messages_max + 2

    run(test)


def test_hivemind_gets_its_own_clock_back() -> None:
    with pytest.raises(KeyError), hivemind_time(lambda: 5.0):
        assert protocol.get_dht_time() == 5.0
        raise KeyError
    assert protocol.get_dht_time is time.time
