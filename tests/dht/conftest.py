"""Three kinds of swarm on which every claim about a `Directory` is tested."""

from __future__ import annotations

import os
import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from hivemind.p2p import P2P

from dht.directory import Directory
from dht.hivemind_directory import HivemindDirectoryConfig, open_directory
from dht.record import expiry, seal
from dht.validator import SignedRecordValidator
from network.identity import Identity, load_or_create
from simulator.directory import SharedFacts, SimulatedDirectory, SimulatedDirectoryConfig
from simulator.p2p import SimulatedP2PNetwork, hivemind_time
from simulator.virtual_time import run_virtual, wall_time

CALL_SECONDS_MAX = 10.0


@dataclass
class Peer:
    """One peer of a test's swarm."""

    identity: Identity
    directory: Directory
    freeze: Callable[[], Any]
    die: Callable[[], Awaitable[Any]]

    async def say(self, key: str, payload: bytes, expires: float) -> bool:
        me = self.identity.peer_id
        return await self.directory.store(key, me, seal(self.identity, key, me, payload, expires), expires)

    async def hear(self, key: str) -> dict[str, bytes]:
        """Payloads by peer id, unverified: the header is cut off."""
        return {subkey: value[65:] for subkey, (value, _) in (await self.directory.get(key)).items()}


class Swarm(ABC):
    """Peers with a directory each, and a clock that can be moved."""

    @abstractmethod
    def run(self, test: Callable[[Swarm], Awaitable[None]]) -> None: ...

    @abstractmethod
    async def join(self) -> Peer: ...

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    async def wait(self, seconds: float) -> None: ...

    def expiry(self, seconds: float) -> float:
        return expiry(self.now(), seconds)


class SharedSwarm(Swarm):
    """`SimulatedDirectory`: one dictionary on virtual time."""

    def run(self, test: Callable[[Swarm], Awaitable[None]]) -> None:
        config = SimulatedDirectoryConfig(delay_seconds_min=0.01, delay_seconds_max=0.1)
        self._facts = SharedFacts(wall_time, config)
        self._rng = random.Random(1)
        run_virtual(test, self)

    async def join(self) -> Peer:
        directory = SimulatedDirectory(self._facts, self._rng)

        async def die() -> None:
            directory.is_cut = True

        return Peer(Identity(self._rng.getrandbits(256).to_bytes(32, "big")), directory, lambda: None, die)

    def now(self) -> float:
        return wall_time()

    async def wait(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class SimulatedSwarm(Swarm):
    """`HivemindDirectory` on the simulated P2P, on virtual time."""

    def run(self, test: Callable[[Swarm], Awaitable[None]]) -> None:
        self._network = SimulatedP2PNetwork(seed=1)
        self._entry: list[str] = []

        async def run() -> None:
            async with AsyncExitStack() as self._stack:
                await test(self)

        with hivemind_time(wall_time):
            run_virtual(run)

    async def join(self) -> Peer:
        p2p = self._network.make_peer()
        validator = SignedRecordValidator(wall_time)
        opened = open_directory(p2p, self._entry, validator=validator)
        directory = await self._stack.enter_async_context(opened)
        self._entry = self._entry or [p2p.identity.peer_id]

        async def die() -> None:
            p2p.die()

        return Peer(p2p.identity, directory, p2p.freeze, die)

    def now(self) -> float:
        return wall_time()

    async def wait(self, seconds: float) -> None:
        await anyio.sleep(seconds)


async def _open_p2p(stack: AsyncExitStack, key_file: Path, initial_peers: list[str]) -> P2P:
    """A p2pd on loopback for the identity in `key_file`."""
    load_or_create(key_file)
    p2p = await P2P.create(
        initial_peers=initial_peers,
        identity_path=str(key_file),
        check_if_identity_free=False,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
    )

    async def close() -> None:
        if p2p._child.returncode is None:
            os.kill(p2p._child.pid, signal.SIGCONT)  # A frozen daemon would not hear that it is to end.
        await p2p.shutdown()

    stack.push_async_callback(close)
    return p2p


class RealSwarm(Swarm):
    """`HivemindDirectory` on p2pd on loopback; the clock is the machine's plus what the test has waited."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._skipped = 0.0

    def run(self, test: Callable[[Swarm], Awaitable[None]]) -> None:
        self._entry: list[str] = []
        self._num_peers = 0

        async def run() -> None:
            with anyio.fail_after(60):
                async with AsyncExitStack() as self._stack:
                    await test(self)

        with hivemind_time(self.now):
            anyio.run(run)

    async def join(self) -> Peer:
        self._num_peers += 1
        key_file = self._folder / f"{self._num_peers}.key"
        p2p = await _open_p2p(self._stack, key_file, self._entry)
        config = HivemindDirectoryConfig(rpc_seconds_max=1.0, call_seconds_max=CALL_SECONDS_MAX)
        validator = SignedRecordValidator(self.now)
        directory = await self._stack.enter_async_context(
            open_directory(p2p, self._entry, validator=validator, config=config)
        )
        self._entry = self._entry or [str(address) for address in await p2p.get_visible_maddrs()]

        def freeze() -> None:
            os.kill(p2p._child.pid, signal.SIGSTOP)

        return Peer(load_or_create(key_file), directory, freeze, p2p.shutdown)

    def now(self) -> float:
        return time.time() + self._skipped

    async def wait(self, seconds: float) -> None:
        self._skipped += seconds


@pytest.fixture
def open_p2p() -> Callable[[AsyncExitStack, Path, list[str]], Awaitable[P2P]]:
    return _open_p2p


@pytest.fixture(params=["shared", "simulated", "real"])
def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> Swarm:
    kinds: dict[str, Callable[[], Swarm]] = {
        "shared": SharedSwarm,
        "simulated": SimulatedSwarm,
        "real": lambda: RealSwarm(tmp_path),
    }
    return kinds[request.param]()
