"""A whole simulation as one value: the swarm, its world, what goes wrong in it; drawn from a seed, or written down."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from simulator import faults, text
from simulator.faults import (
    PHASES,
    SECONDS_MAX,
    At,
    Blackout,
    Crash,
    DaemonDeath,
    Delay,
    DiskLoss,
    Duplicate,
    Fault,
    Freeze,
    Late,
    Leave,
    Lossy,
    Partition,
    Skew,
    SlowCompute,
    SlowLink,
    Torn,
    When,
    check_within,
)

PEERS_MAX = 1000
FAULTS_MAX = 10_000
LEARNERS = ("units", "vector", "overlap", "streaming", "owners")
OWNERS_PEERS_MIN = 5
"""In a smaller group owners would save nothing."""


@final
@dataclass(frozen=True, slots=True)
class Scenario:
    """Times are virtual seconds. The swarm trains `rounds` rounds and until `faults_end`; then all faults stop,
    everybody is back, and each must commit again within `live_seconds`; in the end all leave.
    """

    peers: int = 4
    rounds: int = 15
    seed: int = 0
    """Of all chance inside: the same scenario gives the same trace."""
    faults_end: float = 30.0
    faults: tuple[Fault, ...] = ()
    learner: str = "units"
    """`units` are counted one by one; `vector` is 64 real numbers through the real method and a real compressor, with
    `overlap` training during the round, with `streaming` in fragments too; with `owners` it meets at those who own its
    parts.
    """
    min_peers: int = 1
    """A round has so many contributions."""
    live_seconds: float = 300.0
    delay: float = 0.02
    """One way, of every link."""
    jitter: float = 0.02
    uplink: float = 0.0
    """Bytes per second of every peer; 0 is unlimited."""
    train_seconds: float = 0.5
    speed_spread: float = 0.3
    """Peers differ in speed by up to this fraction."""
    snapshot_bytes: int = 4000
    """What a snapshot is said to weigh: the less, the sooner is a gap jumped instead of replayed."""
    snapshot_seconds: float = 20.0

    def __post_init__(self) -> None:
        check_within("peers", self.peers, 1, PEERS_MAX)
        check_within("rounds", self.rounds, 1, 1_000_000)
        check_within("min_peers", self.min_peers, 1, self.peers)
        check_within("seed", self.seed, 0, 2**32 - 1)
        check_within("faults_end", self.faults_end, 0, SECONDS_MAX)
        check_within("live_seconds", self.live_seconds, 1, SECONDS_MAX)
        for name in ("delay", "jitter", "speed_spread"):
            check_within(name, getattr(self, name), 0, 0.99 if name == "speed_spread" else 60)
        check_within("uplink", self.uplink, 0, 1e12)
        check_within("train_seconds", self.train_seconds, 0.01, 100_000)
        check_within("snapshot_bytes", self.snapshot_bytes, 1, 2**40)
        check_within("snapshot_seconds", self.snapshot_seconds, 0.1, SECONDS_MAX)
        if self.learner not in LEARNERS:
            raise ValueError(f"learner: {self.learner!r} is none of {', '.join(LEARNERS)}")
        if len(self.faults) > FAULTS_MAX:
            raise ValueError(f"faults: there are {len(self.faults)}, more than {FAULTS_MAX}")
        faults.check(self.faults, self.peers)
        late = {fault.peer for fault in self.faults if isinstance(fault, Late)}
        if 0 in late:
            raise ValueError("faults: peer 0 creates the run and cannot be late")

    @staticmethod
    def random(seed: int) -> Scenario:
        """First which kinds of fault there are at all, then how many of each and how strong: a world with everything
        a little wrong is only one of many.
        """
        return _draw(seed)

    def to_text(self) -> str:
        """TOML that `from_text` reads."""
        return text.written(self)

    @staticmethod
    def from_text(written: str) -> Scenario:
        """Raises `ValueError` that names the field."""
        scenario = text.parse(Scenario, written)
        for index, fault in enumerate(scenario.faults):
            if not isinstance(fault.at, When) and fault.at > scenario.faults_end:
                ends = f"faults_end = {scenario.faults_end:g}, when all faults stop"
                raise ValueError(f"faults[{index}].at: {fault.at:g} is later than {ends}")
        return scenario


# Chance.

_Drawn = Callable[["_Dice"], Fault]


@final
class _Dice:
    """The chances of one scenario."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"scenario {seed}")
        self.peers = self.rng.choice((2, 3, 3, 4, 4, 5, 6))
        self.end = self.number(8, 25)

    def number(self, least: float, most: float) -> float:
        """Rounded, for whoever reads it."""
        return round(self.rng.uniform(least, most), 2)

    def small(self, most: float) -> float:
        """Often near 0, now and then near `most`."""
        return round(most * self.rng.random() ** 3, 2)

    def peer(self) -> int:
        return self.rng.randrange(self.peers)

    def at(self) -> At:
        if self.rng.random() < 0.5:
            return self.number(0.2, self.end)
        return When(
            self.rng.choice(PHASES),
            self.rng.choice((None, self.peer())),
            nth=self.rng.randint(1, 12),
            after=self.rng.choice((0.0, 0.0, 0.001, self.small(0.2))),
        )

    def at_a_deed(self, peer: int) -> At:
        """For whoever is to go down: half the time in the midst of something of its own."""
        if self.rng.random() < 0.5:
            return self.at()
        return When(self.rng.choice(PHASES), peer, nth=self.rng.randint(1, 15), after=self.rng.choice((0.0, 0.001)))

    def sides(self) -> tuple[tuple[int, ...], ...]:
        """One or two sides besides the rest."""
        order = self.rng.sample(range(self.peers), self.peers)
        first = self.rng.randint(1, max(1, self.peers - 1))
        sides = [order[:first]]
        if self.peers - first > 1 and self.rng.random() < 0.3:
            sides.append(order[first : first + 1])
        return tuple(tuple(sorted(side)) for side in sides)


def _draw(seed: int) -> Scenario:
    dice = _Dice(seed)
    rng = dice.rng
    kinds = rng.sample(list(_MAKERS), rng.choice((0, 1, 1, 2, 2, 3, 4, 6)))
    made: list[Fault] = []
    for kind in kinds:
        most, make = _MAKERS[kind]
        made += [make(dice) for _ in range(rng.randint(1, most))]
    if rng.random() < 0.2 and dice.peers > 1:
        made.append(Late(dice.number(1, dice.end), rng.randrange(1, dice.peers)))
    learner = _learner(rng.random(), dice.peers)
    return Scenario(
        peers=dice.peers,
        rounds=rng.randint(5, 12),
        seed=seed,
        faults_end=dice.end,
        faults=tuple(made),
        learner=learner,
        train_seconds=rng.choice((0.5, 0.5, 1.0, 2.0)) if learner == "units" else 2.0,
        delay=rng.choice((0.001, 0.02, 0.02, 0.1)),
        jitter=rng.choice((0.0, 0.02, 0.1)),
        uplink=rng.choice((0.0, 0.0, 0.0, 100_000.0)),
        speed_spread=rng.choice((0.0, 0.3, 0.8)),
        snapshot_bytes=rng.choice((150, 1000, 4000)),
        snapshot_seconds=rng.choice((1.0, 5.0, 20.0)),
    )


def _learner(drawn: float, peers: int) -> str:
    chances = (("vector", 0.03), ("overlap", 0.05), ("streaming", 0.07), ("owners", 0.13))
    chosen = next((name for name, below in chances if drawn < below), "units")
    return "units" if chosen == "owners" and peers < OWNERS_PEERS_MIN else chosen


def _down(kind: type[Crash] | type[Torn] | type[Leave] | type[DiskLoss]) -> _Drawn:
    def make(dice: _Dice) -> Fault:
        peer = dice.peer()
        return kind(dice.at_a_deed(peer), peer, dice.small(12))

    return make


_MAKERS: dict[str, tuple[int, _Drawn]] = {
    "crash": (8, _down(Crash)),
    "torn": (5, _down(Torn)),
    "leave": (3, _down(Leave)),
    "disk_loss": (2, _down(DiskLoss)),
    "blackout": (2, lambda dice: Blackout(dice.at(), dice.small(10))),
    "freeze": (3, lambda dice: Freeze(dice.at(), dice.peer(), dice.small(50))),
    "partition": (3, lambda dice: Partition(dice.at(), dice.sides(), dice.small(50))),
    "slow_link": (3, lambda dice: SlowLink(dice.at(), dice.peer(), dice.number(1, 60), dice.number(1, 15))),
    "slow_compute": (3, lambda dice: SlowCompute(dice.at(), dice.peer(), dice.number(1, 20), dice.number(1, 15))),
    "lossy": (2, lambda dice: Lossy(dice.at(), dice.number(1, 20), dice.small(0.9), dice.small(0.5))),
    "daemon_death": (3, lambda dice: DaemonDeath(dice.at(), dice.peer(), dice.small(10))),
    "skew": (2, lambda dice: Skew(dice.at(), dice.peer(), dice.number(-400, 400), dice.number(1, 20))),
    "duplicate": (1, lambda dice: Duplicate(dice.at(), dice.small(1), dice.number(1, 20))),
    "delay": (2, lambda dice: Delay(dice.at(), dice.small(1), dice.small(4), dice.number(1, 20))),
}
"""For each kind how many there may be, and how one is made."""
