"""A learner of a few numbers for gossip runs: NoLoCo's step on plain floats, so that means can be counted exactly."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import msgpack

from averaging.contribution import Contribution
from network.seam import PeerID
from peer.learner import Learner, Own, Trained

TOKENS_PER_ROUND = 10


@final
@dataclass(frozen=True, slots=True)
class ToyRules:
    """`momentum`, `lr` and `mixing` as in `optimizers.presets.Method`; `pull` towards zero and `noise` make deltas."""

    momentum: float = 0.0
    lr: float = 1.0
    mixing: float = 1.0


Drift = Callable[[int, Sequence[float]], list[float]]
"""What inner steps change in a round: delta = old - new, from the round and the replica."""


@final
class ToyReplica(Learner):
    """One replica: `x`, its momentum `m`."""

    def __init__(self, me: PeerID, start: Sequence[float], rules: ToyRules, drift: Drift | None = None) -> None:
        self.me = me
        self.x = list(start)
        self.m = [0.0] * len(self.x)
        self._rules = rules
        self._drift = drift
        self._delta = [0.0] * len(self.x)

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        if self._drift is not None:
            self._delta = self._drift(round_index, self.x)
        return Trained(TOKENS_PER_ROUND, self.validation_loss())

    def pack(self, round_index: int) -> bytes:
        packed: bytes = msgpack.packb([self._delta, self.x])
        return packed

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        said = [_said(c.payload, len(self.x)) for c in contributions]
        count, rules = len(said), self._rules
        for i in range(len(self.x)):
            delta = sum(deltas[i] for deltas, _ in said) / count
            pull = sum(x[i] for _, x in said) / count - self.x[i]
            self.m[i] = rules.momentum * self.m[i] - rules.lr * delta + rules.mixing * pull
            self.x[i] += self.m[i]
        self._delta = [0.0] * len(self.x)

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        raise AssertionError("a gossip run has no chain to move to")

    def fingerprint(self) -> bytes:
        return hashlib.blake2b(self._bytes(), digest_size=16).digest()

    def validation_loss(self) -> float:
        return math.sqrt(sum(value * value for value in self.x))

    def check(self, payload: bytes) -> None:
        _said(payload, len(self.x))

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        return {"toy": self._bytes()}

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        values = struct.unpack(f"<{2 * len(self.x)}d", files["toy"])
        self.x, self.m = list(values[: len(self.x)]), list(values[len(self.x) :])
        return self.fingerprint()

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        return hashlib.blake2b(files["toy"], digest_size=16).digest()

    def _bytes(self) -> bytes:
        return struct.pack(f"<{2 * len(self.x)}d", *self.x, *self.m)


def _said(payload: bytes, size: int) -> tuple[list[float], list[float]]:
    """The delta and the replica in a payload; raises `ValueError`."""
    try:
        delta, x = msgpack.unpackb(payload)
        values = [float(value) for value in [*delta, *x]]
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"toy payload: {error}") from error
    if len(delta) != size or len(x) != size or not all(math.isfinite(value) for value in values):
        raise ValueError("toy payload: wrong size, or not finite")
    return values[:size], values[size:]
