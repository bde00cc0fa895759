"""What a swarm of engines goes through, and what one of its peers is."""

from __future__ import annotations

from dataclasses import dataclass, field

from averaging.engine import Engine
from simulator.toy import ToySigner


@dataclass
class Chaos:
    """How hard the world is; probabilities are per message or per second."""

    delay: float = 0.02
    jitter: float = 0.05
    loss: float = 0.0
    breaks: float = 0.0
    crashes: float = 0.0
    blackouts: float = 0.0
    """The share of commits right after which all peers crash at the same instant: before the log is written."""
    torn: float = 0.0
    """The share of durable writes in whose middle the peer crashes."""
    down_seconds: float = 2.0
    deaths: float = 0.0
    """The share of crashes after which a peer never comes back, as long as two are left."""
    partitions: float = 0.0
    """How often a second the peers fall into two sides."""
    partition_seconds: float = 60.0
    quiet_after: float = float("inf")
    """From then on nothing fails any more but single messages, and all sides are one."""
    compute: float = 0.5
    start_peers: int = 1
    parts: int = 0
    """Owners reduce, each its part of so many; 0: everybody gets everything."""
    voters_max: int = 4
    compact_rounds: int = 32
    """Every so many rounds the journal is begun anew; half as many rounds can still be replayed by others."""


@dataclass
class ToyPeer:
    signer: ToySigner
    engine: Engine | None = None
    journal: list[bytes] = field(default_factory=list)
    log: list[bytes] = field(default_factory=list)
    lazy: list[bytes] = field(default_factory=list)
    lazy_log: list[bytes] = field(default_factory=list)
    life: int = 0
    state: bytes = b""
    round: int = 0
    at: bytes = b""
    """The record whose state this is."""
    side: int = 0
    units: dict[int, int] = field(default_factory=dict)
    """Where owners reduce: what it shared last of each part."""
    said: dict[bytes, bytes] = field(default_factory=dict)
    """In this life: its own contribution to each record that it applied."""
    is_dead: bool = False
    computing: bool = False
    offered_on: bytes = b""
    speed: float = 1.0
    tick_at: float = float("inf")
    jumping: bool = False
