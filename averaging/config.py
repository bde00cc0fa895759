"""What a run fixes for its rounds: limits on what strangers send, and the group's sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from averaging.timing import TimingConfig


@final
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and the group's sizes."""

    payload_bytes_max: int
    weight_max: int
    snapshot_bytes: int
    """About what a snapshot weighs: a gap whose contributions weigh more is jumped."""
    start_peers: int = 1
    """Offers that the first round waits for."""
    min_peers: int = 1
    """Contributions that any round needs."""
    max_peers: int = 64
    """Contributions that a round takes at most; whoever finds it full joins the next."""
    parts: int = 0
    """Into so many parts a contribution is cut, each merged by its owner; 0: everybody gets everybody's whole."""
    voters_max: int = 8
    """So many vote at most, where owners reduce; they own the parts too, while the group is not much larger."""
    remembered_bytes_max: int = 8 * 1024 * 1024
    """Of what this peer contributed to older rounds, so much is kept in case its chain must be left (R9)."""
    recovery_share: float = 0.0
    """When no quorum comes: the least share of those named by the last round that may go on without it (R8)."""
    timing: TimingConfig = field(default_factory=TimingConfig)

    @property
    def pause_max(self) -> float:
        """In seconds: who announces a longer silence is not believed; long ones are of use only where owners reduce."""
        return self.timing.idle_seconds_max if self.parts else self.timing.heartbeat_seconds_max

    @property
    def contribution_weight_max(self) -> int:
        """An owner's contribution speaks for many."""
        return self.weight_max * (self.max_peers if self.parts else 1)
