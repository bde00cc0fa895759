"""Help is complete, quick to come, and says what the code does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from cli import simulate
from cli.exit_codes import MEANINGS, ExitCode
from cli.main import peer
from models.registry import MODELS
from optimizers.presets import PRESETS
from tests.cli.conftest import Run

ROOT = Path(__file__).parents[2]


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        found.append(((*prefix, name), command))
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
    return found


ALL = commands(peer)


def test_the_commands_that_users_know_are_there() -> None:
    assert {path[0] for path, _ in ALL} == {
        "simulate",
        "compare",
        "start",
        "join",
        "bootstrap",
        "status",
        "identity",
        "setup",
    }


@pytest.mark.parametrize(("path", "command"), ALL, ids=["-".join(path) for path, _ in ALL])
def test_every_help_has_an_example_and_a_text_for_every_option(
    path: tuple[str, ...], command: click.Command, run: Run
) -> None:
    result = run(*path, "--help")
    assert result.code == 0
    assert "Example" in result.out
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{option.opts} has no help"


def test_the_exit_codes_are_documented_as_they_are_defined(run: Run) -> None:
    assert set(MEANINGS) == set(ExitCode)
    epilog = run("--help").out.partition("Exit codes:")[2]
    assert [int(line.split()[0]) for line in epilog.strip().splitlines()] == [int(code) for code in ExitCode]
    page = (ROOT / "docs" / "exit-codes.md").read_text()
    assert [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:] == [
        str(int(code)) for code in ExitCode
    ]


def test_the_choices_are_those_that_there_are() -> None:
    assert sorted(simulate.PRESETS) == sorted(PRESETS)
    assert sorted(simulate.MODELS) == sorted(MODELS)
    assert simulate.DEFAULTS.preset in PRESETS
    assert simulate.DEFAULTS.model in MODELS


def test_help_imports_nothing_heavy() -> None:
    heavy = ("torch", "hivemind", "libp2p", "pydantic", "numpy", "rich")
    script = f"import sys; import cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out.startswith("peer 0.")
