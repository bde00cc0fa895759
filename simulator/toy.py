"""A learner of numbered units: what it produces, sends and merges is counted one by one, in microseconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, final

import anyio
import msgpack

from averaging.contribution import Contribution
from network.identity import Signer, peer_id_of
from network.seam import PeerID
from peer.learner import Learner, Own, Trained
from peer.worker import P, T, Worker
from simulator.ledger import BooksWrong, Units

UNITS_PER_ROUND = 10
UNITS_PER_PACKET = 16
"""A packet says at most so much, like a compressor: the rest waits in the residual."""
THAW_SECONDS = 0.25
"""How soon a frozen worker notices that it is not any more."""


@final
class Ledger:
    """The books of a swarm of toy learners, and the place to get them from."""

    def __init__(self) -> None:
        self.units = Units(UNITS_PER_ROUND)

    def learner(self, me: PeerID) -> ToyLearner:
        return ToyLearner(me, self)


@final
class ToyLearner(Learner):
    """Every round it produces units, and it treats them as `TorchLearner` treats tensors: what is trained is the delta,
    a packet says a part of all that is wanted, the rest is the residual. Whenever it begins to train, its books must
    balance: what was made and is neither merged nor waiting was lost by an earlier process, and is no more than before.
    """

    def __init__(self, me: PeerID, ledger: Ledger | None = None) -> None:
        self.me = me
        self.state = bytes(16)
        self.units_merged = 0
        self.residual: set[int] = set()
        self._books = (ledger or Ledger()).units
        self._delta: set[int] = set()
        self._wanted: set[int] | None = None
        self._merged_mine = 0
        self._lost: int | None = None
        """None as long as this process may still find that an earlier one took work with it."""

    def waiting(self) -> set[int]:
        """All that was made and not said, or said in vain so far."""
        return self.residual | self._delta | (self._wanted or set())

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        self._balance()
        self._delta |= self._books.produce(self.me)
        return Trained(UNITS_PER_ROUND, self.validation_loss())

    def pack(self, round_index: int) -> bytes:
        self._wanted = self.residual | self._delta
        self._delta = set()
        return payload_of(sorted(self._wanted)[:UNITS_PER_PACKET])

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        if contributions:
            applied = self._books.apply(self.state, contributions, lambda: self._next_state(contributions), units_of)
            self.state = applied.after
            self.units_merged += sum(map(len, applied.said.values()))
            self._merged_mine += len(applied.said.get(self.me, ()))
        if own is Own.SAID:
            self.move([], [c.payload for c in contributions if c.owner == self.me])
        elif own is not Own.NOTHING:
            self.move([], None if own is Own.FORGOTTEN else [])

    def _next_state(self, contributions: Sequence[Contribution]) -> bytes:
        digest = hashlib.blake2b(self.state, digest_size=16)
        for contribution in contributions:
            digest.update(contribution.digest)
        return digest.digest()

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        waiting = self.residual if self._wanted is None else self._wanted
        if joined is None:
            self._lost = None  # An earlier process said it, and took with it what it did not say.
            waiting, joined = set(), ()
        back: set[int] = set().union(*map(units_of, left))
        if waiting & back:
            raise BooksWrong(f"{self.me} gets {sorted(waiting & back)} back, which waits here already")
        waiting = waiting | back
        for said in map(units_of, joined):
            if said - waiting:
                raise BooksWrong(f"{self.me} subtracts {sorted(said - waiting)}, which it did not want to say")
            waiting = waiting - said
        self.residual, self._wanted = waiting, None

    def _balance(self) -> None:
        lost = self._books.produced[self.me] - self._merged_mine - len(self.waiting())
        if lost < 0 or self._lost not in (None, lost):
            raise BooksWrong(f"{lost} units of {self.me} are lost, and {self._lost} were before")
        self._lost = lost

    def check_left(self, *, crashed: bool) -> None:
        """At a peer's end: what waits was not merged, and without a crash all is either merged or waits."""
        self._balance()
        again = self.waiting() & self._books.merged(self.me, self.state)
        if again:
            raise BooksWrong(f"{self.me} would say {sorted(again)} again")
        if self._lost and not crashed:
            raise BooksWrong(f"{self._lost} units of {self.me} vanished, and it never crashed")

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
        self._merged_mine = len(self._books.merged(self.me, self.state))
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


# Every peer reads the same payloads.
@lru_cache(maxsize=4096)
def units_of(payload: bytes) -> frozenset[int]:
    """Raises `ValueError` or `TypeError` for what is not a list of numbers."""
    units: Any = msgpack.unpackb(payload)
    if not isinstance(units, list) or not all(type(unit) is int and unit >= 0 for unit in units):
        raise ValueError("not a list of unit numbers")
    return frozenset(units)


@final
class ToySigner(Signer):
    """Signatures that anyone could forge, a hundred times faster than real ones: simulated peers are honest."""

    def __init__(self, number: int, on_sign: Callable[[PeerID, bytes], None] = lambda peer, message: None) -> None:
        self.peer_id = peer_id_of(hashlib.sha256(b"toy peer %d" % number).digest())
        self._on_sign = on_sign

    def sign(self, message: bytes) -> bytes:
        self._on_sign(self.peer_id, message)
        return _sign(self.peer_id, message)

    # The same function for every signer: who caches by it, caches for all.
    @staticmethod
    def verify(peer: PeerID, message: bytes, signature: bytes) -> bool:
        return _sign(peer, message) == signature


def _sign(peer: PeerID, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=peer.encode(), digest_size=64).digest()


def training_share(learner: Learner, work: Callable[..., Any], args: Sequence[Any]) -> float:
    """The part of a round's inner steps that a call does; 0 if it is no training."""
    if work != learner.train:
        return 0.0
    asked = args[2] if len(args) > 2 else None
    left = learner.steps_left or learner.round_steps
    return (left if asked is None else min(asked, left)) / learner.round_steps


@final
class VirtualWorker(Worker):
    """Runs at once, and lets virtual time pass for it: piece by piece as `cost(work, args)` says, which is asked for a
    piece when the one before is done, and while `is_frozen`. `spent` hears of each piece, also of one that a crash cuts
    off.
    """

    def __init__(
        self,
        cost: Callable[[Callable[..., Any], Sequence[Any]], Iterable[float]],
        is_frozen: Callable[[], bool] = lambda: False,
        spent: Callable[[Callable[..., Any], float], None] = lambda work, seconds: None,
    ) -> None:
        self._cost = cost
        self._is_frozen = is_frozen
        self._spent = spent

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        for seconds in self._cost(work, args):
            begun = anyio.current_time()
            try:
                await anyio.sleep(seconds)
            finally:
                self._spent(work, anyio.current_time() - begun)
            while self._is_frozen():  # noqa: ASYNC110
                await anyio.sleep(THAW_SECONDS)
        return work(*args, **kwargs)
