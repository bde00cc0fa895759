"""A learner of numbered units: what it produces, sends and merges is counted one by one, in microseconds."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import anyio
import msgpack

from averaging.contribution import Contribution
from network.identity import Signer, peer_id_of
from network.seam import PeerID
from peer.learner import Learner, Own, Trained
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
        self._merged: dict[bytes, Mapping[PeerID, int]] = {bytes(16): {}}
        """Of each state that any chain came to: the units of each peer in it, as the bits of a number."""

    def learner(self, me: PeerID) -> ToyLearner:
        return ToyLearner(me, self)

    def produce(self, peer: PeerID) -> set[int]:
        first = self.produced[peer]
        self.produced[peer] += UNITS_PER_ROUND
        return set(range(first, first + UNITS_PER_ROUND))

    def merge(self, before: bytes, after: bytes, contributions: Sequence[Contribution]) -> None:
        """Somebody goes from one state to another: nothing that a chain holds is merged into it again."""
        if after in self._merged:
            return
        merged = dict(self._merged[before])
        for contribution in contributions:
            said, known = units_of(contribution.payload), merged.get(contribution.owner, 0)
            again = [unit for unit in sorted(said) if known >> unit & 1]
            if again:
                raise BooksWrong(f"units {again} of {contribution.owner} are merged again")
            if max(said, default=-1) >= self.produced[contribution.owner]:
                raise BooksWrong(f"{contribution.owner} never made all that is merged")
            merged[contribution.owner] = known | sum(1 << unit for unit in said)
        self._merged[after] = merged

    def merged(self, state: bytes, peer: PeerID) -> set[int]:
        """The units of `peer` in the chain that came to `state`."""
        bits = self._merged[state].get(peer, 0)
        return {unit for unit in range(bits.bit_length()) if bits >> unit & 1}

    def check_left(self, learner: ToyLearner, *, crashed: bool) -> None:
        """At a peer's end: what waits was not merged, and without a crash all is either merged or waits."""
        waiting, merged = learner.waiting(), self.merged(learner.state, learner.me)
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

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        before = self.state
        if contributions:
            digest = hashlib.blake2b(before, digest_size=16)
            for contribution in contributions:
                digest.update(contribution.digest)
                self.units_merged += len(units_of(contribution.payload))
            self.state = digest.digest()
            self._ledger.merge(before, self.state, contributions)
        if own is Own.SAID:
            self.move([], [next(c.payload for c in contributions if c.owner == self.me)])
        elif own is Own.FORGOTTEN:
            self.move([], None)
        elif own is Own.MISSED:
            self.move([], [])

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        kept = set() if joined is None else self.residual if self._wanted is None else self._wanted
        back = set().union(*map(units_of, left)) if left else set()
        if kept & back:
            raise BooksWrong(f"{self.me} wants {sorted(kept & back)} twice")
        kept = kept | back
        for said in map(units_of, joined or ()):
            if said - kept:
                raise BooksWrong(f"{self.me} subtracts {sorted(said - kept)}, which it did not want to say")
            kept = kept - said
        self.residual, self._wanted = kept, None

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
