"""What a peer sends and receives in a round as the group grows: everybody gets everything, and reduction by owners.

`python -m benchmarks.large_groups` prints Markdown. Production peers (`peer.member` and all below it) on simulated
links and virtual time; the learner is a toy: contributions and merged packets are so many bytes of noise, cut into
parts, and the state is a hash of what was merged. So bytes and rounds are those of the protocol; merging costs nothing.
Counted is all that goes through the streams between peers, headers of frames included; what the directory of members
would cost in a real DHT stands beside it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

from averaging.contribution import Contribution
from averaging.outbox import Reduction
from averaging.owners import encode_parts, parse_parts
from benchmarks.figures import circumstances, write_json
from dht.facts import members_key
from network.seam import PeerID
from network.simulated import Link
from peer.learner import Learner, Own, Shared, SharingLearner, Trained
from peer.reports import Report, RoundDone
from simulator.outcome import SwarmConfig
from simulator.swarm import Swarm
from simulator.virtual_time import VirtualConfig, run_virtual

PAYLOAD_BYTES = 16 * 1024
"""Of one contribution; the parts of it, or of a merged one, share it equally."""
PEERS_PER_PART = 8
PARTS_MIN = 8
PARTS_MAX = 64
TOKENS = 1000
TRAIN_SECONDS = 20.0
LINK = Link(0.02, 0.02)
GATHER_PEERS = (4, 16, 64)
OWNER_PEERS = (4, 16, 64, 256, 1000)
WARM_ROUNDS = 2
"""At the beginning a single peer votes, and all links are made."""
ROUNDS = {4: 12, 16: 12, 64: 8, 256: 5, 1000: 4}


class Noise(Learner):
    """Its payloads are bytes of noise, its state a hash; what it learns is nothing."""

    round_steps = 1

    def __init__(self, me: PeerID) -> None:
        self._rng = random.Random(me)
        self._state = bytes(16)

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        return Trained(TOKENS, 1.0)

    def pack(self, round_index: int) -> bytes:
        return self._rng.randbytes(PAYLOAD_BYTES)

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        digest = hashlib.blake2b(self._state, digest_size=16)
        for contribution in contributions:
            digest.update(contribution.digest)
        self._state = digest.digest()

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        pass

    def fingerprint(self) -> bytes:
        return self._state

    def validation_loss(self) -> float:
        return 1.0

    def check(self, payload: bytes) -> None:
        pass

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        return {"state": self._state}

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        self._state = files["state"]
        return self._state

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        return files["state"]


class NoiseInParts(Noise, SharingLearner):
    """As many bytes, in parts."""

    def __init__(self, me: PeerID, num_parts: int) -> None:
        super().__init__(me)
        self._num_parts = num_parts

    @property
    def num_parts(self) -> int:
        return self._num_parts

    def _noise(self, parts: Iterable[int]) -> bytes:
        return encode_parts({part: self._rng.randbytes(PAYLOAD_BYTES // self.num_parts) for part in parts})

    def pack(self, round_index: int) -> bytes:
        return self._noise(range(self.num_parts))

    def reduce(self, reduction: Reduction) -> bytes:
        return self._noise(parse_parts(reduction.shares[0].payload))

    def apply_shared(self, number: int, contributions: Sequence[Contribution], shared: Shared | None) -> None:
        self.heard = 0.0 if shared is None else len(shared[0]) / self.num_parts
        self.apply(number, contributions, Own.NOTHING)


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes are per peer and round, over the rounds after the warm-up; `*_max` are of the peer with most."""

    peers: int
    parts: int
    rounds: int
    committed_tokens: float
    """Of those that were processed, the share that was merged."""
    up: float
    up_max: float
    down: float
    down_max: float
    directory: float
    """What one look at all members' facts would bring."""
    owners: int
    """In the last record."""
    virtual_seconds: float
    real_seconds: float
    megabytes: float
    """The process's peak memory so far."""


def measure(peers: int, parts: int, rounds: int, train_seconds: float = TRAIN_SECONDS) -> Measured:
    begun = time.process_time()
    counts: dict[int, tuple[dict[PeerID, int], dict[PeerID, int]]] = {}
    directory: list[int] = [0]
    swarms: list[Swarm] = []

    def see(peer: PeerID, report: Report) -> None:
        swarm = swarms[0]
        if isinstance(report, RoundDone) and swarm.checker.newest not in counts:
            counts[swarm.checker.newest] = dict(swarm.world.bytes_sent), dict(swarm.world.bytes_received)
            facts = swarm.facts.alive(members_key(swarm.run_fact.run_id))
            directory[0] = max(directory[0], sum(len(value) + len(key) for key, (value, _) in facts.items()))

    async def program() -> None:
        config = SwarmConfig(
            peers=peers,
            parts=parts,
            rounds=rounds,
            link=LINK,
            train_seconds=train_seconds,
            speed_spread=0.2,
            snapshot_bytes=10 * PAYLOAD_BYTES,
            snapshot_seconds=600.0,
            stall_seconds_max=100 * train_seconds,
            down_seconds=0.5,
        )
        make: Callable[[PeerID], Learner] = partial(NoiseInParts, num_parts=parts) if parts else Noise
        swarms.append(Swarm(config, make, payload_bytes_max=2 * PAYLOAD_BYTES, on_report=see))
        await swarms[0].run()

    run_virtual(program, config=VirtualConfig(virtual_seconds_max=200 * train_seconds * rounds))
    swarm, outcome = swarms[0], swarms[0].outcome()
    (sent, received), (sent_then, received_then) = counts[max(counts)], counts[WARM_ROUNDS]
    length = max(counts) - WARM_ROUNDS
    ups = [(sent[p] - sent_then.get(p, 0)) / length for p in sent]
    downs = [(received[p] - received_then.get(p, 0)) / length for p in received]
    return Measured(
        peers=peers,
        parts=parts,
        rounds=outcome.rounds_committed,
        committed_tokens=outcome.tokens_merged / outcome.tokens_processed,
        up=fmean(ups),
        up_max=max(ups),
        down=fmean(downs),
        down_max=max(downs),
        directory=float(directory[0]),
        owners=len(swarm.checker.tip.owners or swarm.checker.tip.voters) if parts and swarm.checker.tip else 0,
        virtual_seconds=swarm.seconds,
        real_seconds=time.process_time() - begun,
        megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def parts_for(peers: int) -> int:
    """The best that was found: an owner for every 8 peers, as long as there are parts for more owners."""
    return min(PARTS_MAX, max(PARTS_MIN, peers // PEERS_PER_PART))


def line(m: Measured) -> str:
    def kilo(value: float) -> str:
        return f"{value / 1000:,.0f}"

    way = f"{m.parts} parts, {m.owners} owners" if m.parts else "all to all"
    kilobytes = [kilo(value) for value in (m.up, m.up_max, m.down, m.down_max, m.directory)]
    seconds = [f"{value:,.0f}" for value in (m.virtual_seconds, m.real_seconds, m.megabytes)]
    cells = [way, f"{m.peers:,}", str(m.rounds), f"{100 * m.committed_tokens:.0f} %", *kilobytes, *seconds]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 16 peers, few rounds")
    parser.add_argument("--peers", type=int, nargs="*", help="owners alone, with so many peers")
    parser.add_argument("--parts", type=int, help="with --peers: instead of one for every 8 peers; 0 for all to all")
    parser.add_argument("--rounds", type=int, help="instead of what each size gets")
    parser.add_argument("--train-seconds", type=float, default=TRAIN_SECONDS, help="virtual, before each offer; about")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = circumstances()
    most = 16 if options.quick else max(OWNER_PEERS)
    plan = [(n, 0) for n in GATHER_PEERS if n <= most] + [(n, parts_for(n)) for n in OWNER_PEERS if n <= most]
    if options.peers:
        plan = [(n, parts_for(n) if options.parts is None else options.parts) for n in options.peers]
    print(f"{PAYLOAD_BYTES} bytes a contribution; kilobytes (1000 bytes) a peer and round; {before}\n")
    print(
        "| way | peers | rounds | tokens merged | up, mean | up, most | down, mean | down, most"
        " | one look at all members | virtual s | CPU s | MB |"
    )
    print("| --- |" + " --- |" * 11)
    results = []
    for peers, parts in plan:
        rounds = options.rounds or (6 if options.quick else ROUNDS.get(peers, 6))
        results.append(measure(peers, parts, rounds, options.train_seconds))
        print(line(results[-1]), flush=True)
        gc.collect()
    write_json(options.json, {str((m.peers, m.parts)): [m.up, m.up_max, m.down, m.down_max] for m in results}, before)


if __name__ == "__main__":
    main()
