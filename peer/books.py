"""What a peer has said and to whom it still owes what: the side of its residual that is not tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from averaging.chain import Left
from averaging.contribution import Contribution
from averaging.following import Moved
from averaging.record import Hash, Record
from network.seam import PeerID
from peer.learner import Own


@final
class Books:
    """Follows one process through its offers and the rounds that its log commits, leaves and joins.

    A peer's work is in its residual, in the chain it stands on, or lost with a process that crashed, and never in two
    of them. So a round that names an own contribution takes it out of the residual, and one that is left puts it back;
    what an earlier process offered, this one does not remember, and it must take it for all that waited then.
    """

    def __init__(self, me: PeerID, bytes_max: int) -> None:
        """`bytes_max` bounds what is remembered of old offers; what is forgotten is dropped, not said twice."""
        self._me = me
        self._bytes_max = bytes_max
        self._said: dict[Hash, Contribution] = {}
        self._again: set[Hash] = set()
        self.offered_on: Hash | None = None
        """The record after which something is offered, and neither committed nor void."""
        self.pending_tokens = 0
        """Trained here and not committed in the chain that this peer stands on."""

    def trained(self, tokens: int) -> None:
        self.pending_tokens += tokens

    def offered(self, contribution: Contribution) -> None:
        self.offered_on = contribution.prev
        self._remember(contribution)

    def committed(self, record: Record) -> Own:
        """The next record of the chain: what it means for what waits here."""
        if record.hash in self._again:
            self._again.discard(record.hash)
            return Own.NOTHING
        mine = record.member(self._me)
        was_offered = self.offered_on == record.prev
        if was_offered:
            self.offered_on = None
        if mine is None:
            return Own.MISSED if was_offered else Own.NOTHING
        self._spend(mine.weight)
        return Own.SAID if mine.digest in self._said else Own.FORGOTTEN

    def left(self, rounds: Sequence[Left]) -> None:
        """The chain was left: what was said in `rounds` waits again."""
        self.offered_on = None
        for mine in (r.mine for r in rounds if r.mine is not None):
            self.pending_tokens += mine.weight
            self._remember(mine)

    def moved(self, moved: Moved) -> list[bytes] | None:
        """A fetched state stands for other rounds: the own payloads in those joined; None if one is not remembered."""
        self.left(moved.left)
        joined = [record for record in moved.joined if record.hash not in self._again]
        self._again = (self._again - {record.hash for record in moved.joined}) | moved.again
        mine = [m for record in joined for m in record.members if m.peer == self._me]
        for member in mine:
            self._spend(member.weight)
        if any(m.digest not in self._said for m in mine):
            return None
        return [self._said[m.digest].payload for m in mine]

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
