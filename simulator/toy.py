"""A learner of whole numbers: what it produces, sends and merges can be counted exactly, in microseconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import anyio
import msgpack

from averaging.contribution import Contribution
from network.identity import Signer, peer_id_of
from network.seam import PeerID
from peer.learner import Learner, Trained
from peer.worker import P, T, Worker

UNITS_PER_ROUND = 10
UNITS_PER_PACKET = 16
"""A packet says at most so much, like a compressor: the rest waits in the residual."""


@final
class ToyLearner(Learner):
    """Every round it produces units. A packet names the first and the count of those it says; the shared state knows
    how many of each peer's units it merged, so that a unit lost or merged twice shows at once.
    """

    def __init__(self, me: PeerID) -> None:
        self.me = me
        self.state = bytes(16)
        self.merged: dict[str, int] = {}
        self.produced = 0
        """Units ever made by this process and those before it, as far as they are remembered."""
        self.residual = 0
        self._said = 0

    def train(self, round_index: int, should_stop: Callable[[], bool]) -> Trained:
        self.produced += UNITS_PER_ROUND
        self.residual += UNITS_PER_ROUND
        return Trained(UNITS_PER_ROUND, 1.0 / (1 + sum(self.merged.values())))

    def pack(self) -> bytes:
        self._said = min(self.residual, UNITS_PER_PACKET)
        packed: bytes = msgpack.packb([self._said, self.produced])
        return packed

    def apply(self, number: int, contributions: Sequence[Contribution], *, offered: bool) -> None:
        digest = hashlib.blake2b(self.state, digest_size=16)
        for contribution in contributions:
            said, _ = msgpack.unpackb(contribution.payload)
            digest.update(contribution.digest)
            self.merged[contribution.owner] = self.merged.get(contribution.owner, 0) + said
            if contribution.owner == self.me:
                # After a restart nobody remembers what the offer left over: it is lost with the process.
                self.residual = self.residual - said if offered else 0
        self.state = digest.digest()

    def fingerprint(self) -> bytes:
        return self.state

    def validation_loss(self) -> float:
        return 1.0 / (1 + sum(self.merged.values()))

    def check(self, payload: bytes) -> None:
        try:
            fields: Any = msgpack.unpackb(payload)
        except (ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"toy payload: {error}") from error
        if not isinstance(fields, list) or len(fields) != 2 or not all(type(f) is int and f >= 0 for f in fields):
            raise ValueError("toy payload: not two counts")

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        residual = 0 if shared_only else self.residual
        return {"toy": msgpack.packb([self.state, self.merged, residual, self.produced])}

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        state, merged, residual, produced = msgpack.unpackb(files["toy"])
        self.state, self.merged = state, merged
        if own:
            self.residual, self.produced = residual, produced
        return self.state

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        state: bytes = msgpack.unpackb(files["toy"])[0]
        return state


@final
class ToySigner(Signer):
    """Signatures that anyone could forge, a hundred times faster than real ones: simulated peers are honest."""

    def __init__(self, number: int) -> None:
        self.peer_id = peer_id_of(hashlib.sha256(b"toy peer %d" % number).digest())

    def sign(self, message: bytes) -> bytes:
        return _sign(self.peer_id, message)

    def verify(self, peer: PeerID, message: bytes, signature: bytes) -> bool:
        return _sign(peer, message) == signature


def _sign(peer: PeerID, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=peer.encode(), digest_size=64).digest()


@final
class VirtualWorker(Worker):
    """Runs at once, and lets virtual time pass for it: as long as `cost(work)` says."""

    def __init__(self, cost: Callable[[Callable[..., Any]], float]) -> None:
        self._cost = cost

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        await anyio.sleep(self._cost(work))
        return work(*args, **kwargs)
