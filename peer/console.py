"""What a peer prints while it runs: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from peer.build import dense_bytes
from peer.lines import emit, say
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
        self._first_round: int | None = None
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
        if self._first_round is None:
            self._first_round = report.round
        now = self._clock()
        if now - self._spoke_at < LINE_SECONDS_MIN:
            return
        self._spoke_at = now
        rounds = report.round - self._first_round + 1
        say(
            f"round {report.round}: {len(report.members)} peers{'' if report.mine else ' (not this one)'}"
            f", loss {report.train_loss:.3f}{self._validation}{self._traffic(len(report.members), rounds)}"
            f", {self._shared} {report.fingerprint.hex()[:8]}"
        )

    def _traffic(self, peers: int, rounds: int) -> str:
        sent = self._sent().total
        dense = dense_bytes(self._parameters, self._inner_steps, peers) * rounds
        if not sent or not dense:
            return ""
        return f", sent {sent / 1e6:.2f} MB ({dense / sent:.0f} times less than dense)"
