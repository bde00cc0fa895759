"""Runs the command line in this process, in a home of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.main import main


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "home"
    monkeypatch.setenv("PEER_HOME", str(path))
    return path


@pytest.fixture
def run(home: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*arguments: str) -> Result:
        code = main(arguments)
        captured = capfd.readouterr()
        return Result(int(code), captured.out, captured.err)

    return run_main
