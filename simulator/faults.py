"""What can go wrong in a simulated swarm, as values: each fault says when, to whom and how badly.

Peers are numbers from 0 on. Every fault has `at`: virtual seconds since the beginning, or `When` somebody does
something. What lasts has `seconds`; whoever goes down comes back `restart_after` seconds later. At the scenario's
`faults_end` all of it ends, whatever is still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

SECONDS_MAX = 100_000.0
PHASES = (
    "trained",  # The inner steps of a round are done.
    "offered",  # The contribution has left; no vote has.
    "proposed",  # A record has left, with the proposer's own vote.
    "voted",  # An acceptance is on disk, and has not left.
    "accepted",  # An acceptance has left.
    "prepared",  # A takeover's ballot has left.
    "pledged",  # A promise is on disk, and has not left.
    "promised",  # A promise has left.
    "committed",  # A round is applied.
    "writing",  # A write to disk has begun.
    "saved",  # A snapshot is on disk, and the journal is begun anew.
)
"""What a peer does, as seen from outside: in the frames that it sends, on its disk, in its reports."""


@final
@dataclass(frozen=True, slots=True)
class When:
    """The moment, or `after` seconds later, at which `peer` (none: anybody) has done `phase` for the `nth` time;
    only in the round `round` if there is one. A message that goes to many counts once, when the first copy leaves.
    """

    phase: str
    peer: int | None = None
    round: int | None = None
    nth: int = 1
    after: float = 0.0


At = float | When


@final
@dataclass(frozen=True, slots=True)
class Crash:
    """The process ends at this instant: what is not on disk and has not left is gone."""

    at: At
    peer: int
    restart_after: float = 5.0


@final
@dataclass(frozen=True, slots=True)
class Torn:
    """A crash in the middle of the next write to disk, of which some beginning is kept."""

    at: At
    peer: int
    restart_after: float = 5.0


@final
@dataclass(frozen=True, slots=True)
class DiskLoss:
    """A crash after which the disk is gone, and the key with it: a newcomer returns in the peer's place."""

    at: At
    peer: int
    restart_after: float = 5.0


@final
@dataclass(frozen=True, slots=True)
class Blackout:
    """All peers crash at the same instant, and come back one by one within `restart_after`."""

    at: At
    restart_after: float = 5.0


@final
@dataclass(frozen=True, slots=True)
class Leave:
    """The peer says goodbye as the protocol has it, and comes back."""

    at: At
    peer: int
    restart_after: float = 5.0


@final
@dataclass(frozen=True, slots=True)
class Late:
    """The peer starts only now."""

    at: At
    peer: int


@final
@dataclass(frozen=True, slots=True)
class Freeze:
    """The peer's network and its training stand still."""

    at: At
    peer: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing passes between peers of different `sides`; who is named in none is on one more. One at a time."""

    at: At
    sides: tuple[tuple[int, ...], ...]
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class SlowLink:
    """Messages between `peer` and `other` (none: all others) take `factor` times their time."""

    at: At
    peer: int
    factor: float
    seconds: float
    other: int | None = None


@final
@dataclass(frozen=True, slots=True)
class SlowCompute:
    """All that the peer computes takes `factor` times its time."""

    at: At
    peer: int
    factor: float
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Lossy:
    """The share `dial_loss` of all dials fails; streams break at random, each `breaks` times a second on average."""

    at: At
    seconds: float
    dial_loss: float = 0.0
    breaks: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class DaemonDeath:
    """All streams of the peer break at once and it can neither dial nor be dialled for a while; the process lives."""

    at: At
    peer: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Skew:
    """The peer's wall clock is `clock` seconds ahead (or behind, below 0)."""

    at: At
    peer: int
    clock: float
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Duplicate:
    """The share `share` of all messages arrives twice."""

    at: At
    share: float
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Delay:
    """The share `share` of all messages arrives up to `late` seconds late, those of other links before it."""

    at: At
    share: float
    late: float
    seconds: float


Down = Crash | Torn | DiskLoss | Blackout | Leave
"""Somebody goes down, and comes back."""
Lasting = Freeze | Partition | SlowLink | SlowCompute | Lossy | DaemonDeath | Skew | Duplicate | Delay
"""Something is wrong for some `seconds`."""
Fault = Down | Late | Lasting

KINDS: dict[str, type[Fault]] = {
    "crash": Crash,
    "torn": Torn,
    "disk_loss": DiskLoss,
    "blackout": Blackout,
    "leave": Leave,
    "late": Late,
    "freeze": Freeze,
    "partition": Partition,
    "slow_link": SlowLink,
    "slow_compute": SlowCompute,
    "lossy": Lossy,
    "daemon_death": DaemonDeath,
    "skew": Skew,
    "duplicate": Duplicate,
    "delay": Delay,
}
"""By the name that a scenario's text gives them."""
NAMES = {kind: name for name, kind in KINDS.items()}

_BOUNDS: dict[str, tuple[float, float]] = {
    "seconds": (0, SECONDS_MAX),
    "restart_after": (0, SECONDS_MAX),
    "factor": (1, 1000),
    "dial_loss": (0, 1),
    "breaks": (0, 10),
    "clock": (-SECONDS_MAX, SECONDS_MAX),
    "share": (0, 1),
    "late": (0, 1000),
}


def check(faults: Sequence[Fault], peers: int) -> None:
    """Raises `ValueError` that names the field, as `faults[2].peer`."""
    for index, fault in enumerate(faults):
        where = f"faults[{index}]"
        _check_at(f"{where}.at", fault.at, peers)
        for name in ("peer", "other"):
            _check_peer(f"{where}.{name}", getattr(fault, name, None), peers)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(fault, name, None)
            if value is not None:
                check_within(f"{where}.{name}", value, least, most)
        if isinstance(fault, Partition):
            _check_sides(f"{where}.sides", fault.sides, peers)


def check_within(where: str, value: float, least: float, most: float) -> None:
    """NaN is within nothing."""
    if not least <= value <= most:
        raise ValueError(f"{where}: {value!r} is not in {least:g}..{most:g}")


def _check_at(where: str, at: At, peers: int) -> None:
    if not isinstance(at, When):
        check_within(where, at, 0, SECONDS_MAX)
        return
    if at.phase not in PHASES:
        raise ValueError(f"{where}.phase: {at.phase!r} is none of {', '.join(PHASES)}")
    _check_peer(f"{where}.peer", at.peer, peers)
    check_within(f"{where}.nth", at.nth, 1, 1_000_000)
    check_within(f"{where}.after", at.after, 0, SECONDS_MAX)
    if at.round is not None:
        check_within(f"{where}.round", at.round, 1, 1_000_000)


def _check_peer(where: str, peer: int | None, peers: int) -> None:
    if peer is not None and not 0 <= peer < peers:
        raise ValueError(f"{where}: {peer} is not in 0..{peers - 1}")


def _check_sides(where: str, sides: tuple[tuple[int, ...], ...], peers: int) -> None:
    named = [peer for side in sides for peer in side]
    for peer in named:
        _check_peer(where, peer, peers)
    if not named or len(set(named)) != len(named):
        raise ValueError(f"{where}: names nobody, or somebody twice: {[list(side) for side in sides]}")
