"""What a round costs beyond training: seconds from "packet ready" to "next anchor known", beside hivemind's averager.

python -m benchmarks.round_overhead [--quick] [--json FILE]

Four peers on loopback, each a process with a daemon of its own, are ready at the same moment, again and again. Ours is
timed from the offer until the round is committed durably, applied, and the new anchor's fingerprint known: with random
payloads of several sizes under a learner that only hashes, and with the real learner (1.05 million float32 parameters,
the `distro` chain). `hivemind.DecentralizedAverager` averages 1 million float32 parameters among four processes; its
`step` is timed from call to return. Ours and theirs take turns; one swarm exists at a time, so that none disturbs
another. A round's time runs from the moment at which the last peer is ready to that at which the last one is done.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.children import Child, ask_all, open_children
from benchmarks.figures import Figure, circumstances, end_cleanly_when_told, write_json
from benchmarks.round_peer import ROUND_SECONDS_MAX, START_PEERS
from network.identity import load_or_create
from peer.options import IDENTITY_FILE

SIZES = (10_000, 100_000, 400_000, 1_000_000)
START_SECONDS_MAX = 120.0
WARM_ROUNDS = 3
REAL = "real learner, 1.05M float32, distro"
AVERAGER = "DecentralizedAverager, 1M float32"
MODULE = "benchmarks.round_peer"


@final
@dataclass(slots=True)
class Case:
    """One kind of round; `seconds` has one value a round: from the last peer's readiness to the last one's end."""

    name: str
    payload_bytes: int = 0
    prepare_seconds: float = 0.4
    """From the order to the moment at which all are ready: for the payload to be made."""
    seconds: list[float] = field(default_factory=list)
    decided_seconds: list[float] = field(default_factory=list)
    payloads: list[int] = field(default_factory=list)
    failed: int = 0

    def run(self, children: Sequence[Child], rounds: int, *, keep: bool = True) -> None:
        for _ in range(rounds):
            begin = time.monotonic() + self.prepare_seconds
            answers = ask_all(children, 2 * ROUND_SECONDS_MAX, at=begin, bytes=self.payload_bytes)
            if keep:
                self._note(answers)

    def _note(self, answers: Sequence[dict[str, Any]]) -> None:
        fingerprints = {answer.get("fingerprint") for answer in answers}
        assert len(fingerprints) == 1, "peers differ after a round"
        whole = all(a["done"] is not None and a["members"] == START_PEERS for a in answers)
        if not whole:
            self.failed += 1
            return
        ready = max(answer["ready"] for answer in answers)
        self.seconds.append(max(answer["done"] for answer in answers) - ready)
        if "decided" in answers[0]:
            self.decided_seconds.append(max(answer["decided"] for answer in answers) - ready)
        self.payloads.append(max(answer.get("bytes", 0) for answer in answers))

    def as_json(self) -> dict[str, object]:
        result: dict[str, object] = {"name": self.name, "failed": self.failed, "rounds": len(self.seconds)}
        if self.seconds:
            result["seconds"] = Figure.of(self.seconds).as_json()
            if self.decided_seconds:
                result["decided_seconds"] = Figure.of(self.decided_seconds).as_json()
            result["payload_bytes"] = Figure.of(self.payloads).median
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--without-averager", action="store_true", help="ours alone")
    options = parser.parse_args()
    turns, rounds = (1, 6) if options.quick else (3, 15)
    end_cleanly_when_told()
    before = circumstances()
    hashing, real, averaging = [Case(f"{size // 1000} kB payload", size) for size in SIZES], Case(REAL), Case(AVERAGER)
    real.prepare_seconds = 3.0
    for _ in range(turns):
        with tempfile.TemporaryDirectory(prefix="peer-benchmark-") as folder:
            with open_ours("hash", Path(folder) / "hash") as children:
                run_all(hashing, children, rounds)
            with open_ours("torch", Path(folder) / "torch") as children:
                run_all([real], children, rounds)
            if not options.without_averager:
                with open_averagers(Path(folder)) as children:
                    run_all([averaging], children, rounds)
    cases = [*hashing, real, *([] if options.without_averager else [averaging])]
    show(cases)
    write_json(options.json, {"cases": [case.as_json() for case in cases]}, before)


def run_all(cases: Sequence[Case], children: Sequence[Child], rounds: int) -> None:
    cases[0].run(children, WARM_ROUNDS, keep=False)
    for case in cases:
        case.run(children, rounds)


@contextmanager
def open_ours(kind: str, folder: Path) -> Iterator[list[Child]]:
    """Linked to each other; the first is the run's creator."""
    creator = load_or_create(folder / "0" / IDENTITY_FILE).peer_id
    with open_children(MODULE, [[kind, str(folder / str(n)), creator] for n in range(START_PEERS)]) as children:
        greetings = [child.hear(START_SECONDS_MAX) for child in children]
        ask_all(children, START_SECONDS_MAX, addresses={g["peer"]: g["addresses"] for g in greetings})
        yield children


@contextmanager
def open_averagers(folder: Path) -> Iterator[list[Child]]:
    with open_children(MODULE, [["averager", str(folder), ""]] * START_PEERS) as children:
        known: list[str] = []
        for child in children:
            child.tell(initial_peers=known[:1])
            known += child.hear(START_SECONDS_MAX)["addresses"]
        yield children


def show(cases: Sequence[Case]) -> None:
    measured = {case.name: Figure.of(case.seconds) for case in cases if case.seconds}
    rival = measured.get(AVERAGER)
    print(f"{'case':<38}{'payload':>10}{'ms, median (min-max)':>28}{'decided':>9}{'failed':>8}{'ratio':>8}")
    for case in cases:
        if case.name not in measured:
            print(f"{case.name:<38}{'no round came through':>38}")
            continue
        figure = measured[case.name]
        payload = f"{Figure.of(case.payloads).median / 1000:.1f} kB" if max(case.payloads) else ""
        decided = f"{1000 * Figure.of(case.decided_seconds).median:.1f}" if case.decided_seconds else ""
        ratio = f"{rival.median / figure.median:.1f}" if rival is not None and case.name != AVERAGER else ""
        print(f"{case.name:<38}{payload:>10}{figure.text(1000):>28}{decided:>9}{case.failed:>8}{ratio:>8}")


if __name__ == "__main__":
    main()
