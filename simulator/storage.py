"""A simulated disk: writes take virtual time, and a crash in their middle leaves a prefix."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import final

import anyio

from averaging.storage import Saved, Storage

Watch = Callable[[str, Sequence[bytes]], None]
"""(what, journal entries): `writing` before a write, `written` and `saved` after it."""


@final
class SimulatedStorage(Storage):
    """Belongs to one peer and outlives its crashes."""

    def __init__(
        self, rng: random.Random, write_seconds: float = 0.004, watch: Watch = lambda what, entries: None
    ) -> None:
        self._rng = rng
        self._write_seconds = write_seconds
        self._watch = watch
        self.log: list[bytes] = []
        self.journal: list[bytes] = []
        self.snapshot: dict[str, bytes] | None = None

    async def load(self) -> Saved:
        return Saved(list(self.log), list(self.journal), None if self.snapshot is None else dict(self.snapshot))

    async def append(self, journal: Sequence[bytes], log: Sequence[bytes]) -> None:
        wrote = False
        self._watch("writing", journal)
        try:
            await anyio.sleep(self._write_seconds * self._rng.uniform(0.5, 2.0))
            wrote = True
        finally:
            if wrote:
                self.journal += journal
                self.log += log
            else:
                kept = self._rng.randint(0, len(journal) + len(log))
                self.journal += journal[:kept]
                self.log += log[: max(0, kept - len(journal))]
        self._watch("written", journal)

    async def save_snapshot(self, files: Mapping[str, bytes], journal: Sequence[bytes]) -> None:
        self._watch("writing", ())
        await anyio.sleep(self._write_seconds * self._rng.uniform(0.5, 2.0))
        self.snapshot = dict(files)
        await anyio.sleep(self._write_seconds * self._rng.uniform(0.5, 2.0))
        self.journal = list(journal)
        self._watch("saved", ())
