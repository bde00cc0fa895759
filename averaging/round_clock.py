"""The times of the round in the air, and the two deadlines that follow: when its group closes, when to take over."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol, final

from averaging.instance import Instance
from averaging.timing import Timing, TimingConfig, take_over_seconds, waited_for, worth_joining
from network.seam import PeerID

Alive = Callable[[PeerID], bool]


class Offers(Protocol):
    """What is there of a round to be closed: an `Instance`, or the shares that an owner collects."""

    @property
    def base(self) -> bytes | None: ...

    @property
    def members_max(self) -> int: ...

    def usable_owners(self) -> set[PeerID]: ...


@final
@dataclass(slots=True)
class RoundClock:
    """Local monotonic seconds; None for what has not happened yet."""

    began: float
    contributors: frozenset[PeerID]
    """Who contributed lately, and so is likely to offer."""
    enough: float | None = None
    """When as many had offered as the run demands."""
    started: float | None = None
    """When enough offers had come to start the grace."""
    spoke: float | None = None
    """When this peer had trained, and said so."""
    proposed: float | None = None
    """When the first proposal was made or heard."""
    ballot_seen: float | None = None
    """When the newest ballot was opened or heard."""
    freed: dict[PeerID, float] = field(default_factory=dict)
    """When each peer was last free to train anew: an offer of its was committed or became void."""
    came: dict[PeerID, float] = field(default_factory=dict)
    """When each peer was linked with: whoever came in the middle of the round cannot have begun before."""
    attempts: int = 0
    """How often this peer tried to take over."""
    is_patient: bool = False
    """Each who is missing speaks for many: all that live are waited for, and not called late so soon."""

    @property
    def waits_since(self) -> float | None:
        """Since when this peer does nothing but wait for others, who may be unable to come."""
        return self.spoke if self.started is None else self.started

    def forget(self, peer: PeerID) -> None:
        """The link to `peer` is gone: when it trains anew is no longer known."""
        self.freed.pop(peer, None)
        self.came.pop(peer, None)

    def start_if_enough(
        self, now: float, instance: Offers, needed: int, alive: Alive, patience: float = math.inf
    ) -> None:
        """Starts the grace when as many as the run demands have offered, and half of those expected, or `patience`
        seconds later: some who live may be unable to offer until a further record tells them how things stand.
        """
        if self.started is None and instance.base is not None:
            offered = len(instance.usable_owners())
            if offered < needed:
                self.enough = None  # An offer may be replaced by one that is made from another state.
                return
            self.enough = now if self.enough is None else self.enough
            if now >= self.enough + patience or _no_more_than(2 * offered, self.contributors, alive):
                self.started = now

    def start_at(self, patience: float) -> float | None:
        """When the grace starts at the latest; None if it has started, or too few have offered."""
        return None if self.enough is None or self.started is not None else self.enough + patience

    def close_at(self, instance: Offers, timing: Timing, config: TimingConfig, alive: Alive) -> float | None:
        """When the group of this round closes; None while too few have offered or a proposal is in the air."""
        if self.started is None or self.proposed is not None or instance.base is None:
            return None
        offered = instance.usable_owners()
        is_full = len(offered) >= instance.members_max
        missing = [] if is_full else [p for p in sorted(self.contributors - offered) if alive(p)]
        return self.started + self._grace_seconds(timing, config, offered, missing)

    def _grace_seconds(
        self, timing: Timing, config: TimingConfig, offered: set[PeerID], missing: list[PeerID]
    ) -> float:
        """Until those worth waiting for are really late; not at all if there are none, so that a long grace costs only
        when somebody has just failed.
        """
        assert self.started is not None
        peers = missing if self.is_patient else waited_for(timing, offered, missing)
        length = max(self.started - self.began, config.delay_seconds_min)
        least = max(config.delay_seconds_min, timing.decide.mean)
        grace, newcomers = 0.0, dict[PeerID, float]()
        for peer in peers:
            cycle, freed, came = timing.cycle(peer), self.freed.get(peer), self.came.get(peer)
            if freed is None and came is not None and cycle.is_known and not self.is_patient:
                newcomers[peer] = came + cycle.mean - self.began
            elif freed is None or peer not in timing.cycles:
                grace = max(grace, least, length / 2)
            else:
                grace = max(grace, least, freed + (cycle.high if self.is_patient else cycle.late) - self.started)
        present = len(offered) + len(peers) - len(newcomers)
        for peer in worth_joining(length + grace, present, newcomers):
            grace = max(grace, least, self.came[peer] + timing.cycle(peer).late - self.started)
        return min(grace, max(2 * length, config.delay_seconds_min), config.delay_seconds_max)

    def take_over_at(
        self, me: PeerID, instance: Instance, timing: Timing, config: TimingConfig, alive: Alive
    ) -> float | None:
        """When this voter stops waiting for the proposals of others; None while it has no reason to."""
        head = instance.head
        if me not in head.voters:
            return None
        since = self.ballot_seen
        if since is None:
            since = self.close_at(instance, timing, config, alive)
            if since is None or instance.may_propose_at_zero(me):
                return None
        others = sorted(v for v in head.voters if v != head.lead and alive(v))
        rank = 0 if me == head.lead else 1 + (others.index(me) if me in others else len(others))
        length = max(0.0, (self.started if self.started is not None else since) - self.began)
        wait = take_over_seconds(timing, config, length, rank, self.attempts)
        if self.ballot_seen is None and not alive(head.lead):
            # Nothing can come from a lead that is gone: only the turn among the voters is waited for.
            wait = min(wait, rank * max(config.delay_seconds_min, timing.decide.mean))
        return since + wait


def _no_more_than(most: int, peers: Collection[PeerID], alive: Alive) -> bool:
    """Whether at most so many are alive; looks at no more of them than it must."""
    if len(peers) <= most:
        return True
    count = 0
    for peer in peers:
        count += alive(peer)
        if count > most:
            return False
    return True
