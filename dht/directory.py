"""The `Directory` seam: expiring facts under keys, shared by the whole swarm (a DHT)."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Directory(ABC):
    """Values are signed records (`dht.record`): whoever stores under a subkey must be the peer that it names."""

    @abstractmethod
    async def store(self, key: str, subkey: str, value: bytes, expires: float) -> bool:
        """Keep `value` until the wall time `expires` (seconds since the epoch); False if no peer would keep it.

        A later `expires` replaces the earlier value of the same subkey.
        """

    @abstractmethod
    async def get(self, key: str) -> dict[str, tuple[bytes, float]]:
        """What is stored under `key` and has not expired, by subkey; empty if nothing or nobody answers."""
