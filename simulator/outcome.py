"""What a caller decides about a swarm on virtual time, and what it learns in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from dht.membership import MembershipConfig
from network.simulated import Access, Link
from simulator.faults import Fault


@final
@dataclass(frozen=True, slots=True)
class SwarmConfig:
    """What the world is like; seconds are virtual."""

    peers: int = 4
    rounds: int = 50
    seed: int = 0
    link: Link = field(default_factory=lambda: Link(0.02, 0.02))
    access: Access = field(default_factory=Access)
    faults: tuple[Fault, ...] = ()
    faults_end: float = 0.0
    """Then all faults stop, and whoever is down comes back."""
    live_seconds: float | None = None
    """None: the peers end at the goal of `rounds`. Else they have none: each must commit within so long after the end
    of the faults, again and again until there are `rounds`; then all leave.
    """
    churn_rate: float = 0.0
    """The chance of each peer to crash in each round, for ever."""
    kill_every_seconds: float | None = None
    """Crash one random peer this often, for ever."""
    down_seconds: float = 5.0
    """After such a crash a peer is back within twice so long."""
    train_seconds: float = 0.5
    train_spread: tuple[float, float] = (0.8, 1.25)
    """Each training takes its usual time by a factor from between these."""
    stepwise: bool = False
    """Chance, freezes and slowness act on each inner step by itself, not on all that are done at once: what begins in
    the middle of a long round is then felt in it.
    """
    speed_spread: float = 0.3
    """Peers differ in speed by up to this fraction."""
    parts: int = 0
    """Above 0 owners reduce, each of them its parts of so many."""
    voters_max: int = 8
    """So many vote and own parts at most, where owners reduce."""
    start_peers: int | None = None
    """Offers that the first round waits for; None for all that are there from the beginning."""
    min_peers: int = 1
    """Contributions without which no round commits."""
    recovery_share: float = 0.0
    """Of the last round's peers, the least that may go on without a quorum."""
    snapshot_bytes: int = 4000
    snapshot_seconds: float = 20.0
    validate_rounds: int = 20
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    stall_seconds_max: float = 600.0
    """No commit for so long means that the protocol hangs."""


@final
@dataclass
class Outcome:
    """What happened, for summaries and checks."""

    rounds_committed: int = 0
    restarts: int = 0
    recoveries: int = 0
    """Restarts after which the peer committed again."""
    recovery_records: int = 0
    """Records with which a peer went on without a quorum (R8), in any chain."""
    faults: dict[str, int] = field(default_factory=dict)
    """How many of each kind happened."""
    seconds: float = 0.0
    trace: str = ""
    """Hash of everything that was reported, in order: equal for equal seeds."""
    members: float = 0.0
    """Contributions per round, on average."""
    validation: dict[int, float] = field(default_factory=dict)
    fingerprints_equal: bool = False
    tokens_of: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Processed and merged, by peer."""
    bytes_sent: int = 0
    packet_bytes_sent: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    """The largest sizes of queues and tables."""
    notes: list[str] = field(default_factory=list)

    @property
    def tokens_processed(self) -> int:
        return sum(processed for processed, _ in self.tokens_of.values())

    @property
    def tokens_merged(self) -> int:
        return sum(merged for _, merged in self.tokens_of.values())
