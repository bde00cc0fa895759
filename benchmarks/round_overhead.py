"""What a round costs beyond training: seconds from "packet ready" to "next anchor known", beside hivemind's averager.

python -m benchmarks.round_overhead [--quick] [--json FILE]

Four peers on loopback, each a process with a daemon of its own, are ready at the same moment, again and again. Ours is
timed from the offer until the round is committed durably, applied, and the new anchor's fingerprint known: with random
payloads of several sizes under a learner that only hashes, and with the real learner (1.05 million float32 parameters,
the `distro` chain). `hivemind.DecentralizedAverager` averages 1 million float32 parameters among four processes; its
`step` is timed from call to return. The cases take turns, so that they meet the same machine. A round's time runs
from the moment at which the last peer is ready to that at which the last one is done.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from benchmarks.children import Child, ask_all, open_children
from benchmarks.figures import Figure, circumstances, end_cleanly_when_told, write_json
from benchmarks.round_peer import ROUND_SECONDS_MAX, START_PEERS

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
    children: Sequence[Child]
    payload_bytes: int = 0
    prepare_seconds: float = 0.4
    """From the order to the moment at which all are ready: for the payload to be made."""
    seconds: list[float] = field(default_factory=list)
    decided_seconds: list[float] = field(default_factory=list)
    payloads: list[int] = field(default_factory=list)
    failed: int = 0

    def run(self, rounds: int, *, keep: bool = True) -> None:
        for _ in range(rounds):
            begin = time.monotonic() + self.prepare_seconds
            answers = ask_all(self.children, 2 * ROUND_SECONDS_MAX, at=begin, bytes=self.payload_bytes)
            if keep:
                self._note(answers)

    def _note(self, answers: Sequence[dict[str, Any]]) -> None:
        fingerprints = {answer.get("fingerprint") for answer in answers}
        assert len(fingerprints) == 1, "peers differ after a round"
        whole = all(a["done"] is not None and a["members"] == len(self.children) for a in answers)
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
    turns, rounds = (2, 3) if options.quick else (8, 8)
    end_cleanly_when_told()
    before = circumstances()
    with tempfile.TemporaryDirectory(prefix="peer-benchmark-") as folder, ExitStack() as stack:
        cases = open_cases(stack, Path(folder), with_averager=not options.without_averager)
        for case in cases:
            case.run(WARM_ROUNDS, keep=False)
        for _ in range(turns):
            for case in cases:
                case.run(rounds)
    show(cases)
    write_json(options.json, {"cases": [case.as_json() for case in cases]}, before)


def open_cases(stack: ExitStack, folder: Path, *, with_averager: bool) -> list[Case]:
    hashing = open_ours(stack, "hash", folder / "hash")
    cases = [Case(f"{size // 1000} kB payload", hashing, size) for size in SIZES]
    cases.append(Case(REAL, open_ours(stack, "torch", folder / "torch"), prepare_seconds=3.0))
    if with_averager:
        cases.append(Case(AVERAGER, open_averagers(stack, folder)))
    return cases


def open_ours(stack: ExitStack, kind: str, folder: Path) -> list[Child]:
    """The first peer is the run's creator; each is told where the others are."""
    first = stack.enter_context(Child(MODULE, [kind, str(folder / "0")], START_PEERS))
    greeting = first.hear(START_SECONDS_MAX)
    rest = [[kind, str(folder / str(number)), greeting["peer"]] for number in range(1, START_PEERS)]
    children = [first, *stack.enter_context(open_children(MODULE, rest))]
    greetings = [greeting, *(child.hear(START_SECONDS_MAX) for child in children[1:])]
    ask_all(children, START_SECONDS_MAX, addresses={g["peer"]: g["addresses"] for g in greetings})
    return children


def open_averagers(stack: ExitStack, folder: Path) -> list[Child]:
    arguments = [["averager", str(folder)]] * START_PEERS
    children = stack.enter_context(open_children(MODULE, arguments))
    known: list[str] = []
    for child in children:
        child.tell(initial_peers=known[:1])
        known += child.hear(START_SECONDS_MAX)["addresses"]
    return children


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
