"""Contributions and shares to a round whose head is not known here yet: kept until it is, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from averaging.contribution import HEADER_BYTES_MAX, Contribution
from averaging.record import Hash
from network.seam import PeerID

EARLY_BYTES_MAX = 64 * 1024 * 1024
"""Of all peers together. When there is more, what has waited longest goes: whoever sent it finds a later round."""


@final
class Early:
    """Of each linked peer the newest; the very newest is kept whatever its size."""

    def __init__(self, bytes_max: int = EARLY_BYTES_MAX) -> None:
        self.bytes_kept = 0
        self._bytes_max = bytes_max
        self._kept: dict[PeerID, Contribution] = {}
        """Who has waited longest comes first."""

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, contribution: Contribution) -> None:
        """It came from its owner, whose earlier one is outdated."""
        self.drop(contribution.owner)
        self._kept[contribution.owner] = contribution
        self.bytes_kept += _size(contribution)
        while self.bytes_kept > self._bytes_max and len(self._kept) > 1:
            self.drop(next(iter(self._kept)))

    def drop(self, peer: PeerID) -> None:
        dropped = self._kept.pop(peer, None)
        if dropped is not None:
            self.bytes_kept -= _size(dropped)

    def take(self, head: Hash, is_known: Callable[[Hash], bool]) -> list[Contribution]:
        """For the round after `head`, in peer-id order. What is for another that `is_known` comes too late and goes."""
        taken = [self._kept[peer] for peer in sorted(self._kept) if self._kept[peer].prev == head]
        for peer in [peer for peer, kept in self._kept.items() if kept.prev == head or is_known(kept.prev)]:
            self.drop(peer)
        return taken


def _size(contribution: Contribution) -> int:
    return len(contribution.payload) + HEADER_BYTES_MAX
