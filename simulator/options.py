"""What a caller decides about a swarm on this machine, and what it learns in the end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

PEERS_MAX = 1000
"""A virtual swarm of more would need more memory than the machines it is meant for."""

Setting = bool | int | float | str


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """For `simulator.local.run_local_swarm` (real processes on loopback) and `simulator.virtual.run_virtual_swarm`
    (one process on virtual time). Both return a `Summary`, raise `ValueError` for options that cannot be and
    `peer.errors.TrainingFailed` when the rounds did not come within `timeout_seconds`.
    """

    peers: int = 4
    rounds: int = 60
    preset: str = "distro"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Method settings that differ from the preset's."""
    model: str = "gpt-nano"
    data: tuple[Path, ...] = ()
    """Files and folders of text; none for the text of Python's standard library."""
    seed: int = 0
    kill_every_seconds: float | None = None
    """SIGKILL a random peer this often, and start it again (real processes; virtual seconds in a virtual swarm)."""
    latency_ms: float = 0.0
    """One-way delay of every link. Only in a virtual swarm, like the next two."""
    bandwidth_mbit: float | None = None
    """Upload and download of every peer; None is unlimited."""
    step_seconds: float = 0.5
    """Of virtual time for one inner step, by a peer of average speed."""
    speed_spread: float = 0.3
    """Peers of a virtual swarm differ in speed by up to this fraction."""
    parts: int = 0
    """For large swarms: so many parts, each merged by its owner; 0: everybody gets everybody's packets."""
    churn_rate: float = 0.0
    """The share of the peers that leave and come back during a round, on average, in 0..1."""
    timeout_seconds: float = 600.0
    folder: Path | None = None
    """Where the peers keep their state; None for a temporary folder."""

    def __post_init__(self) -> None:
        _check_within("peers", self.peers, 1, PEERS_MAX)
        _check_within("parts", self.parts, 0, 256)
        _check_within("rounds", self.rounds, 1, 1_000_000)
        _check_within("timeout_seconds", self.timeout_seconds, 1, 1_000_000)
        _check_within("latency_ms", self.latency_ms, 0, 60_000)
        _check_within("churn_rate", self.churn_rate, 0, 1)
        _check_within("step_seconds", self.step_seconds, 0.001, 3600)
        _check_within("speed_spread", self.speed_spread, 0, 0.9)
        if self.kill_every_seconds is not None:
            _check_within("kill_every_seconds", self.kill_every_seconds, 1, 1_000_000)
        if self.bandwidth_mbit is not None:
            _check_within("bandwidth_mbit", self.bandwidth_mbit, 0.001, 1_000_000)


def _check_within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} {value} is not in {least:g}..{most:g}")


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ledger of the whole swarm: `processed = merged + lost` once every peer has stopped."""

    processed: int
    merged: int
    lost: int
    by_peer: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """The same three, by peer id; only virtual swarms know them."""


def tokens_by_peer(tokens_of: Mapping[str, tuple[int, int]]) -> Tokens:
    """From what each peer processed and the run merged of it."""
    by_peer = {peer: (processed, merged, processed - merged) for peer, (processed, merged) in tokens_of.items()}
    processed, merged, lost = (sum(each[at] for each in by_peer.values()) for at in range(3))
    return Tokens(processed, merged, lost, by_peer)


@dataclass(frozen=True, slots=True)
class LossPoint:
    """What the loss was after a round, and when; `seconds` are virtual."""

    round: int
    seconds: float
    loss: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a simulated swarm did; the same fields as the JSON that `peer simulate --json FILE` writes."""

    preset: str
    model: str
    parameters: int
    seed: int
    peers: int
    rounds_committed: int
    loss_first: float
    loss_last: float
    fingerprints_equal: bool
    """Whether all peers ended with the same anchor, bit for bit. In a gossip run they hardly ever do."""
    bytes_sent_per_peer_per_round: float
    """All that peers handed to the network."""
    packet_bytes_sent_per_peer_per_round: float
    """Of these, the contributions alone."""
    dense_bytes_per_peer_per_round: float
    """What a plain float32 all-reduce after every inner step would have sent in the same round."""
    tokens: Tokens
    seconds: float
    restarts: int
    mode: str = "consensus"
    """In a `gossip` run the losses are means over the replicas, the rounds those that every peer has behind it, and the
    tokens merged those of each peer in its own replica: what others learnt from a peer that was killed counts as lost.
    """
    replicas_apart: float | None = None
    """In a gossip run: the largest distance between two replicas, as a share of the norm of their mean."""
    loss_of_mean: float | None = None
    """In a virtual gossip run: the loss of the mean of all replicas."""
    loss_held_out: float | None = None
    """In a virtual run: of the last state on more held-out text than peers look at; of replicas the mean."""
    seconds_to_goal: float | None = None
    """In a virtual run: until the last peer had the last round behind it; `seconds` has the goodbyes in it."""
    curve: tuple[LossPoint, ...] = ()
    """Of a virtual run."""

    def as_json(self) -> dict[str, object]:
        """Plain values; a loss that nobody measured is null, for JSON knows no NaN."""
        fields = {**dataclasses.asdict(self), "curve": [dataclasses.asdict(point) for point in self.curve]}
        return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in fields.items()}
