"""Signs of life: which links need one, and when to look again."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from averaging.outbox import Outbox
from averaging.timing import TimingConfig
from network.seam import PeerID

IDLE_FACTOR = 8
"""So much more rarely speak two of whom nothing depends in this round."""
EARLY = 0.75
"""A link that is silent for this part of a heartbeat is served with those that are due: one look for many links."""


@final
class Pulse:
    """A look costs as much as there are links, so there are few of them, however many messages come and go."""

    def __init__(self, outbox: Outbox, config: TimingConfig) -> None:
        self._outbox = outbox
        self._config = config
        self.next_at = 0.0
        """When to call `due` again; a link that was spoken to in between makes it only earlier than needed."""

    def opened(self, now: float) -> None:
        """A link is new."""
        self.next_at = min(self.next_at, now + self._config.heartbeat_seconds)

    def due(self, now: float, is_idle: Callable[[PeerID], bool]) -> list[PeerID]:
        """Who needs a sign of life now, in peer-id order."""
        if now < self.next_at:
            return []
        links, pause = self._outbox.links, self._config.heartbeat_seconds
        self.next_at = now + pause
        found = []
        for peer in sorted(links):
            wait = pause * IDLE_FACTOR if is_idle(peer) else pause
            if links[peer].sent + EARLY * wait <= now:
                found.append(peer)
            else:
                self.next_at = min(self.next_at, links[peer].sent + wait)
        return found
