"""Scenarios from beginning to end: each kind of fault happens and is survived, and what is found can be repeated."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from averaging.record import Record
from simulator.faults import (
    KINDS,
    NAMES,
    PHASES,
    Blackout,
    Crash,
    DaemonDeath,
    Delay,
    DiskLoss,
    Duplicate,
    Fault,
    Freeze,
    Late,
    Leave,
    Lossy,
    Partition,
    Skew,
    SlowCompute,
    SlowLink,
    Torn,
    When,
)
from simulator.scenario import Scenario
from simulator.shrink import ShrinkConfig, shrink
from simulator.trial import run_scenario
from tests.simulator.storms import voting_storm

PAGE = Path(__file__).parents[2] / "docs" / "SIMULATOR.md"
ONE_OF_EACH: tuple[Fault, ...] = (
    Crash(3.0, 1, 2.0),
    Torn(3.0, 1, 2.0),
    DiskLoss(3.0, 1, 2.0),
    Blackout(When("committed", nth=9), 2.0),
    Leave(3.0, 1, 2.0),
    Late(3.0, 3),
    Freeze(3.0, 1, 8.0),
    Partition(3.0, ((0, 1), (2,)), 8.0),
    SlowLink(1.0, 0, 50.0, 8.0),
    SlowCompute(1.0, 0, 10.0, 8.0),
    Lossy(0.0, 10.0, dial_loss=0.5, breaks=0.2),
    DaemonDeath(3.0, 0, 3.0),
    Skew(0.0, 0, 300.0, 10.0),
    Duplicate(0.0, 0.8, 10.0),
    Delay(0.0, 0.3, 2.0, 10.0),
)


def test_one_of_each_is_every_kind() -> None:
    assert {type(fault) for fault in ONE_OF_EACH} == set(KINDS.values())


@pytest.mark.parametrize("fault", ONE_OF_EACH, ids=lambda fault: NAMES[type(fault)])
def test_every_fault_happens_and_is_survived(fault: Fault) -> None:
    verdict = run_scenario(Scenario(peers=4, rounds=8, faults_end=12.0, faults=(fault,)))
    assert verdict.failure is None
    assert verdict.outcome.faults == {NAMES[type(fault)]: 1}
    assert verdict.outcome.restarts == verdict.outcome.recoveries
    assert verdict.outcome.rounds_committed >= 8


@pytest.mark.parametrize("after", [0.0, 0.001, 0.045])
@pytest.mark.parametrize("phase", PHASES)
def test_death_right_after_any_deed(phase: str, after: float) -> None:
    """Everybody dies of its second and of its fifth: before it leaves, on its way, or when it has arrived."""
    deaths = [Crash(When(phase, peer, nth=nth, after=after), peer, 1.0) for peer in range(4) for nth in (2, 5)]
    # Nobody takes over from a lead that lives.
    lead = [Crash(When("committed", 0, nth=nth), 0, 3.0) for nth in (2, 4)]
    verdict = run_scenario(Scenario(peers=4, rounds=10, faults_end=15.0, faults=(*deaths, *lead), snapshot_seconds=2.0))
    assert verdict.failure is None
    assert verdict.outcome.faults["crash"] > 2


@pytest.mark.parametrize("rounds_before", range(9, 13))
def test_a_joiner_takes_all_fragments_of_a_streaming_run_wherever_in_their_cycle_it_comes(rounds_before: int) -> None:
    """It jumps to a snapshot and then holds the others' bits: all fragments with their momenta, whichever is due."""
    late = Late(When("committed", 0, nth=rounds_before), 3)
    scenario = Scenario(
        peers=4,
        rounds=24,
        faults_end=15.0,
        faults=(late,),
        learner="streaming",
        snapshot_bytes=100,
        snapshot_seconds=1.0,
    )
    verdict = run_scenario(scenario)
    assert verdict.failure is None
    assert any("took the state" in note for note in verdict.outcome.notes)


def test_the_example_in_the_documents_holds() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    verdict = run_scenario(Scenario.from_text(text))
    assert verdict.failure is None
    assert verdict.outcome.faults == {"crash": 1, "partition": 1, "torn": 1}


def test_a_scenario_repeats_itself() -> None:
    scenario = Scenario.random(12)
    one, other = run_scenario(scenario), run_scenario(Scenario.from_text(scenario.to_text()))
    assert one.outcome == other.outcome
    assert one.outcome.tokens_processed >= one.outcome.tokens_merged > 0


def test_without_faults_no_token_is_lost() -> None:
    outcome = run_scenario(Scenario(peers=3, rounds=10, faults_end=1.0)).outcome
    assert len(outcome.tokens_of) == 3
    # In the end everybody leaves at once, and the last rounds of some come to nothing.
    assert 0 <= outcome.tokens_processed - outcome.tokens_merged <= 3 * 2 * 10


def test_what_is_found_is_made_small_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_is_a_quorum(self: Record, peers: Any) -> bool:
        return 2 * sum(voter in peers for voter in self.voters) >= len(self.voters)

    monkeypatch.setattr(Record, "is_quorum", half_is_a_quorum)
    scenario = voting_storm(3)
    verdict = run_scenario(scenario)
    assert verdict.failure is not None and verdict.failure.startswith("Disagreement")
    small = shrink(scenario, config=ShrinkConfig(runs_max=20))
    assert len(small.faults) < len(scenario.faults) / 2
    again = run_scenario(Scenario.from_text(small.to_text()))
    assert again.failure is not None and again.failure.startswith("Disagreement")


FOUNDER_DIES_IN_ITS_FIRST_VOTE = """
peers = 5
rounds = 1
seed = 262
faults_end = 2.35

[[faults]]
kind = "torn"
at = { phase = "offered", after = 0.06 }
peer = 0
restart_after = 0.05
"""


ALL_DIE_WITH_THE_HEAD_SAVED_BY_ONE = """
peers = 3
rounds = 1
seed = 294
faults_end = 21.31
train_seconds = 2.0
speed_spread = 0.8
snapshot_seconds = 5.0

[[faults]]
kind = "crash"
at = { phase = "writing", peer = 0 }
peer = 0
restart_after = 0.06

[[faults]]
kind = "blackout"
at = 13.74
restart_after = 0.13
"""


WHOEVER_COMMITTED_LAST_WAITS_FOR_THOSE_WHO_WAIT_FOR_ITS_NEXT_RECORD = """
peers = 3
rounds = 1
seed = 3634
faults_end = 4.61
delay = 0.1
speed_spread = 0.8

[[faults]]
kind = "blackout"
at = 4.46
restart_after = 0.06

[[faults]]
kind = "leave"
at = { phase = "trained", nth = 4, after = 0.11 }
peer = 0
restart_after = 0.22
"""


ONE_OF_TWO_STREAMS_BREAKS_WITH_AN_OFFER_ON_IT = """
rounds = 1
seed = 10563
faults_end = 10.09

[[faults]]
kind = "partition"
at = 2.59
sides = [[2]]
seconds = 5.27

[[faults]]
kind = "slow_link"
at = 2.08
peer = 0
factor = 26.32
seconds = 0.05

[[faults]]
kind = "lossy"
at = 3.63
seconds = 4.91
dial_loss = 0.52
breaks = 0.01
"""


A_SECOND_LIFE_REPORTS_MORE_THAN_THE_FIRST_ONE_EVER_DID = """
rounds = 1
seed = 30902
faults_end = 6.06
learner = "streaming"

[[faults]]
kind = "leave"
at = 3.73
peer = 2
restart_after = 1.87

[[faults]]
kind = "late"
at = 3.62
peer = 2
"""


ALL_DIE_AS_ONE_HAS_SAVED_A_ROUND_THAT_NO_OTHER_REMEMBERS = """
peers = 8
rounds = 1
seed = 41082
faults_end = 5.58
live_seconds = 60.0
delay = 0.1
train_seconds = 2.0
speed_spread = 0.0
snapshot_seconds = 5.0

[[faults]]
kind = "blackout"
at = { phase = "saved" }
restart_after = 0.09
"""


ITS_TIME_TO_LEAVE_IS_UP_IN_THE_MIDDLE_OF_APPLYING_A_ROUND = """
peers = 5
rounds = 1
seed = 48481
faults_end = 9.62
learner = "streaming"
train_seconds = 2.0
speed_spread = 0.0

[[faults]]
kind = "leave"
at = { phase = "committed", peer = 3, nth = 3 }
peer = 3
restart_after = 0.05

[[faults]]
kind = "freeze"
at = { phase = "writing", peer = 3 }
peer = 4
seconds = 0.36

[[faults]]
kind = "freeze"
at = { phase = "pledged", nth = 8, after = 0.14 }
peer = 3
seconds = 0.8
"""


AN_OWNER_COMES_BACK_AND_WHAT_ITS_EARLIER_LIFE_MERGED_IS_COMMITTED = """
peers = 5
rounds = 1
seed = 24989
faults_end = 11.38
learner = "owners"
train_seconds = 2.0

[[faults]]
kind = "torn"
at = { phase = "offered", after = 0.07 }
peer = 1
restart_after = 2.83

[[faults]]
kind = "torn"
at = 0.09
peer = 4
restart_after = 2.98
"""


A_WORSE_CHAIN_BECOMES_THE_BETTER_ONE_AND_NEVER_SAYS_ITS_ROUND = """
peers = 3
rounds = 9
seed = 3634
faults_end = 18.42
delay = 0.1
speed_spread = 0.8
snapshot_seconds = 1.0

[[faults]]
kind = "blackout"
at = { phase = "saved", peer = 2, nth = 10 }
restart_after = 6.32

[[faults]]
kind = "blackout"
at = 4.46
restart_after = 0.06

[[faults]]
kind = "delay"
at = { phase = "accepted", nth = 6 }
share = 0.57
late = 0.0
seconds = 16.63

[[faults]]
kind = "leave"
at = { phase = "proposed", nth = 3 }
peer = 0
restart_after = 3.98

[[faults]]
kind = "leave"
at = { phase = "trained", nth = 4, after = 0.11 }
peer = 0
restart_after = 0.22
"""


@pytest.mark.parametrize(
    "text",
    [
        FOUNDER_DIES_IN_ITS_FIRST_VOTE,
        ALL_DIE_WITH_THE_HEAD_SAVED_BY_ONE,
        WHOEVER_COMMITTED_LAST_WAITS_FOR_THOSE_WHO_WAIT_FOR_ITS_NEXT_RECORD,
        ONE_OF_TWO_STREAMS_BREAKS_WITH_AN_OFFER_ON_IT,
        A_SECOND_LIFE_REPORTS_MORE_THAN_THE_FIRST_ONE_EVER_DID,
        ALL_DIE_AS_ONE_HAS_SAVED_A_ROUND_THAT_NO_OTHER_REMEMBERS,
        ITS_TIME_TO_LEAVE_IS_UP_IN_THE_MIDDLE_OF_APPLYING_A_ROUND,
        AN_OWNER_COMES_BACK_AND_WHAT_ITS_EARLIER_LIFE_MERGED_IS_COMMITTED,
        A_WORSE_CHAIN_BECOMES_THE_BETTER_ONE_AND_NEVER_SAYS_ITS_ROUND,
    ],
)
def test_what_was_found_once_stays_mended(text: str) -> None:
    assert run_scenario(Scenario.from_text(text)).failure is None


@pytest.mark.parametrize("min_peers", [2, 8])
@pytest.mark.parametrize("learner", ["units", "owners"])
def test_who_alone_wrote_a_round_leads_on_though_a_round_needs_more(learner: str, min_peers: int) -> None:
    scenario = Scenario.from_text(ALL_DIE_AS_ONE_HAS_SAVED_A_ROUND_THAT_NO_OTHER_REMEMBERS)
    verdict = run_scenario(replace(scenario, learner=learner, min_peers=min_peers, live_seconds=300.0))
    assert verdict.failure is None
