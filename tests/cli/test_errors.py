"""Wrong input: the exit code, the value that is wrong, what to do; and never a traceback unless asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cli.exit_codes import ExitCode, explained
from cli.main import Commands, main, peer
from peer.errors import NetworkFailed, RunNotFound, TrainingFailed
from tests.cli.conftest import Run

PEER = "12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("simulat", 2, "did you mean 'simulate'?"),
        ("train", 2, "the commands are simulate, compare"),
        ("simulate --peers none", 2, "'none' is not a valid integer"),
        ("simulate --peers 0", 2, "0 is not in the range"),
        ("simulate --rounds 0", 2, "0 is not in the range"),
        ("simulate --preset mulco", 2, "'mulco' is not one of"),
        ("simulate --model gpt-giant", 2, "'gpt-giant' is not one of"),
        ("simulate --peer 3", 2, "--peers"),
        ("simulate --set inner_steps", 2, "'inner_steps' is not KEY=VALUE, such as inner_steps=10"),
        ("simulate --set =3", 2, "'=3' is not KEY=VALUE"),
        ("simulate --timeout nan", 2, "'nan'"),
        ("simulate --timeout inf", 2, "'inf' is not a finite number"),
        ("simulate --latency 50", 2, "--latency is for --virtual"),
        ("simulate --churn 0.1", 2, "--churn is for --virtual"),
        ("simulate --virtual --churn 2", 2, "2.0 is not in the range"),
        ("simulate --seeds 3", 2, "--seeds is for --virtual"),
        ("simulate --virtual --seeds 0", 2, "0 is not in the range"),
        ("simulate --virtual --seeds 3 --peers 4", 2, "--peers does not go with --seeds"),
        ("simulate --virtual --scenario nowhere", 4, "--scenario nowhere: there is no such file or folder"),
        ("simulate --virtual --scenario .", 2, "Is a directory"),
        ("simulate --json nowhere/x.json", 4, "there is no folder nowhere"),
        ("simulate --data nowhere", 4, "--data nowhere: there is no such file or folder"),
        ("start", 2, "Missing argument 'RUN.toml'"),
        ("start nowhere.toml", 4, "nowhere.toml: there is no such file or folder"),
        ("join --initial-peers nonsense", 2, "'nonsense' is not a multiaddress; an address looks like /ip4/"),
        ("join --initial-peers /ip4/127.0.0.1/tcp/1", 2, "does not end in /p2p/<peer id>"),
        ("join --initial-peers /ip4/127.0.0.1/tcp/1/p2p/12D3KooWx", 2, "ends in no peer id"),
        (f"join --initial-peers /ip4/127.0.0/tcp/1/p2p/{PEER}", 2, "does not begin with a host"),
        (f"join --initial-peers {ADDRESS},{ADDRESS}", 2, "several have spaces between them"),
        (f"join --initial-peers {ADDRESS} nonsense", 2, "'nonsense' is not a multiaddress"),
        (f"join --initial-peers {ADDRESS} --device gpu", 2, "device 'gpu'"),
        (f"join --initial-peers {ADDRESS} --port 70000", 2, "70000 is not in the range"),
        (f"join --initial-peers {ADDRESS} --rounds 0", 2, "0 is not in the range"),
        ("bootstrap --announce here", 2, "'here' is not a place to be reached"),
        ("status", 2, "Missing option '--initial-peers'"),
        ("identity backup key", 4, "no identity under"),
        ("identity restore nowhere --folder here", 4, "nowhere: there is no such file"),
    ],
)
def test_wrong_input_is_named_and_has_its_code(
    line: str, code: int, message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*line.split())
    assert result.code == code
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("rounds = 0: must be positive"), ExitCode.USAGE),
        (FileNotFoundError(2, "No such file", "x"), ExitCode.NOT_FOUND),
        (NetworkFailed("nobody answers"), ExitCode.NETWORK),
        (RunNotFound("no run x"), ExitCode.NOT_FOUND),
        (TrainingFailed("time is up"), ExitCode.TRAINING),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED),
        (RuntimeError("lost"), ExitCode.UNEXPECTED),
    ],
)
def test_every_way_to_end_has_its_code(
    error: BaseException, code: ExitCode, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peer.commands, "fail", failing(error))
    result = run("fail")
    assert result.code == code
    (line,) = result.err.strip().splitlines()
    assert line.startswith("peer: ")


def test_debug_shows_the_traceback_wherever_it_stands(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peer.commands, "fail", failing(RuntimeError("lost")))
    assert "Traceback" not in run("fail").err
    assert "Traceback" in run("fail", "--debug").err
    assert "Traceback" in run("--debug", "fail").err


def failing(error: BaseException) -> click.Command:
    def fail() -> None:
        raise error

    return click.Command("fail", callback=fail)


class Group(Exception):
    """Shaped like an exception group, which Python 3.10 lacks."""

    def __init__(self, *exceptions: BaseException) -> None:
        self.exceptions = exceptions


def test_a_group_of_exceptions_speaks_through_the_one_that_has_a_code() -> None:
    group = Group(RuntimeError("cancelled"), Group(NetworkFailed("nobody answers"), RuntimeError("also")))
    assert explained(group) == (ExitCode.NETWORK, "nobody answers")
    code, text = explained(Group(Group(RuntimeError("lost"))))
    assert code == ExitCode.UNEXPECTED
    assert "RuntimeError: lost" in text


def test_a_reader_that_goes_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peer.commands, "fail", failing(BrokenPipeError()))
    monkeypatch.setattr("sys.stdout", None)
    assert main(["fail"]) == ExitCode.OK


@pytest.mark.parametrize("arguments", [["--help"], ["identity", "--help"]])
def test_a_closed_pipe_ends_a_real_process_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as nobody:
        ended = subprocess.run(
            [sys.executable, "-m", "cli", *arguments], stdout=nobody, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (ExitCode.OK, b"")


def test_the_root_group_keeps_its_order() -> None:
    assert isinstance(peer, Commands)
    assert peer.list_commands(click.Context(peer))[0] == "simulate"
