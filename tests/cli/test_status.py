"""`peer status`: what the observer says, for people; a stranger's text stays text; a missing libp2p is explained."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

import pytest

from cli import status
from peer.errors import NetworkFailed
from tests.cli.conftest import Run

PEER = "12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"


def member(round_index: int, name: str = "anna", **changes: Any) -> dict[str, Any]:
    return {
        "peer_id": f"{PEER[:-8]}{round_index:08d}",
        "name": name,
        "version": "0.1.0",
        "round": round_index,
        "tokens": 12345,
        "loss": 2.5,
        "head": "00",
        "trains": True,
        "reachable": True,
        "offers": [],
        "expires": 1e9,
        "expires_in_seconds": 80.0,
        **changes,
    }


def swarm(*members: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "run_id": "0f" * 32,
        "name": "example",
        "creator": PEER,
        "announcers": 2,
        "round": 7,
        "loss": 2.5,
        "members": list(members),
        "refused_records": 0,
        "refused_reasons": {},
        "other_runs": [],
        "asked": [PEER],
        "unreachable": {},
        **changes,
    }


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the observer says; the real one is tested with the directory."""

    def set_answer(code: int, output: object) -> list[list[str]]:
        asked: list[list[str]] = []

        def observed(arguments: Sequence[str]) -> tuple[int, str]:
            asked.append(list(arguments))
            return code, json.dumps(output)

        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(status, "observed", observed)
        return asked

    return set_answer


def test_the_run_and_its_members_are_shown_the_furthest_first(run: Run, answer: Any) -> None:
    asked = answer(0, swarm(member(6, "bert", loss=None), member(7), member(5, reachable=False, trains=False)))
    result = run("status", "--initial-peers", ADDRESS, ADDRESS, "--run", "example")
    assert result.code == 0
    assert "run example" in result.out
    assert "2 peers training, round 7, loss 2.500" in result.out
    assert result.out.index("00000007") < result.out.index("00000006") < result.out.index("00000005")
    assert asked == [["--initial-peers", ADDRESS, ADDRESS, "--run", "example", "--json"]]


def test_json_is_handed_through(run: Run, answer: Any) -> None:
    said = swarm(member(1))
    answer(0, said)
    assert json.loads(run("status", "--initial-peers", ADDRESS, "--json").out) == said


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (4, 4), (2, 2), (1, 1), (-9, 1), (77, 1)])
def test_the_observers_exit_code_is_ours(run: Run, answer: Any, code: int, expected: int) -> None:
    answer(code, "")
    result = run("status", "--initial-peers", ADDRESS)
    assert (result.code, result.out) == (expected, "")


def test_a_strangers_text_is_text(run: Run, answer: Any) -> None:
    answer(0, swarm(member(1, "\x1b[2J[bold]x[/]\n")))
    out = run("status", "--initial-peers", ADDRESS).out
    assert "\x1b" not in out
    assert "?[2J[bold]x[/]?" in out


def test_what_else_is_there_is_said(run: Run, answer: Any) -> None:
    other = {"run_id": "ab" * 32, "name": "other", "announcers": 1}
    answer(0, swarm(*(member(n) for n in range(101)), other_runs=[other], refused_reasons={"expiry": 1}, round=None))
    out = run("status", "--initial-peers", ADDRESS).out
    assert "and 1 more" in out
    assert "also here: run other" in out
    assert "1 record not believed: expiry" in out


def test_without_libp2p_it_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("status", "--initial-peers", ADDRESS)
    assert result.code == 1
    assert "apt-get install gcc libgmp-dev" in result.err
    assert "peer setup" in result.err


def test_an_observer_that_hangs_is_a_network_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "OBSERVER_SECONDS_MAX", 0.0)
    with pytest.raises(NetworkFailed, match="no answer"):
        status.observed(["--help"])
