"""The learnt grace on seeded traces: less waiting than the best constant, and hardly anybody punctual left out."""

from __future__ import annotations

import pytest

from averaging.timing import TimingConfig
from benchmarks.deadlines import LEFT_OUT_MAX, best_fixed
from benchmarks.traces import WARM_ROUNDS, Trace, TraceConfig, adaptive, fixed, play

ROUNDS = 120
GRID = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("config", [TraceConfig("lognormal", 8), TraceConfig("slow ones", 16, slow_share=0.25)])
def test_waiting_is_a_third_less_than_with_the_best_constant(config: TraceConfig, seed: int) -> None:
    trace = Trace(config, seed, ROUNDS)
    learnt, constant = play(trace, adaptive(TimingConfig())), best_fixed(trace, GRID)
    assert constant.punctual_left_out <= LEFT_OUT_MAX * constant.punctual, "the constant that is compared is a fair one"
    assert learnt.punctual_left_out <= LEFT_OUT_MAX * learnt.punctual
    assert sum(learnt.waits) < 0.7 * sum(constant.waits)


def test_a_trace_without_chance_waits_only_for_the_slowest() -> None:
    config = TraceConfig("regular", 8, pace_sigma=0.1, training_sigma=0.0, straggling=0.0)
    trace = Trace(config, 0, ROUNDS)
    tally = play(trace, adaptive(TimingConfig()))
    paces = sorted(trainings[0].seconds for trainings in trace.trainings.values())
    assert tally.punctual_left_out == 0
    assert tally.members == 8 * (ROUNDS - WARM_ROUNDS)
    assert all(wait == pytest.approx(paces[-1] - paces[3]) for wait in tally.waits), (
        "from the quorum of four to the last"
    )


def test_a_longer_constant_waits_longer_and_leaves_out_fewer() -> None:
    trace = Trace(TraceConfig("lognormal", 8), 0, ROUNDS)
    tallies = [play(trace, fixed(seconds)) for seconds in (0.1, 1.0, 4.0)]
    waits = [sum(tally.waits) for tally in tallies]
    left_out = [tally.punctual_left_out for tally in tallies]
    assert waits == sorted(waits) and waits[0] < waits[-1]
    assert left_out == sorted(left_out, reverse=True) and left_out[0] > left_out[-1]
