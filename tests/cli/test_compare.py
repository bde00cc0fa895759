"""`peer compare`: what is typed arrives, and rows come out as a table, JSON and CSV."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from cli import compare as cli_compare
from optimizers.presets import PRESETS
from simulator.compare import ALONE, CompareOptions, Result
from tests.cli.conftest import Run
from tests.cli.test_options import SUMMARY

Tell = Callable[[Result, int, int, float], None]


class Runs:
    """Stands in for running: one result for each preset and seed, all alike, or failed."""

    def __init__(self) -> None:
        self.calls: list[CompareOptions] = []
        self.failing = ""
        self.rounding: list[str] = []

    def __call__(self, options: CompareOptions, tell: Tell) -> list[Result]:
        self.calls.append(options)
        results = [
            Result(name, seed, None, "diverged") if name == self.failing else Result(name, seed, SUMMARY)
            for seed in range(options.seeds)
            for name in options.presets
        ]
        for number, result in enumerate(results, start=1):
            tell(result, number, len(results), 1.5)
        return results


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    module, found = ModuleType("simulator.compare_runs"), Runs()
    module.compare = found  # type: ignore[attr-defined]
    module.rounding_of = lambda options: found.rounding  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "simulator.compare_runs", module)
    return found


def test_by_default_every_preset_is_compared(run: Run, runs: Runs) -> None:
    assert sorted(cli_compare.KNOWN) == sorted([*PRESETS, ALONE])
    assert run("compare").code == 0
    assert runs.calls == [CompareOptions(presets=cli_compare.KNOWN)]


def test_a_budget_that_is_not_whole_rounds_is_said_before_anything_runs(run: Run, runs: Runs) -> None:
    runs.rounding = ["diloco: 2 rounds are 163,840 tokens, not 150,000"]
    result = run("compare", "--tokens", "150000")
    assert result.err.startswith("diloco: 2 rounds are 163,840 tokens, not 150,000\n")


def test_every_option_arrives(run: Run, runs: Runs, tmp_path: Path) -> None:
    line = "compare --presets muloco,diloco-1 --model gpt-mini --peers 8 --tokens 5000 --seeds 3 --seed 7 --latency 80"
    line += " --bandwidth 5 --step-seconds 2 --spread 0.2 --processes 1"
    line += " --set muloco:inner_steps=3 muloco:outer.lr=0.5 diloco-1:batch=4 --data"
    assert run(*line.split(), str(tmp_path)).code == 0
    assert runs.calls == [
        CompareOptions(
            presets=("muloco", "diloco-1"),
            model="gpt-mini",
            peers=8,
            tokens=5000,
            seeds=3,
            seed=7,
            latency_ms=80,
            bandwidth_mbit=5,
            step_seconds=2,
            speed_spread=0.2,
            data=(tmp_path,),
            settings={"muloco": {"inner_steps": "3", "outer.lr": "0.5"}, "diloco-1": {"batch": "4"}},
            processes=1,
        )
    ]


def test_rows_are_for_people_and_for_programs(run: Run, runs: Runs, tmp_path: Path) -> None:
    files = {"json": tmp_path / "rows.json", "csv": tmp_path / "rows.csv"}
    result = run("compare", "--presets", "allreduce,distro", *(a for k, v in files.items() for a in (f"--{k}", str(v))))
    assert result.code == 0
    assert "below dense" in result.out
    assert result.out.count("288.0") == 2
    rows = json.loads(files["json"].read_text())
    assert [row["preset"] for row in rows] == ["allreduce", "distro"]
    assert rows[0]["loss_interval"] == [2.5, 2.5]
    lines = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [line["bytes_sent_per_peer"] for line in lines] == ["250000.0"] * 2
    assert "4/4  distro, seed 1: loss 2.500" in result.err


def test_rows_on_stdout_are_nothing_but_rows(run: Run, runs: Runs) -> None:
    result = run("compare", "--presets", "distro", "--json", "-")
    assert json.loads(result.out)[0]["tokens"] == 900
    assert "below dense" in result.err
    assert run("compare", "--presets", "distro", "--csv", "-").out.startswith("preset,loss,")
    assert run("compare", "--csv", "-", "--json", "-").code == 2


def test_a_failed_run_is_a_failed_comparison_with_all_other_rows(run: Run, runs: Runs, tmp_path: Path) -> None:
    runs.failing = "diloco"
    result = run("compare", "--presets", "distro,diloco", "--json", str(tmp_path / "rows.json"))
    assert result.code == 5
    assert "peer: 2 of 4 runs failed, the first is diloco, seed 0: diverged" in result.err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["loss"] for row in rows] == [2.5, None]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--presets", "demo"), 2, "'demo' is none of allreduce, diloco-1"),
        (("--presets", "diloco,diloco"), 2, "'diloco' is named twice"),
        (("--set", "outer.lr=3"), 2, "is not PRESET:KEY=VALUE"),
        (("--set", "diloco:outer"), 2, "is not KEY=VALUE"),
        (("--presets", "diloco", "--set", "distro:batch=3"), 2, "settings of 'distro'"),
        (("--tokens", "0"), 2, "--tokens"),
        (("--latency", "nan"), 2, "not a finite number"),
        (("--json", "/nowhere/rows.json"), 4, "--json /nowhere/rows.json: there is no folder /nowhere"),
        (("--plot", "plot.txt"), 2, "must end with one of .png, .svg, .pdf"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    run: Run, runs: Runs, arguments: tuple[str, ...], code: int, says: str
) -> None:
    result = run("compare", *arguments)
    assert (result.code, runs.calls) == (code, [])
    assert says in result.err


def test_without_matplotlib_a_plot_is_refused_with_the_way_to_get_it(
    run: Run, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("compare", "--plot", "plot.png")
    assert (result.code, runs.calls) == (1, [])
    assert "--plot needs matplotlib" in result.err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_is_drawn(run: Run, runs: Runs, tmp_path: Path) -> None:
    assert run("compare", "--presets", "allreduce,distro", "--plot", str(tmp_path / "plot.png")).code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
