"""Signs of life: which links need one, and when to look again."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from averaging.outbox import Outbox
from averaging.record import Record
from averaging.timing import TimingConfig
from network.seam import PeerID

EARLY = 0.75
"""A link that is silent for this part of its pause is served with those that are due: one look for many links."""

NEAR_SHARE = 1 / 10
"""Of a round is the pause between signs of life that votes wait for, within bounds."""
FAR_SHARE = 1.25
"""And of those that no vote waits for: what rounds say anyway is enough, as long as they go on."""


def pauses(
    me: PeerID, head: Record, config: TimingConfig, seconds: float | None, *, by_owners: bool
) -> Callable[[PeerID], float]:
    """How long `me` may be silent towards each. They follow the rounds, which last about `seconds`; None: as short as
    they get. In a large group the signs of life between all and those who vote would be most of what is said, and no
    vote waits for them: a dead peer costs its round the grace, no more.
    """
    if seconds is None:
        return lambda peer: config.heartbeat_seconds
    near = min(config.heartbeat_seconds_max, max(config.heartbeat_seconds, NEAR_SHARE * seconds))
    if not by_owners:
        return lambda peer: near
    far = min(config.idle_seconds_max, max(config.heartbeat_seconds, FAR_SHARE * seconds))
    # With whom it makes rounds: with all whom the log names, if it votes; with those who vote, if it is named.
    partners = head.peers if me in head.voters else head.voters if me in head.peers else ()
    return lambda peer: near if peer in partners else far


@final
class Pulse:
    """A look costs as much as there are links, so there are few of them, however many messages come and go."""

    def __init__(self, outbox: Outbox, config: TimingConfig) -> None:
        self._outbox = outbox
        self._config = config
        self.next_at = 0.0
        """When to call `due` again; a link that was spoken to in between makes it only earlier than needed."""

    def hurry(self) -> None:
        """A link is new or gone, or pauses may have become shorter."""
        self.next_at = 0.0

    def due(self, now: float, pause_of: Callable[[PeerID], float]) -> dict[float, list[PeerID]]:
        """Who needs a sign of life now, in peer-id order, by the pause that it is to announce. A longer pause than the
        last one holds only when the other has heard of it.
        """
        if now < self.next_at:
            return {}
        self.next_at = now + self._config.idle_seconds_max
        found: dict[float, list[PeerID]] = {}
        for peer, link in self._outbox.links.items():
            pause = pause_of(peer)
            wait = min(pause, link.pause)
            if link.sent + EARLY * wait <= now:
                found.setdefault(pause, []).append(peer)
                self.next_at = min(self.next_at, now + pause)
            else:
                self.next_at = min(self.next_at, link.sent + wait)
        return {pause: sorted(found[pause]) for pause in sorted(found)}
