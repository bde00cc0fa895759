"""What a peer tells whoever runs it, as values; how it looks is the command line's affair."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import final

from network.seam import PeerID


@final
@dataclass(frozen=True, slots=True)
class Trained:
    """Inner steps are done; said before anything of them is offered, so that what was merged was always reported."""

    round: int
    tokens_processed: int
    loss: float


@final
@dataclass(frozen=True, slots=True)
class RoundDone:
    """A round was committed and applied here; `tokens` are all merged so far by the swarm. `prev` is the record that
    `head` follows: rounds form a tree where a chain is left for another.
    """

    round: int
    prev: bytes
    head: bytes
    members: tuple[PeerID, ...]
    mine: bool
    tokens: int
    tokens_processed: int
    fingerprint: bytes
    train_loss: float


@final
@dataclass(frozen=True, slots=True)
class Recovered:
    """No quorum came for the round: `voters` go on without the others, on a chain that may part from theirs."""

    round: int
    voters: tuple[PeerID, ...]


@final
@dataclass(frozen=True, slots=True)
class Healed:
    """This peer left its chain for a better one. Of its own work in the `rounds_left`, `tokens_returned` will be said
    again; `tokens_lost` were committed too long ago to be remembered.
    """

    round: int
    rounds_left: int
    tokens_returned: int
    tokens_lost: int


@final
@dataclass(frozen=True, slots=True)
class Validated:
    """The shared state's loss on held-out text, nats a byte."""

    round: int
    loss: float


@final
@dataclass(frozen=True, slots=True)
class Note:
    """One sentence for the user."""

    text: str


@final
@dataclass(frozen=True, slots=True)
class Left:
    """The last word: `tokens_pending` were trained here and reached no commit."""

    round: int
    tokens_processed: int
    tokens_pending: int


Report = Trained | RoundDone | Recovered | Healed | Validated | Note | Left


def as_json(report: Report) -> dict[str, object]:
    """Plain values for a line of JSON; `event` names the kind."""
    fields: dict[str, object] = {"event": type(report).__name__}
    for field in dataclasses.fields(report):
        value = getattr(report, field.name)
        if isinstance(value, bytes):
            value = value.hex()
        elif isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = None
        fields[field.name] = value
    return fields
