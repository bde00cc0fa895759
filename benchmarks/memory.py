"""Whether the memory of running peers grows: samples over many rounds, judged process by process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import anyio

from benchmarks.resources import name_of, resident_bytes
from benchmarks.swarm import Swarm

SAMPLE_SECONDS = 1.0


@final
@dataclass(frozen=True, slots=True)
class Sample:
    round: int
    peer_megabytes: float
    daemon_megabytes: float


@final
@dataclass(frozen=True, slots=True)
class Growth:
    """Of one process and its daemon; megabytes are medians of the first and the last fifth of the samples."""

    peer: int
    process: int
    first_round: int
    last_round: int
    peer_megabytes: tuple[float, float]
    daemon_megabytes: tuple[float, float]

    @property
    def rounds(self) -> int:
        return self.last_round - self.first_round

    @property
    def percent(self) -> float:
        """Of the two processes together."""
        first, last = (peer + daemon for peer, daemon in zip(self.peer_megabytes, self.daemon_megabytes, strict=True))
        return 100 * (last / first - 1)


@final
class MemoryWatch:
    """Samples all peers as long as `run` runs."""

    def __init__(self, swarm: Swarm, warm_rounds: int) -> None:
        """`warm_rounds` of a process are not looked at."""
        self._swarm = swarm
        self._warm_rounds = warm_rounds
        self._samples: dict[tuple[int, int], list[Sample]] = {}

    async def run(self) -> None:
        while True:
            self._take()
            await anyio.sleep(SAMPLE_SECONDS)

    def _take(self) -> None:
        for peer in self._swarm.peers:
            begun = next((event.fields["round"] for event in peer.events if event.kind == "RoundDone"), None)
            if begun is None or peer.round < begun + self._warm_rounds or not (processes := peer.processes):
                continue
            own, *below = processes
            daemon = sum(resident_bytes(process) for process in below if name_of(process) == "p2pd")
            if daemon and (mine := resident_bytes(own)):
                sample = Sample(peer.round, round(mine / 1e6, 1), round(daemon / 1e6, 1))
                self._samples.setdefault((peer.number, own), []).append(sample)

    def growths(self) -> list[Growth]:
        """Longest first."""
        found = []
        for (peer, process), samples in self._samples.items():
            fifth = max(1, len(samples) // 5)
            first, last = samples[:fifth], samples[-fifth:]
            found.append(
                Growth(
                    peer,
                    process,
                    samples[0].round,
                    samples[-1].round,
                    (_median([s.peer_megabytes for s in first]), _median([s.peer_megabytes for s in last])),
                    (_median([s.daemon_megabytes for s in first]), _median([s.daemon_megabytes for s in last])),
                )
            )
        return sorted(found, key=lambda growth: -growth.rounds)


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 1)


def show_memory(growths: Sequence[Growth], shown_max: int = 8) -> None:
    for growth in growths[:shown_max]:
        peer, daemon = (f"{a} -> {b}" for a, b in (growth.peer_megabytes, growth.daemon_megabytes))
        print(
            f"memory of peer {growth.peer}, rounds {growth.first_round} to {growth.last_round}: "
            f"{peer} MB, daemon {daemon} MB, together {growth.percent:+.1f} %"
        )
