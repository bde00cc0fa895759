"""How far a simulated swarm is, for whoever watches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final


@final
@dataclass(slots=True)
class Progress:
    """Changed in place between two looks; bytes are per peer and round."""

    peers_wanted: int
    rounds_goal: int
    peers: int = 0
    """Those that run and have committed something."""
    round: int = 0
    members: int = 0
    """Contributions in the newest round."""
    loss: float = math.nan
    """On held-out text, the newest known."""
    loss_round: int = 0
    """After so many rounds."""
    train_loss: float = math.nan
    bytes_sent: float = 0.0
    dense_bytes: float = 0.0
    fingerprint: str = ""
    restarts: int = 0
    seconds: float = 0.0
