"""hivemind's P2P in memory: an unmodified `DHTNode` runs on it, on virtual time, with delays, deaths and partitions."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import hivemind.dht.node  # noqa: F401  # `hivemind_time` must find the modules that read the time.
from hivemind.p2p import P2PContext, P2PDaemonError, P2PHandlerError, PeerID

from network.identity import Identity

SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class SimulatedLinks:
    """One way over any link takes a uniformly drawn time."""

    delay_seconds_min: float = 0.02
    delay_seconds_max: float = 0.1
    dial_seconds_max: float = 5.0
    """After this long a peer behind a partition counts as unreachable."""
    queue_messages_max: int = 16
    """Messages of one stream that wait for their reader."""


@dataclass(frozen=True, slots=True)
class _Served:
    handler: Callable[[Any, P2PContext], Any]
    input_type: Any
    stream_input: bool


@final
class SimulatedP2PNetwork:
    """Who is there, and what was sent. The same seed gives the same delays."""

    def __init__(self, seed: int, links: SimulatedLinks | None = None) -> None:
        self.links = links or SimulatedLinks()
        self.num_calls: Counter[str] = Counter()
        """Unary calls and streams, by protocol."""
        self.bytes_sent: Counter[str] = Counter()
        """By the base58 id of the peer that sent them."""
        self._rng = random.Random(seed)
        self._peers: dict[PeerID, SimulatedP2P] = {}
        self._cut: set[frozenset[PeerID]] = set()

    def make_peer(self, identity: Identity | None = None) -> SimulatedP2P:
        """A peer; one that comes back with its old identity takes the place of its former self."""
        identity = identity or Identity(self._rng.getrandbits(8 * SEED_BYTES).to_bytes(SEED_BYTES, "big"))
        peer = SimulatedP2P(self, identity)
        self._peers[peer.peer_id] = peer
        return peer

    def cut(self, one: SimulatedP2P, other: SimulatedP2P) -> None:
        """From now on these two do not reach each other."""
        self._cut.add(frozenset((one.peer_id, other.peer_id)))

    def mend(self) -> None:
        self._cut.clear()

    async def travel(self, source: PeerID, target: PeerID, num_bytes: int) -> None:
        """Raises `P2PDaemonError` where the message does not arrive; a frozen target keeps it for ever."""
        self.bytes_sent[source.to_base58()] += num_bytes
        await asyncio.sleep(self._rng.uniform(self.links.delay_seconds_min, self.links.delay_seconds_max))
        if frozenset((source, target)) in self._cut:
            await asyncio.sleep(self.links.dial_seconds_max)
            raise P2PDaemonError(f"no route to {target}")
        peer = self._peers.get(target)
        if peer is None or not peer.is_alive:
            raise P2PDaemonError(f"failed to dial {target}")
        if peer.is_frozen:
            await asyncio.get_running_loop().create_future()

    def served(self, target: PeerID, name: str) -> _Served:
        served = self._peers[target].served.get(name)
        if served is None:
            raise P2PDaemonError(f"protocols not supported: {name}")
        return served


@final
class SimulatedP2P:
    """The five members that `DHTNode` needs, and ways to break."""

    def __init__(self, network: SimulatedP2PNetwork, identity: Identity) -> None:
        self.identity = identity
        self.peer_id = PeerID.from_base58(identity.peer_id)
        self.is_alive = True
        self.is_frozen = False
        self.served: dict[str, _Served] = {}
        self._network = network

    def die(self) -> None:
        """From now on, calls to this peer fail."""
        self.is_alive = False

    def freeze(self) -> None:
        """From now on, calls to this peer are never answered."""
        self.is_frozen = True

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[[Any, P2PContext], Any],
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None:
        if name in self.served:
            raise P2PDaemonError(f"handler for protocol {name} already set")
        self.served[name] = _Served(handler, input_protobuf_type, stream_input)

    async def remove_protobuf_handler(
        self, name: str, *, stream_input: bool = False, stream_output: bool = False
    ) -> None:
        del self.served[name]

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, input: Any, output_protobuf_type: Any) -> Any:
        """The handler runs in the caller's task: cancelling the call cancels it, as p2pd does."""
        if not self.is_alive:
            raise P2PDaemonError("the daemon is dead")
        self._network.num_calls[name] += 1
        request = input.SerializeToString()
        await self._network.travel(self.peer_id, peer_id, len(request))
        served = self._network.served(peer_id, name)
        try:
            answer = await served.handler(served.input_type.FromString(request), self._context(peer_id, name))
        except Exception as error:  # Whatever the handler raises reaches the caller as this.
            await self._network.travel(peer_id, self.peer_id, 0)
            raise P2PHandlerError(repr(error)) from error
        response = answer.SerializeToString()
        await self._network.travel(peer_id, self.peer_id, len(response))
        return output_protobuf_type.FromString(response)

    async def iterate_protobuf_handler(
        self, peer_id: PeerID, name: str, input: Any, output_protobuf_type: Any
    ) -> AsyncIterator[Any]:
        """An async generator of the answers; closing it cancels the handler."""
        if not self.is_alive:
            raise P2PDaemonError("the daemon is dead")
        self._network.num_calls[name] += 1
        await self._network.travel(self.peer_id, peer_id, 0)
        served = self._network.served(peer_id, name)
        return self._answers(peer_id, name, served, input, output_protobuf_type)

    async def _answers(
        self, peer_id: PeerID, name: str, served: _Served, input: Any, output_type: Any
    ) -> AsyncIterator[Any]:
        queue: asyncio.Queue[Any] = asyncio.Queue(self._network.links.queue_messages_max)

        async def serve() -> None:
            requests = self._requests(peer_id, input, served.input_type)
            context = self._context(peer_id, name)
            try:
                argument = requests if served.stream_input else await requests.__anext__()
                answer = served.handler(argument, context)
                async for message in answer if isinstance(answer, AsyncIterable) else _once(answer):
                    response = message.SerializeToString()
                    await self._network.travel(peer_id, self.peer_id, len(response))
                    await queue.put(output_type.FromString(response))
                await queue.put(None)
            except Exception as error:  # As above.
                await queue.put(P2PHandlerError(repr(error)))

        task = asyncio.ensure_future(serve())
        try:
            while (message := await queue.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            task.cancel()

    async def _requests(self, peer_id: PeerID, input: Any, input_type: Any) -> AsyncIterator[Any]:
        async for message in input if isinstance(input, AsyncIterable) else _items(input):
            request = message.SerializeToString()
            await self._network.travel(self.peer_id, peer_id, len(request))
            yield input_type.FromString(request)

    def _context(self, peer_id: PeerID, name: str) -> P2PContext:
        return P2PContext(handle_name=name, local_id=peer_id, remote_id=self.peer_id)


async def _items(item: Any) -> AsyncIterator[Any]:
    yield item


async def _once(awaitable: Any) -> AsyncIterator[Any]:
    yield await awaitable


@contextmanager
def hivemind_time(wall_time: Callable[[], float]) -> Iterator[None]:
    """Inside this context hivemind's DHT reads `wall_time` instead of the machine's clock."""
    replaced: list[tuple[Any, Any]] = []
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and callable(getattr(module, "get_dht_time", None)):
            # Each module that imported the function has a reference of its own.
            replaced.append((module, module.get_dht_time))
    try:
        for module, _ in replaced:
            module.get_dht_time = wall_time
        yield
    finally:
        for module, original in replaced:
            module.get_dht_time = original
