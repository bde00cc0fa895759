"""What a peer does that trains in no run but is the first one that others meet: know what is going on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import anyio

from dht.directory import Directory
from dht.facts import members_key
from dht.runs import find_runs


@dataclass(frozen=True, slots=True)
class EntryPointConfig:
    """How closely it follows."""

    heartbeat_seconds: float = 30.0
    jitter: float = 0.2
    runs_max: int = 16
    """The most announced runs, whose members it follows."""


async def follow_swarm(
    directory: Directory, wall_time: Callable[[], float], rng: random.Random, config: EntryPointConfig | None = None
) -> None:
    """For ever: ask for the runs and their members.

    A `HivemindDirectory` then holds a copy of both, so that observers and newcomers need to ask nobody else, and
    its routing table stays fresh.
    """
    config = config or EntryPointConfig()
    while True:
        runs = await find_runs(directory, wall_time)
        for run_id in list(dict.fromkeys(run.fact.run_id for run in runs))[: config.runs_max]:
            await directory.get(members_key(run_id))
        await anyio.sleep(config.heartbeat_seconds * (1 - config.jitter * rng.random()))
