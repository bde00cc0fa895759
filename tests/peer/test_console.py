"""What a peer prints: a line now and then for people, every event as one JSON object for programs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from network.seam import PeerID
from peer.console import Console, Sent
from peer.reports import Left, Note, Report, RoundDone, Trained, Validated, as_json

PEERS = (PeerID("one"), PeerID("two"))


def round_done(number: int, mine: bool = True) -> RoundDone:
    return RoundDone(number, bytes(32), b"\x01" * 32, PEERS, mine, 100 * number, 50 * number, b"\xab" * 16, 2.5)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def console(as_json: bool = False, clock: Clock | None = None, sent: int = 1000) -> Console:
    return Console(
        as_json=as_json,
        parameters=1_000_000,
        inner_steps=2,
        sent=lambda: Sent(sent, sent // 2, 1),
        clock=clock or Clock(),
    )


REPORTS: list[Report] = [
    Trained(1, 50, 2.5),
    round_done(1),
    Validated(1, 2.25),
    Note("a word"),
    Left(1, 50, 10),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: type(r).__name__)
def test_every_report_is_one_json_object_on_a_line(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    console(as_json=True).show(report)
    (line,) = capsys.readouterr().out.splitlines()
    event = json.loads(line)
    assert event["event"] == type(report).__name__
    assert (event["bytes_sent"], event["packet_bytes_sent"], event["peers_linked"]) == (1000, 500, 1)
    assert {k: event[k] for k in as_json(report)} == as_json(report)


def test_json_has_plain_values_only() -> None:
    event = as_json(round_done(3))
    assert event["fingerprint"] == "ab" * 16
    assert event["members"] == ["one", "two"]
    assert as_json(Validated(1, math.nan))["loss"] is None
    assert as_json(Validated(1, math.inf))["loss"] is None


def test_people_get_a_line_about_rounds_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    shown = console(clock=clock)
    for number in range(1, 11):
        clock.now = 0.5 * number
        shown.show(round_done(number))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["round 1", "round 5", "round 9"]
    assert "2 peers" in lines[0] and "loss 2.500" in lines[0] and "abababab" in lines[0]


def test_people_see_the_held_out_loss_and_who_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console()
    shown.show(Validated(0, 5.5))
    shown.show(Validated(4, 2.25))
    shown.show(round_done(5, mine=False))
    first, line = capsys.readouterr().out.splitlines()
    assert "before training: 5.500" in first
    assert "held-out loss 2.250" in line
    assert "not this one" in line


def test_the_saving_counts_from_the_first_round_seen(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    shown = console(clock=clock, sent=8_000)
    for number in (100, 101):
        shown.show(round_done(number))
        clock.now += 10
    # A ring of two sends all parameters once, for each of two inner steps: 8 MB a round.
    lines = capsys.readouterr().out.splitlines()
    assert "(1000 times less than dense)" in lines[0]
    assert "(2000 times less than dense)" in lines[1]


def test_nothing_is_claimed_before_anything_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    console(sent=0).show(round_done(1))
    assert "dense" not in capsys.readouterr().out


def test_the_last_word_and_notes_are_said_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console()
    shown.show(Note("waiting for voters"))
    shown.show(Left(7, 12_345, 0))
    assert capsys.readouterr().out.splitlines() == [
        "waiting for voters",
        "left after round 7; 12,345 tokens trained here",
    ]


def test_traffic_is_compared_with_the_rounds_that_this_peer_was_in(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    shown = console(clock=clock, sent=8_000_000)
    for number, mine in ((32, False), (33, False), (66, True), (67, True)):
        clock.now += 3.0
        shown.show(round_done(number, mine))
    lines = capsys.readouterr().out.splitlines()
    assert "dense" not in lines[0] and "dense" not in lines[1]
    # Two peers send 2 * 1/2 * 4 B * 1,000,000 parameters * 2 steps in a dense round.
    assert "8.00 MB (1 times less than dense)" in lines[2]
    assert "8.00 MB (2 times less than dense)" in lines[3]


def test_who_has_not_trained_yet_tells_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console()
    shown.show(replace(round_done(32, mine=False), train_loss=math.nan))
    assert "loss" not in capsys.readouterr().out
