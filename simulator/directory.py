"""The `Directory` as one dictionary that a simulated swarm shares: as strict as the DHT, and far cheaper."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import anyio

from dht.directory import Directory
from dht.record import DEFAULT_LIMITS, InvalidRecord, RecordLimits, Verify, open_record
from network.identity import Identity


@dataclass(frozen=True, slots=True)
class SimulatedDirectoryConfig:
    """Every call takes a uniformly drawn time and may fail."""

    delay_seconds_min: float = 0.0
    delay_seconds_max: float = 0.0
    failure_rate: float = 0.0
    """The share of calls that nobody answers, in 0..1."""
    call_seconds_max: float = 10.0
    """How long a call takes that nobody answers."""
    num_subkeys_max: int = 4096
    limits: RecordLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        if not 0 <= self.failure_rate <= 1:
            raise ValueError(f"failure_rate {self.failure_rate} is not in 0..1")


@final
class SharedFacts:
    """What the swarm has stored; make one, and a `SimulatedDirectory` of it for each peer."""

    def __init__(
        self,
        wall_time: Callable[[], float],
        config: SimulatedDirectoryConfig | None = None,
        verify: Verify = Identity.verify,
    ) -> None:
        self.config = config or SimulatedDirectoryConfig()
        self._wall_time = wall_time
        self._verify = verify
        self._facts: dict[str, dict[str, tuple[bytes, float]]] = {}

    def put(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        try:
            open_record(
                key,
                subkey,
                value,
                expires,
                now=self._wall_time(),
                limits=self.config.limits,
                verify=self._verify,
            )
        except InvalidRecord:
            return False
        facts = self.alive(key)
        if subkey in facts and facts[subkey][1] >= expires:
            return False
        if subkey not in facts and len(facts) >= self.config.num_subkeys_max:
            return False
        self._facts[key] = {**facts, subkey: (value, expires)}
        return True

    def alive(self, key: str) -> dict[str, tuple[bytes, float]]:
        now = self._wall_time()
        return {subkey: fact for subkey, fact in self._facts.get(key, {}).items() if fact[1] >= now}


@final
class SimulatedDirectory(Directory):
    """One peer's view of the shared facts."""

    def __init__(self, facts: SharedFacts, rng: random.Random) -> None:
        self.is_cut = False
        """While True, nobody answers this peer."""
        self.num_stores = 0
        self.num_gets = 0
        self._facts = facts
        self._rng = rng

    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        self.num_stores += 1
        return await self._is_answered() and self._facts.put(key, subkey, value, expires)

    async def get(self, key: str) -> dict[str, tuple[bytes, float]]:
        self.num_gets += 1
        return self._facts.alive(key) if await self._is_answered() else {}

    async def _is_answered(self) -> bool:
        config = self._facts.config
        if self.is_cut or self._rng.random() < config.failure_rate:
            await anyio.sleep(config.call_seconds_max)
            return False
        await anyio.sleep(self._rng.uniform(config.delay_seconds_min, config.delay_seconds_max))
        return True
