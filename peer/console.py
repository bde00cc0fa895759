"""What a peer prints while it runs: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from peer.build import dense_bytes
from peer.lines import counted, emit, say
from peer.reports import Left, Note, Report, RoundDone, Validated, as_json

LINE_SECONDS_MIN = 2.0
"""People get a line about rounds at most this often."""


@final
@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes since the start: all that left the peer, and of these the contributions."""

    total: int
    packets: int
    peers: int


@final
class Console:
    """Prints reports; `sent` gives the bytes so far, `clock` monotonic seconds; `shared` names the state in a line."""

    def __init__(
        self,
        *,
        as_json: bool,
        parameters: int,
        inner_steps: int,
        sent: Callable[[], Sent],
        clock: Callable[[], float],
        shared: str = "anchor",
    ) -> None:
        self._as_json = as_json
        self._parameters = parameters
        self._inner_steps = inner_steps
        self._sent = sent
        self._clock = clock
        self._shared = shared
        self._spoke_at = -LINE_SECONDS_MIN
        self._dense = 0.0
        """What the rounds of which this peer was a member would have sent."""
        self._validation = ""

    def show(self, report: Report) -> None:
        if self._as_json:
            sent = self._sent()
            extra = {"bytes_sent": sent.total, "packet_bytes_sent": sent.packets, "peers_linked": sent.peers}
            emit(as_json(report) | extra)
        elif isinstance(report, Validated):
            self._validation = f", held-out loss {report.loss:.3f}"
            if report.round == 0:
                say(f"held-out loss before training: {report.loss:.3f}")
        elif isinstance(report, RoundDone):
            self._show_round(report)
        elif isinstance(report, Note):
            say(report.text)
        elif isinstance(report, Left):
            say(f"left after round {report.round}; {report.tokens_processed:,} tokens trained here")

    def _show_round(self, report: RoundDone) -> None:
        self._dense += dense_bytes(self._parameters, self._inner_steps, len(report.members)) if report.mine else 0.0
        now = self._clock()
        if now - self._spoke_at < LINE_SECONDS_MIN:
            return
        self._spoke_at = now
        trained = "" if math.isnan(report.train_loss) else f", loss {report.train_loss:.3f}"
        say(
            f"round {report.round}: {counted(len(report.members), 'peer')}{'' if report.mine else ' (not this one)'}"
            f"{trained}{self._validation}{self._traffic()}"
            f", {self._shared} {report.fingerprint.hex()[:8]}"
        )

    def _traffic(self) -> str:
        sent = self._sent().total
        if not sent or not self._dense:
            return ""
        return f", sent {sent / 1e6:.2f} MB ({self._dense / sent:.0f} times less than dense)"
