"""The `Directory` on hivemind's `DHTNode`, in our own process, over p2pd or anything with the five members of P2P."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import anyio
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PDaemonError
from hivemind.p2p import PeerID as HivemindPeerID
from hivemind.utils.logging import use_hivemind_log_handler

from dht.directory import Directory
from dht.record import key_id
from dht.validator import BoundedStorage, SignedRecordValidator, StorageLimits, harden
from network.identity import InvalidIdentity, public_key_of
from network.seam import PeerID

logger = logging.getLogger(__name__)


class DirectoryUnavailable(Exception):
    """No initial peer let us in; the message says why for each."""


class P2P(Protocol):
    """What `DHTNode` needs of hivemind's P2P; peers are addressed by id alone, so it must know where they are."""

    @property
    def peer_id(self) -> Any: ...

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Any,
        input_protobuf_type: Any,
        *,
        stream_input: bool = False,
        stream_output: bool = False,
        balanced: bool = False,
    ) -> None: ...

    async def remove_protobuf_handler(
        self, name: str, *, stream_input: bool = False, stream_output: bool = False
    ) -> None: ...

    async def call_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any: ...

    async def iterate_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class HivemindDirectoryConfig:
    """How far a search goes, and how long anything may take."""

    num_replicas: int = 5
    """The nodes nearest to a key that are asked to keep a value."""
    search_nodes: int = 6
    """A `get` ends when this many nodes nearest to the key have answered or failed; their answers are merged. Each
    answer carries all that is stored under the key, in a `store` too: it is what a large swarm pays for."""
    search_workers: int = 5
    """Nodes asked at the same time: a few frozen ones then cost one wait, not one each."""
    rpc_seconds_max: float = 2.0
    call_seconds_max: float = 10.0
    """One `store` or `get`, whatever the other nodes do."""
    bootstrap_seconds_max: float = 15.0
    close_seconds_max: float = 1.0
    rejoin_seconds: float = 60.0
    """Initial peers that left the routing table are tried again this often: so a split swarm meets again."""
    client: bool = False
    """Asks, but serves nobody and enters nobody's routing table."""
    must_join: bool = True
    """Whether `open_directory` raises when no initial peer answers, instead of trying again later."""
    storage: StorageLimits = field(default_factory=StorageLimits)

    def __post_init__(self) -> None:
        for name in ("num_replicas", "search_nodes", "search_workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@asynccontextmanager
async def open_directory(
    p2p: P2P,
    initial_peers: Sequence[str],
    *,
    validator: SignedRecordValidator,
    config: HivemindDirectoryConfig | None = None,
) -> AsyncIterator[HivemindDirectory]:
    """Join the DHT of the `initial_peers` (peer ids, or multiaddresses that end in `/p2p/<peer id>`; none: found one).

    Raises `DirectoryUnavailable`. Closes the node, but not `p2p`, when the context ends.
    """
    directory = HivemindDirectory(validator, config or HivemindDirectoryConfig())
    await directory._start(p2p, initial_peers)
    try:
        await directory._join(must=directory.config.must_join)
        yield directory
    finally:
        await directory._close()


@final
class HivemindDirectory(Directory):
    """Made by `open_directory`."""

    def __init__(self, validator: SignedRecordValidator, config: HivemindDirectoryConfig) -> None:
        self.config = config
        self._validator = validator
        # It outlives the node: after a restart of the daemon we still hold what we keep for others.
        self._storage = BoundedStorage(config.storage)
        self._initial_peers: list[HivemindPeerID] = []
        self._node: Any = None
        self._rejoin_due = 0.0

    @property
    def num_neighbours(self) -> int:
        """Nodes in the routing table; 0 means that we are alone."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        node = self._node
        await self._rejoin_if_due()

        async def store() -> bool:
            stored: bool = await node.store(
                key,
                value,
                float(expires),  # hivemind takes a whole number for a list of them.
                subkey=subkey,
                num_workers=self.config.search_workers,
                beam_size=max(self.config.search_nodes, self.config.num_replicas),
            )
            return stored

        return bool(await self._within_deadline(store))

    async def get(self, key: str) -> dict[str, tuple[bytes, float]]:
        node = self._node
        await self._rejoin_if_due()

        async def get() -> Any:
            return await node.get(
                key,
                # No answer may end the search early, as one with an infinite expiry would: nothing is above NaN.
                sufficient_expiration_time=math.nan,
                num_workers=self.config.search_workers,
                beam_size=self.config.search_nodes,
            )

        found = await self._within_deadline(get)
        if found is None or not isinstance(found.value, dict):
            return {}
        records = {subkey: (item.value, item.expiration_time) for subkey, item in found.value.items()}
        self._keep(key, records)
        return records

    async def restart(self, p2p: P2P, initial_peers: Sequence[str] | None = None) -> None:
        """Go on over a new `p2p` of the same peer, because the daemon of the old one died.

        Rejoins the old initial peers unless given others; if none answers, later calls try again.
        Raises `DirectoryUnavailable` if the new daemon does not answer either.
        """
        old = self._node
        old.is_alive = False
        await self._start(p2p, self._initial_peers if initial_peers is None else initial_peers)
        await self._join(must=False)

    async def _start(self, p2p: P2P, initial_peers: Sequence[str | HivemindPeerID]) -> None:
        _hush()
        others = dict.fromkeys(map(_peer_id, initial_peers))  # One peer may come with several addresses.
        self._initial_peers = [peer for peer in others if peer != p2p.peer_id]
        create = DHTNode.create(
            p2p=p2p,
            # The same peer is the same node after a restart: the routing tables of others stay right.
            node_id=DHTID.generate(p2p.peer_id.to_bytes()),
            num_replicas=self.config.num_replicas,
            wait_timeout=self.config.rpc_seconds_max,
            num_workers=self.config.search_workers,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
            reuse_get_requests=False,
            client_mode=self.config.client,
            record_validator=self._validator,
        )
        try:
            with anyio.fail_after(self.config.bootstrap_seconds_max):
                self._node = await create
        except TimeoutError as error:
            raise DirectoryUnavailable("the daemon does not answer") from error
        except P2PDaemonError as error:
            raise DirectoryUnavailable(f"the daemon refuses to serve the directory: {error}") from error
        harden(self._node, self._storage, self.config.storage)

    async def _join(self, *, must: bool) -> None:
        """What `DHTNode.create` would do with initial peers, but it leaves its handlers behind when it fails."""
        why = {str(peer): "no answer" for peer in self._initial_peers}

        async def ping(peer: HivemindPeerID) -> None:
            try:
                if await self._node.protocol.call_ping(peer, validate=True) is not None:
                    del why[str(peer)]
            except ValidationError as error:
                why[str(peer)] = str(error)

        self._rejoin_due = anyio.current_time() + self.config.rejoin_seconds
        with anyio.move_on_after(self.config.bootstrap_seconds_max):
            async with anyio.create_task_group() as tasks:
                for peer in self._initial_peers:
                    tasks.start_soon(ping, peer)
            if len(why) < len(self._initial_peers):
                await self._node.find_nearest_nodes([self._node.node_id])
        if self._initial_peers and len(why) == len(self._initial_peers):
            message = "no initial peer let us in: " + "; ".join(f"{peer}: {reason}" for peer, reason in why.items())
            if must:
                raise DirectoryUnavailable(message)
            logger.warning("%s (trying again later)", message)

    async def _rejoin_if_due(self) -> None:
        if not self._initial_peers or (anyio.current_time() < self._rejoin_due and self.num_neighbours > 0):
            return
        self._rejoin_due = anyio.current_time() + self.config.rejoin_seconds
        self._initial_peers.append(self._initial_peers.pop(0))  # Each in its turn: the first may be gone for good.
        peer = next((peer for peer in self._initial_peers if peer not in self._node.protocol.routing_table), None)
        if peer is not None:
            with anyio.move_on_after(self.config.call_seconds_max):
                await self._node.protocol.call_ping(peer)

    async def _within_deadline(self, call: Callable[[], Awaitable[Any]]) -> Any:
        with anyio.move_on_after(self.config.call_seconds_max):
            try:
                return await call()
            except AssertionError as error:  # hivemind asserts on what other nodes answer, too.
                logger.warning("a call to the directory failed inside hivemind: %r", error)
                return None
        logger.warning("the directory did not answer within %.0f s", self.config.call_seconds_max)
        return None

    def _keep(self, key: str, records: dict[str, tuple[bytes, float]]) -> None:
        """Whoever follows a key can answer for it: an observer then needs to reach no particular peer."""
        hashed = DHTID.from_bytes(key_id(key))
        for subkey, (value, expires) in records.items():
            self._storage.store_subkey(hashed, subkey, self._node.protocol.serializer.dumps(value), expires)

    async def _close(self) -> None:
        with anyio.move_on_after(self.config.close_seconds_max, shield=True):
            await self._node.shutdown()


def _peer_id(peer: str | HivemindPeerID) -> HivemindPeerID:
    if isinstance(peer, HivemindPeerID):
        return peer
    text = peer.rpartition("/p2p/")[2]
    try:
        public_key_of(PeerID(text))
    except InvalidIdentity as error:
        raise ValueError(f"initial peer {peer!r} does not end in /p2p/<peer id>: {error}") from error
    return HivemindPeerID.from_base58(text)


def _hush() -> None:
    """hivemind writes to the terminal by itself; from now on it logs like any other library, from warnings up."""
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(logging.WARNING)
