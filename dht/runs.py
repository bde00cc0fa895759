"""Finding a run in the directory, and fetching its specification."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from dht.directory import Directory
from dht.facts import RunFact, SpecFact, runs_key, spec_key
from dht.record import InvalidRecord, open_record
from network.seam import PeerID

logger = logging.getLogger(__name__)

RUNS_MAX = 1024


class SpecNotFound(Exception):
    """No announcer of the run holds a valid specification, or nobody answers."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """One run as its announcers describe it."""

    fact: RunFact
    announcers: tuple[PeerID, ...]
    """Who says so, in peer-id order: each with a valid signature, but anybody may announce anything."""


async def find_runs(directory: Directory, wall_time: Callable[[], float]) -> tuple[FoundRun, ...]:
    """The runs that peers announce, most announced first; empty if nobody announces any or answers."""
    return found_runs(await directory.get(runs_key()), wall_time())


def found_runs(records: dict[str, tuple[bytes, float]], now: float) -> tuple[FoundRun, ...]:
    """The valid ones among the records under `runs_key()`; a run under two descriptions is listed twice."""
    announcers: dict[RunFact, list[PeerID]] = {}
    for subkey, (value, expires) in sorted(records.items()):
        try:
            fact = RunFact.decode(open_record(runs_key(), subkey, value, expires, now=now))
        except InvalidRecord as error:
            logger.debug("a run fact of %s is refused: %s", subkey, error)
            continue
        announcers.setdefault(fact, []).append(PeerID(subkey))
    found = [FoundRun(fact, tuple(peers)) for fact, peers in announcers.items()]
    return tuple(sorted(found, key=lambda run: (-len(run.announcers), run.fact.name, run.fact.run_id))[:RUNS_MAX])


async def fetch_spec(directory: Directory, run_id: str, wall_time: Callable[[], float]) -> SpecFact:
    """The specification that `run_id` names, signed by its creator; raises `SpecNotFound`."""
    records = await directory.get(spec_key(run_id))
    reasons = []
    for subkey, (value, expires) in sorted(records.items()):
        try:
            return SpecFact.decode(open_record(spec_key(run_id), subkey, value, expires, now=wall_time()), run_id)
        except InvalidRecord as error:
            reasons.append(f"{subkey}: {error}")
    if reasons:
        raise SpecNotFound(f"no announcer of run {run_id} holds a valid specification ({'; '.join(reasons[:3])})")
    raise SpecNotFound(f"nobody announces the specification of run {run_id}")
