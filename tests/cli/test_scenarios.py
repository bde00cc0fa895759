"""`peer simulate` with `--scenario` and `--seeds`: what it says, in words and as JSON, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from averaging.record import Record
from tests.cli.conftest import Run

CRASH = """
peers = 3
rounds = 5
faults_end = 8.0

[[faults]]
kind = "crash"
at = 2.0
peer = 1
restart_after = 1.0
"""


def written(folder: Path, text: str) -> str:
    file = folder / "scenario.toml"
    file.write_text(text)
    return str(file)


def test_a_scenario_from_a_file_is_told_in_words_and_as_json(run: Run, tmp_path: Path) -> None:
    file, summary = written(tmp_path, CRASH), tmp_path / "summary.json"
    result = run("simulate", "--virtual", "--scenario", file, "--json", str(summary))
    assert result.code == 0, result.err
    assert "faults   1 crash\n" in result.out and "checks   all held" in result.out
    fields = json.loads(summary.read_text())
    assert fields["failure"] is None and fields["faults"] == {"crash": 1}
    tokens = fields["tokens"]
    assert tokens["processed"] == tokens["merged"] + tokens["lost"]
    assert tokens["processed"] == sum(processed for processed, _, _ in tokens["by_peer"].values())
    again = run("simulate", "--virtual", "--scenario", file, "--json", "-")
    assert json.loads(again.out)["trace"] == fields["trace"]


def test_what_is_wrong_in_a_file_is_named(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, CRASH.replace("peer = 1", "peer = 3"))
    result = run("simulate", "--virtual", "--scenario", file)
    assert result.code == 2
    assert result.err == f"peer: {file}: faults[0].peer: 3 is not in 0..2\n"


def test_a_scenario_and_seeds_exclude_each_other(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path, CRASH)
    for line, message in (
        (["--virtual", "--scenario", file, "--seeds", "3"], "one scenario from a file, or many random ones"),
        (["--virtual", "--scenario", file, "--rounds", "3"], "--rounds does not go with --scenario"),
        (["--virtual", "--scenario", file, "--seed", "3"], "--seed does not go with --scenario"),
        (["--scenario", file], "--scenario is for --virtual"),
    ):
        result = run("simulate", *line)
        assert result.code == 2 and message in result.err


def test_seeds_end_with_one_line_of_figures(run: Run) -> None:
    result = run("simulate", "--virtual", "--seeds", "1", "--seed", "5")
    assert result.code == 0, result.err
    (line,) = result.out.splitlines()
    assert line.startswith("seeds=1 rounds=") and line.endswith("failures=0")


def test_a_seed_that_fails_is_named_and_made_small(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Record, "is_quorum", lambda self, peers: len(peers) > 0)
    seed = next(s for s in range(40) if fails(s))
    result = run("simulate", "--virtual", "--seeds", "1", "--seed", str(seed))
    assert result.code == 5
    assert f"seed {seed} FAILED: Disagreement" in result.out
    assert result.out.splitlines()[-1].endswith("failures=1")
    assert "1 of 1 seeds failed" in result.err
    text = result.out.partition("--scenario FILE\n")[2].rpartition("seeds=")[0]
    again = run("simulate", "--virtual", "--scenario", written(tmp_path, text))
    assert again.code == 5 and "FAILED: Disagreement" in again.out


def fails(seed: int) -> bool:
    from simulator.sweep import run_seed

    return "Disagreement" in (run_seed(seed).failure or "")
