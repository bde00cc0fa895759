"""The shared states that a peer keeps at hand: for those who join, and for itself if its chain must be left."""

from __future__ import annotations

from typing import final

from averaging.node import Node
from averaging.record import Record
from averaging.snapshots import Snapshot


@final
class Shelf:
    """A snapshot is of use to others once a later record certifies it; until then the one before is served, and the
    contributions since that one are kept.
    """

    def __init__(self, node: Node, saved: Snapshot) -> None:
        self._node = node
        self._newer: Snapshot | None = saved
        self.served: Snapshot | None = None
        self.newest_round = 0

    def put(self, snapshot: Snapshot, number: int) -> None:
        self._newer, self.newest_round = snapshot, number
        self.serve_newest()

    def serve_newest(self) -> None:
        """Called after every commit."""
        newer, chain = self._newer, self._node.engine.chain
        if newer is not None and newer.head != self._node.head.hash:
            self._newer = None
            if newer.head in chain:  # Else the chain was left in between.
                self.served = newer
                self._node.forget_before(chain.round_of(newer.head) + 1)

    def before(self, ancestor: Record) -> Snapshot:
        """The newest that is not younger than `ancestor`; the contributions since it are kept."""
        chain = self._node.engine.chain
        kept = [s for s in (self._newer, self.served) if s is not None and s.head in chain]
        old = [s for s in kept if chain.round_of(s.head) <= ancestor.round]
        return max(old, key=lambda snapshot: chain.round_of(snapshot.head))
