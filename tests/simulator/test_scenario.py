"""Scenarios are values: what is written is read again, and what is wrong is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.faults import KINDS, Crash, Fault, Partition, When
from simulator.scenario import LEARNERS, OWNERS_PEERS_MIN, Scenario


@given(st.integers(0, 10**9))
def test_a_random_scenario_survives_being_written_down(seed: int) -> None:
    scenario = Scenario.random(seed)
    assert Scenario.from_text(scenario.to_text()) == scenario
    assert Scenario.random(seed) == scenario


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {type(fault) for seed in range(300) for fault in Scenario.random(seed).faults}
    assert drawn == set(KINDS.values())
    assert {scenario.learner for scenario in map(Scenario.random, range(300))} == set(LEARNERS)


def test_triggers_and_sides_are_written_as_tables_and_lists() -> None:
    faults: tuple[Fault, ...] = (
        Crash(When("accepted", peer=1, round=5, after=0.5), 1),
        Partition(3.0, ((0, 1), (2,)), 4.5),
    )
    text = Scenario(faults=faults).to_text()
    assert 'at = { phase = "accepted", peer = 1, round = 5, after = 0.5 }' in text
    assert "sides = [[0, 1], [2]]" in text
    assert Scenario.from_text(text).faults == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peers = ", "not TOML"),
        ('peers = "four"', "peers: 'four' is not a whole number"),
        ("peers = true", "peers: True is not a whole number"),
        ("peers = 0", "peers: 0 is not in 1..1000"),
        ("delay = nan", "delay: nan is not in"),
        ("colour = 1", "colour: unknown; there are peers, rounds"),
        ('learner = "gpt"', "learner: 'gpt' is none of units, vector, overlap, streaming, owners"),
        ("faults = 1", "faults: 1 is not a list"),
        ("faults = [1]", r"faults\[0\]: 1 is not a table"),
        ("[[faults]]\nat = 1", r"faults\[0\].kind: None is none of crash, torn"),
        ('[[faults]]\nkind = "crash"\nat = 1', r"faults\[0\].peer: missing"),
        ('[[faults]]\nkind = "crash"\nat = 1\npeer = 4', r"faults\[0\].peer: 4 is not in 0..3"),
        ('[[faults]]\nkind = "crash"\nat = 1\npeer = 0\nshare = 1', r"faults\[0\].share: unknown; there are at"),
        ('[[faults]]\nkind = "crash"\nat = "now"\npeer = 0', r"faults\[0\].at: 'now' is not a number"),
        ('[[faults]]\nkind = "crash"\nat = -1\npeer = 0', r"faults\[0\].at: -1.0 is not in"),
        ('[[faults]]\nkind = "crash"\nat = 31\npeer = 0', r"faults\[0\].at: 31 is later than faults_end = 30"),
        ('[[faults]]\nkind = "crash"\nat = {}\npeer = 0', r"faults\[0\].at.phase: missing"),
        ('[[faults]]\nkind = "crash"\nat = { phase = "slept" }\npeer = 0', r"faults\[0\].at.phase: 'slept' is none of"),
        ('[[faults]]\nkind = "partition"\nat = 1\nseconds = 1\nsides = [[0], [0]]', r"faults\[0\].sides: names nobody"),
        ('[[faults]]\nkind = "partition"\nat = 1\nseconds = 1\nsides = [[0], ["b"]]', r"faults\[0\].sides\[1\]\[0\]"),
        (
            '[[faults]]\nkind = "delay"\nat = 1\nseconds = 1\nlate = 1\nshare = 2',
            r"faults\[0\].share: 2.0",
        ),
        ('[[faults]]\nkind = "late"\nat = 1\npeer = 0', "faults: peer 0 creates the run"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scenario.from_text(text)


def test_owners_reduce_in_groups_that_are_worth_it() -> None:
    drawn = [scenario for scenario in map(Scenario.random, range(300)) if scenario.learner == "owners"]
    assert drawn
    assert all(scenario.peers >= OWNERS_PEERS_MIN for scenario in drawn)
