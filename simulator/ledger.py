"""What nobody in a swarm knows: all that was ever produced and signed, and what each chain of rounds merged of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, final

from averaging.contribution import Contribution
from averaging.record import Hash
from network.seam import PeerID

T = TypeVar("T")
SIGNED_PREFIX = b"peer contribution 1\0"
"""With which the message begins that the owner of a contribution signs; the digest follows."""


class BooksWrong(AssertionError):
    """Work was merged twice, vanished, or was subtracted where it had never been: the residuals' one promise."""


@final
@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """A round as it was applied: on which state, and what each owner said in it."""

    before: bytes
    after: bytes
    said: Mapping[PeerID, T]


@final
class History(Generic[T]):
    """All rounds that anybody applied, as a tree of states; a peer that follows another only repeats what is here."""

    def __init__(self) -> None:
        self.signed: set[Hash] | None = None
        """The contributions that their owners signed; None where nobody listens to the signers."""
        self._rounds: dict[bytes, Applied[T]] = {}
        self._edges: dict[tuple[bytes, tuple[Hash, ...]], bytes] = {}

    def listen(self, peer: PeerID, message: bytes) -> None:
        """For a signer: `peer` signs `message`."""
        if self.signed is None:
            self.signed = set()
        if message.startswith(SIGNED_PREFIX):
            self.signed.add(Hash(message[len(SIGNED_PREFIX) :]))

    def known(self, before: bytes, contributions: Sequence[Contribution]) -> Applied[T] | None:
        """The round that applies exactly these, in this order, to `before`, if somebody has applied it already."""
        after = self._edges.get((before, tuple(c.digest for c in contributions)))
        return None if after is None else self._rounds[after]

    def add(self, before: bytes, contributions: Sequence[Contribution], after: bytes, said: Mapping[PeerID, T]) -> None:
        """A round that nobody has applied before; raises `BooksWrong` if it cannot be."""
        if len({c.prev for c in contributions}) > 1:
            raise BooksWrong("a round mixes contributions to several records")
        if len({c.owner for c in contributions}) < len(contributions):
            raise BooksWrong("a round takes two contributions of one peer")
        for contribution in contributions:
            if self.signed is not None and contribution.digest not in self.signed:
                raise BooksWrong(f"{contribution.owner} never signed what is merged of it, at this weight")
        if after in self._rounds:
            raise BooksWrong("two different rounds lead to one state")
        self._edges[before, tuple(c.digest for c in contributions)] = after
        self._rounds[after] = Applied(before, after, said)

    def back_from(self, state: bytes) -> Iterator[Applied[T]]:
        """The rounds behind `state`, newest first."""
        while state in self._rounds:
            step = self._rounds[state]
            yield step
            state = step.before


@final
class Units:
    """The books of learners whose work is numbered units: `simulator.toy`."""

    def __init__(self, per_round: int) -> None:
        self.history: History[frozenset[int]] = History()
        self.produced: dict[PeerID, int] = defaultdict(int)
        self._per_round = per_round
        self._tip: bytes | None = None
        self._merged: dict[PeerID, set[int]] = defaultdict(set)
        """Of the chain that ends at `_tip`."""

    def produce(self, peer: PeerID) -> set[int]:
        first = self.produced[peer]
        self.produced[peer] += self._per_round
        return set(range(first, first + self._per_round))

    def apply(
        self,
        before: bytes,
        contributions: Sequence[Contribution],
        after: Callable[[], bytes],
        units_of: Callable[[bytes], frozenset[int]],
    ) -> Applied[frozenset[int]]:
        """Somebody applies a round: what it merges was made, and not merged before in the same chain."""
        known = self.history.known(before, contributions)
        if known is not None:
            return known
        said = {c.owner: units_of(c.payload) for c in contributions}
        self._stand_at(before)
        for owner, units in said.items():
            if units & self._merged[owner]:
                raise BooksWrong(f"{sorted(units & self._merged[owner])} of {owner} are merged again")
            if max(units, default=-1) >= self.produced[owner]:
                raise BooksWrong(f"units are merged that {owner} never made")
        state = after()
        self.history.add(before, contributions, state, said)
        for owner, units in said.items():
            self._merged[owner] |= units
        self._tip = state
        return Applied(before, state, said)

    def merged(self, owner: PeerID, state: bytes) -> set[int]:
        """What the chain that ends in `state` has merged of `owner`."""
        return set().union(*(step.said[owner] for step in self.history.back_from(state) if owner in step.said))

    def _stand_at(self, state: bytes) -> None:
        if self._tip == state:
            return
        merged: dict[PeerID, set[int]] = defaultdict(set)
        for step in self.history.back_from(state):
            for owner, units in step.said.items():
                merged[owner] |= units
        self._tip, self._merged = state, merged
