"""Comparisons: every method gets the budget, rows say what their runs did, and it all works on a tiny one."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizers.presets import PRESETS, method_from_settings
from simulator.compare import ALONE, CompareOptions, Result, Row, csv_text, row_of, rows_of, table
from simulator.compare_runs import compare, jobs_of, rounding_of, rounds_of
from simulator.options import LossPoint, Setting, Summary, Tokens

KEYS = {
    "preset",
    "loss",
    "loss_interval",
    "bytes_sent_per_peer",
    "dense_bytes_per_peer",
    "seconds",
    "rounds",
    "tokens",
}
EVERYTHING = (*sorted(PRESETS), ALONE)


def four_steps(name: str) -> dict[str, Setting]:
    """Settings with which four inner steps are whole rounds of this method, on one sequence each."""
    method = PRESETS["diloco" if name == ALONE else name]
    if method.inner_steps == 1:
        return {"batch": 1}
    streaming = {"fragments": 2, "overlap": 1} if method.fragments > 1 else {}
    return {"batch": 1, "inner_steps": 4, **streaming}


def summary(loss: float, rounds: int = 5, sent: float = 100.0) -> Summary:
    return Summary(
        preset="diloco",
        model="gpt-nano",
        parameters=1000,
        seed=0,
        peers=4,
        rounds_committed=rounds,
        loss_first=5.5,
        loss_last=loss + 0.5,
        fingerprints_equal=True,
        bytes_sent_per_peer_per_round=sent,
        packet_bytes_sent_per_peer_per_round=sent / 2,
        dense_bytes_per_peer_per_round=6000.0,
        tokens=Tokens(processed=1000, merged=900, lost=100),
        seconds=60.0,
        restarts=0,
        loss_held_out=loss,
        seconds_to_goal=40.0,
        curve=(LossPoint(0, 0.0, 5.5), LossPoint(rounds, 40.0, loss)),
    )


@given(st.integers(1, 10**9), st.sampled_from(sorted(PRESETS)), st.integers(1, 64))
def test_every_method_gets_the_budget_as_nearly_as_whole_rounds_can(tokens: int, preset: str, peers: int) -> None:
    method = PRESETS[preset]
    a_round = peers * method.batch * 64 * method.round_steps
    rounds = rounds_of(tokens, method, peers, 64)
    assert rounds == 1 or abs(rounds * a_round - tokens) <= a_round / 2


def test_one_peer_alone_trains_on_all_batches_in_as_many_steps_and_so_long() -> None:
    options = CompareOptions(presets=("diloco", ALONE), peers=4, seeds=1, settings={ALONE: {"batch": 8}})
    together, alone = (job.options for job in jobs_of(options))
    assert (alone.peers, alone.preset, alone.settings["batch"]) == (1, "diloco", 32)
    assert alone.step_seconds == 4 * together.step_seconds
    assert alone.rounds == 2 * together.rounds  # Of half the tokens each: the batch was halved.


def test_a_row_is_the_mean_over_the_seeds_with_their_range() -> None:
    results = [Result("diloco", 0, summary(2.0)), Result("diloco", 1, summary(3.0, sent=300.0))]
    first = [Result("allreduce", 0, summary(1.0)), Result("allreduce", 1, summary(4.0))]
    row = row_of("diloco", results, first)
    assert (row.loss, row.loss_interval) == (2.5, (2.0, 3.0))
    assert (row.bytes_sent_per_peer, row.dense_bytes_per_peer) == (1000.0, 30000.0)
    assert row.packet_bytes_sent_per_peer == 500.0
    assert (row.seconds, row.rounds, row.tokens) == (40.0, 5, 900)
    assert row.times_below_dense == 30.0
    assert row.loss_over_first == pytest.approx(((2 / 1 - 1) + (3 / 4 - 1)) / 2)
    assert [point.bytes_sent_per_peer for point in row.curve] == [0.0, 1000.0]


def test_a_method_whose_runs_fail_has_a_row_that_says_so() -> None:
    options = CompareOptions(presets=("allreduce", "diloco"))
    results = [Result("allreduce", 0, summary(2.0)), Result("diloco", 0, None, "only round 3 of 5 was committed")]
    good, failed = rows_of(options, results)
    assert good.failures == ()
    assert failed.failures == ("seed 0: only round 3 of 5 was committed",)
    assert math.isnan(failed.loss)
    assert json.loads(json.dumps(failed.as_json()))["loss_interval"] == [None, None]
    assert "failed" in table([good, failed]).splitlines()[2]


def test_what_sends_nothing_has_no_ratio() -> None:
    row = row_of("diloco-1", [Result("diloco-1", 0, summary(2.0, sent=0.0))])
    assert row.times_below_dense is None
    assert row.as_json()["times_below_dense"] is None
    assert table([row]).splitlines()[1].split()[7:] == ["kB", "-", "40.0", "5", "900"]


def test_the_csv_has_one_line_a_method() -> None:
    rows = [row_of(name, [Result(name, 0, summary(2.0))]) for name in ("allreduce", "diloco")]
    lines = list(csv.DictReader(io.StringIO(csv_text(rows))))
    assert [line["preset"] for line in lines] == ["allreduce", "diloco"]
    assert lines[0]["loss_least"] == lines[0]["loss"] == "2.0"
    assert (KEYS - {"loss_interval"}) <= lines[0].keys()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"presets": ()}, "presets: name at least one"),
        ({"presets": ("diloco", "diloco")}, "'diloco' is named twice"),
        ({"presets": ("diloco",), "settings": {"distro": {}}}, "settings of 'distro'"),
        ({"presets": ("diloco",), "tokens": 0}, r"tokens 0 is not in 1\.\."),
        ({"presets": ("diloco",), "seeds": 0}, r"seeds 0 is not in 1\.\."),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CompareOptions(**values)  # type: ignore[arg-type]


def test_a_setting_that_there_is_not_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="inner_step"):
        compare(CompareOptions(presets=("diloco",), settings={"diloco": {"inner_step": 3}}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompareOptions, list[Result]]:
    """Four inner steps of two peers with every method."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(6000)))
    options = CompareOptions(
        presets=EVERYTHING,
        peers=2,
        tokens=2 * 4 * 64,
        seeds=1,
        data=(text,),
        settings={name: four_steps(name) for name in EVERYTHING},
        processes=1,
    )
    return options, compare(options)


def test_every_preset_can_be_compared(tiny: tuple[CompareOptions, list[Result]]) -> None:
    options, results = tiny
    rows = rows_of(options, results)
    assert [row.preset for row in rows] == list(EVERYTHING)
    for row in rows:
        written = json.loads(json.dumps(row.as_json()))
        assert written.keys() >= KEYS
        least, most = written["loss_interval"]
        assert 0 < least <= written["loss"] <= most < 8
        assert 0 < row.tokens <= 2 * 4 * 64
        preset = "diloco" if row.preset == ALONE else row.preset
        method = method_from_settings(preset, options.settings[row.preset])
        assert row.rounds * method.round_steps == 4
        assert row.seconds >= 4 * options.step_seconds * 0.8
        assert row.bytes_sent_per_peer == 0 if row.preset == ALONE else row.bytes_sent_per_peer > 0
        assert row.dense_bytes_per_peer == (0 if row.preset == ALONE else 4 * 180_224 * 4)


def test_the_same_comparison_gives_the_same_figures(tiny: tuple[CompareOptions, list[Result]]) -> None:
    options, results = tiny
    names = ("distro", "decoupled-diloco")
    again = compare(replace(options, presets=names, settings={name: options.settings[name] for name in names}))
    assert [result.summary for result in again] == [r.summary for name in names for r in results if r.name == name]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_plot_shows_every_method_that_ran(tmp_path: Path) -> None:
    from simulator.compare_plot import draw

    rows: list[Row] = [row_of(name, [Result(name, 0, summary(2.0))]) for name in ("allreduce", "diloco")]
    rows.append(row_of("distro", [Result("distro", 0, None, "diverged")]))
    options = CompareOptions(presets=("allreduce", "diloco", "distro"))
    draw(rows, options, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "allreduce" in drawn
    assert "diloco" in drawn
    assert "distro" not in drawn


def test_budgets_that_are_not_whole_rounds_are_named() -> None:
    options = CompareOptions(presets=("allreduce", "diloco", ALONE), tokens=90_112)
    # 4 peers of 16 sequences of 64 bytes: 4,096 tokens a step.
    assert rounding_of(options) == [
        "diloco: one round is 81,920 tokens, not 90,112",
        f"{ALONE}: one round is 81,920 tokens, not 90,112",
    ]
    assert rounding_of(replace(options, tokens=163_840)) == []
