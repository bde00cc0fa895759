"""What a peer has said and to whom it still owes what: the side of its residual that is not tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import msgpack

from averaging.chain import Left
from averaging.contribution import Contribution
from averaging.following import Moved
from averaging.record import NORMAL, Hash, Record
from network.seam import PeerID
from peer.learner import Own


@final
class Books:
    """Follows one process through its offers and the rounds that its log commits, leaves and joins.

    A peer's work is in its residual, in the chain it stands on, or lost with a process that crashed, and never in two
    of them. So a round that names an own contribution takes it out of the residual, and one that is left puts it back;
    what an earlier process offered, this one does not remember, and it must take it for all that waited then.
    """

    def __init__(
        self, me: PeerID, bytes_max: int, said: Sequence[Contribution] = (), *, by_parts: bool = False
    ) -> None:
        """`said`: what the snapshot that the residual comes from remembers. `bytes_max` bounds what is remembered; what
        is forgotten is dropped, not said twice. `by_parts`: owners reduce, and contributions are not a peer's own work.
        """
        self._by_parts = by_parts
        self._me = me
        self._bytes_max = bytes_max
        self._said = {contribution.digest: contribution for contribution in said}
        """Offers whose content is in the residual, or was when they were made, and that some chain may yet commit."""
        self._again: set[Hash] = set()
        self.offered_on: Hash | None = None
        """The record after which something is offered, and neither committed nor void."""
        self._shared_tokens = 0
        self.pending_tokens = 0
        """Trained here and not committed in the chain that this peer stands on."""

    def trained(self, tokens: int) -> None:
        self.pending_tokens += tokens

    def offered(self, contribution: Contribution) -> None:
        self.offered_on = contribution.prev
        self._remember(contribution)

    def shared(self, head: Record, tokens: int) -> None:
        """Parts of what waits went to their owners, for the round after `head`."""
        self.offered_on, self._shared_tokens = head.hash, tokens

    def reduced(
        self, record: Record, shared: tuple[frozenset[int], frozenset[int]] | None, parts: int
    ) -> tuple[frozenset[int], frozenset[int]] | None:
        """As `committed`, where owners reduce: the parts of this peer that are in it, and those of which that is not
        known; None if nothing was in the air.
        """
        self._again.discard(record.hash)
        if self.offered_on is None:
            return None
        is_it = self.offered_on == record.prev and shared is not None
        self.offered_on = None
        heard, unknown = shared if is_it and shared is not None else (frozenset(), frozenset(range(parts)))
        # Rounded up, as owners round down: no token is counted twice.
        self._spend(-(-self._shared_tokens * (len(heard) + len(unknown)) // parts))
        return heard, unknown

    def committed(self, record: Record) -> Own:
        """The next record of the chain: what it means for what waits here."""
        if record.hash in self._again:
            self._again.discard(record.hash)
            return Own.NOTHING
        mine = record.member(self._me)
        was_offered = self.offered_on == record.prev
        if was_offered:
            self.offered_on = None
        is_known = mine is not None and mine.digest in self._said
        if record.kind == NORMAL:  # No other offer on the same record can be committed any more, on no chain.
            self._said = {d: c for d, c in self._said.items() if c.prev != record.prev}
        if mine is None:
            return Own.MISSED if was_offered else Own.NOTHING
        self._spend(mine.weight)
        return Own.SAID if is_known else Own.FORGOTTEN

    def remembered(self) -> bytes:
        """What belongs into a snapshot beside the residual; `said` of a later process."""
        packed: bytes = msgpack.packb([c.encoded for c in self._said.values() if c.prev != self.offered_on])
        return packed

    def left(self, rounds: Sequence[Left]) -> None:
        """The chain was left: what was said in `rounds` waits again. Of parts nobody can tell: what is in the air is
        given up, with the tokens behind it.
        """
        was_offered, self.offered_on = self.offered_on is not None, None
        if self._by_parts:
            self._spend(self._shared_tokens if was_offered else 0)
            return
        for mine in (r.mine for r in rounds if r.mine is not None):
            self.pending_tokens += mine.weight
            self._remember(mine)

    def moved(self, moved: Moved) -> list[bytes] | None:
        """A fetched state stands for other rounds: the own payloads in those joined. None if one is not remembered: all
        that waits, and what is left, may be in it.
        """
        self.left(moved.left)
        joined = [r for r in moved.joined if r.hash not in self._again and not self._by_parts]
        self._again = (self._again - {record.hash for record in moved.joined}) | moved.again
        mine = [m for record in joined for m in record.members if m.peer == self._me]
        for member in mine:
            self._spend(member.weight)
        known = [self._said[m.digest].payload for m in mine if m.digest in self._said]
        prevs = {record.prev for record in joined if record.kind == NORMAL}
        self._said = {d: c for d, c in self._said.items() if c.prev not in prevs}
        return known if len(known) == len(mine) else None

    def _spend(self, tokens: int) -> None:
        self.pending_tokens = max(0, self.pending_tokens - tokens)

    def _remember(self, contribution: Contribution) -> None:
        self._said[contribution.digest] = contribution
        total = sum(len(c.encoded) for c in self._said.values())
        for digest, oldest in list(self._said.items())[:-1]:
            if total <= self._bytes_max:
                break
            total -= len(oldest.encoded)
            del self._said[digest]
