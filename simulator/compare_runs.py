"""Running what is compared: a virtual swarm for each method and seed, over all processors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from models.registry import model_config
from optimizers.presets import Method, method_from_settings
from peer.errors import TrainingFailed
from simulator.compare import ALONE, CompareOptions, Job, Result
from simulator.options import Setting, SimulateOptions
from simulator.sweep import over_processes
from simulator.virtual import run_virtual_swarm

VIRTUAL_SECONDS_MAX = 1_000_000.0


def compare(
    options: CompareOptions, on_result: Callable[[Result, int, int, float], None] = lambda *_: None
) -> list[Result]:
    """One result for each job, in their order; `on_result` hears of each: it, how many of how many, real seconds.

    Raises `ValueError`, before anything runs, for a preset or setting that cannot be.
    """
    jobs, begun, results = jobs_of(options), time.monotonic(), []
    for result in over_processes(run_job, jobs, options.processes):
        results.append(result)
        on_result(result, len(results), len(jobs), time.monotonic() - begun)
    return results


def jobs_of(options: CompareOptions) -> list[Job]:
    """Seed by seed, so that the first figures of all methods come early. Rounds: the budget's, at least one."""
    context = model_config(options.model).context
    jobs = []
    for seed in range(options.seed, options.seed + options.seeds):
        for name in options.presets:
            preset, peers, settings = _swarm_of(name, options)
            method = method_from_settings(preset, settings)
            jobs.append(
                Job(
                    name,
                    SimulateOptions(
                        peers=peers,
                        rounds=rounds_of(options.tokens, method, peers, context),
                        preset=preset,
                        settings=settings,
                        model=options.model,
                        data=options.data,
                        seed=seed,
                        latency_ms=options.latency_ms,
                        bandwidth_mbit=options.bandwidth_mbit,
                        step_seconds=options.step_seconds * options.peers / peers,
                        speed_spread=options.speed_spread,
                        timeout_seconds=VIRTUAL_SECONDS_MAX,
                    ),
                )
            )
    return jobs


def rounds_of(tokens: int, method: Method, peers: int, context: int) -> int:
    """As many as come nearest to so many tokens; at least one."""
    return max(1, round(tokens / tokens_of(1, method, peers, context)))


def tokens_of(rounds: int, method: Method, peers: int, context: int) -> int:
    """What all peers together train on in so many rounds."""
    return rounds * peers * method.batch * context * method.round_steps


def rounding_of(options: CompareOptions) -> list[str]:
    """What differs from the asked budget because rounds are whole: a sentence for each method of which that is true."""
    sentences, context = [], model_config(options.model).context
    for name in options.presets:
        preset, peers, settings = _swarm_of(name, options)
        method = method_from_settings(preset, settings)
        rounds = rounds_of(options.tokens, method, peers, context)
        tokens = tokens_of(rounds, method, peers, context)
        if tokens != options.tokens:
            many = "one round is" if rounds == 1 else f"{rounds:,} rounds are"
            sentences.append(f"{name}: {many} {tokens:,} tokens, not {options.tokens:,}")
    return sentences


def run_job(job: Job) -> Result:
    """In whatever process."""
    try:
        return Result(job.name, job.options.seed, run_virtual_swarm(job.options))
    except TrainingFailed as error:
        return Result(job.name, job.options.seed, None, str(error))
    finally:
        # A swarm is full of cycles, and they hold every peer's model until somebody looks.
        gc.collect()


def _swarm_of(name: str, options: CompareOptions) -> tuple[str, int, dict[str, Setting]]:
    """Preset, peers and settings."""
    settings = dict(options.settings.get(name, {}))
    if name != ALONE:
        return name, options.peers, settings
    # As many steps as the others take, each on everybody's batches, and so long.
    batch = method_from_settings("diloco", settings).batch
    return "diloco", 1, {**settings, "batch": batch * options.peers}
