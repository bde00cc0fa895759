"""A learner of numbered units: what it produces, sends and merges is counted one by one, in microseconds."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import anyio
import msgpack

from averaging.contribution import Contribution
from averaging.record import Hash
from network.identity import Signer, peer_id_of
from network.seam import PeerID
from peer.learner import Learner, Trained
from peer.worker import P, T, Worker

UNITS_PER_ROUND = 10
UNITS_PER_PACKET = 16
"""A packet says at most so much, like a compressor: the rest waits in the residual."""


class BooksWrong(AssertionError):
    """Work was merged twice, vanished, or was subtracted where it had never been: the residuals' one promise."""


@final
class Ledger:
    """What nobody in the swarm knows: all units ever made, and those merged by the one chain."""

    def __init__(self) -> None:
        self.produced: dict[PeerID, int] = defaultdict(int)
        self.merged: dict[PeerID, set[int]] = defaultdict(set)
        self._rounds: dict[int, list[Hash]] = {}

    def learner(self, me: PeerID) -> ToyLearner:
        return ToyLearner(me, self)

    def produce(self, peer: PeerID) -> set[int]:
        first = self.produced[peer]
        self.produced[peer] += UNITS_PER_ROUND
        return set(range(first, first + UNITS_PER_ROUND))

    def merge(self, number: int, contributions: Sequence[Contribution]) -> None:
        """Somebody applies round `number`: it must be what all others apply, and nothing that was merged before."""
        digests = [c.digest for c in contributions]
        if self._rounds.setdefault(number, digests) is not digests:
            if self._rounds[number] != digests:
                raise BooksWrong(f"round {number} was applied with two sets of contributions")
            return
        for contribution in contributions:
            said, merged = units_of(contribution.payload), self.merged[contribution.owner]
            if said & merged:
                raise BooksWrong(f"round {number} merges {sorted(said & merged)} of {contribution.owner} again")
            if max(said, default=-1) >= self.produced[contribution.owner]:
                raise BooksWrong(f"round {number} merges what {contribution.owner} never made")
            merged |= said

    def check_left(self, learner: ToyLearner, *, crashed: bool) -> None:
        """At a peer's end: what waits was not merged, and without a crash all is either merged or waits."""
        waiting, merged = learner.waiting(), self.merged[learner.me]
        if waiting & merged:
            raise BooksWrong(f"{learner.me} would say {sorted(waiting & merged)} again")
        lost = self.produced[learner.me] - len(merged) - len(waiting)
        if lost and not crashed:
            raise BooksWrong(f"{lost} units of {learner.me} vanished, and it never crashed")


@final
class ToyLearner(Learner):
    """Every round it produces units, and it treats them as `TorchLearner` treats tensors: what is trained is the delta,
    a packet says a part of all that is wanted, the rest is the residual.
    """

    def __init__(self, me: PeerID, ledger: Ledger | None = None) -> None:
        self.me = me
        self.state = bytes(16)
        self.units_merged = 0
        self.residual: set[int] = set()
        self._ledger = ledger or Ledger()
        self._delta: set[int] = set()
        self._wanted: set[int] | None = None

    def waiting(self) -> set[int]:
        """All that was made and not said, or said in vain so far."""
        return self.residual | self._delta | (self._wanted or set())

    def train(self, round_index: int, should_stop: Callable[[], bool]) -> Trained:
        self._delta = self._ledger.produce(self.me)
        return Trained(UNITS_PER_ROUND, self.validation_loss())

    def pack(self) -> bytes:
        self._wanted = self.residual | self._delta
        self._delta = set()
        return payload_of(sorted(self._wanted)[:UNITS_PER_PACKET])

    def apply(self, number: int, contributions: Sequence[Contribution], *, offered: bool) -> None:
        self._ledger.merge(number, contributions)
        digest = hashlib.blake2b(self.state, digest_size=16)
        for contribution in contributions:
            digest.update(contribution.digest)
            self.units_merged += len(units_of(contribution.payload))
        self.state = digest.digest()
        mine = next((c for c in contributions if c.owner == self.me), None)
        wanted = self._wanted if offered else None
        if mine is not None:
            self.residual = self._after(units_of(mine.payload), wanted)
        elif wanted is not None:
            self.residual = wanted
        if offered or mine is not None:
            self._wanted = None

    def _after(self, said: set[int], wanted: set[int] | None) -> set[int]:
        if wanted is None:
            return set()
        if said - wanted:
            raise BooksWrong(f"{self.me} subtracts {sorted(said - wanted)}, which it did not want to say")
        return wanted - said

    def heard(self, payload: bytes | None) -> None:
        self.residual = self._after(set(), None) if payload is None else self._after(units_of(payload), self._wanted)
        self._wanted = None

    def fingerprint(self) -> bytes:
        return self.state

    def validation_loss(self) -> float:
        return 1.0 / (1 + self.units_merged)

    def check(self, payload: bytes) -> None:
        try:
            units_of(payload)
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError(f"toy payload: {error}") from error

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        residual = [] if shared_only else sorted(self.residual)
        return {"toy": msgpack.packb([self.state, self.units_merged, residual])}

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        self.state, self.units_merged, residual = msgpack.unpackb(files["toy"])
        if own:
            self.residual = set(residual)
        elif self._wanted is not None:
            self.residual = self._wanted
        return self.state

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        state: bytes = msgpack.unpackb(files["toy"])[0]
        return state


def payload_of(units: Iterable[int]) -> bytes:
    packed: bytes = msgpack.packb(list(units))
    return packed


def units_of(payload: bytes) -> set[int]:
    """Raises `ValueError` or `TypeError` for what is not a list of numbers."""
    units: Any = msgpack.unpackb(payload)
    if not isinstance(units, list) or not all(type(unit) is int and unit >= 0 for unit in units):
        raise ValueError("not a list of unit numbers")
    return set(units)


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
