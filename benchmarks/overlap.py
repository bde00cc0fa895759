"""What a round costs beyond its training, with communication in the way of it or behind it, and what that does to loss.

python -m benchmarks.overlap [--presets P ...] [--rounds N] [--seeds N] [--latency MS] [--bandwidth MBIT] [--json FILE]

Virtual swarms of 4 production peers that train gpt-nano (half a virtual second an inner step). For each preset: without
any network to wait for (latency 0, unlimited), then over the given links without overlap and with. Between the commits
of the fourth round and the last: seconds a round, contributions a round, and the tokens merged a second against those
that the peers could train without ever waiting. Then the loss after the last round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import final

import anyio
import torch

from benchmarks.figures import circumstances, write_json
from models.registry import model_config
from network.identity import Identity
from network.seam import PeerID
from network.simulated import Access, Link
from peer.build import build_with
from peer.data import load_corpus
from peer.reports import Report, RoundDone
from peer.spec import GroupPart, make_spec
from simulator.outcome import SwarmConfig
from simulator.swarm import run_swarm
from simulator.virtual_time import VirtualConfig, run_virtual

PEERS = 4
TRAIN_SECONDS = 0.5
"""Virtual, of one inner step."""
SKIPPED_ROUNDS = 3
MODEL = "gpt-nano"
OVERLAPS: dict[str, dict[str, object]] = {
    "distro": {"overlap": 1},
    "diloco": {"overlap": 2},
    "streaming-diloco": {"overlap": 2},
}
"""One inner step of `distro` is a whole round."""


@final
class Watch:
    """The first word of each round."""

    def __init__(self) -> None:
        self.commits: dict[int, tuple[float, int, int]] = {}
        """Virtual time, members, and tokens since the beginning, by round."""

    def see(self, peer: PeerID, report: Report) -> None:
        if isinstance(report, RoundDone) and report.round not in self.commits:
            self.commits[report.round] = anyio.current_time(), len(report.members), report.tokens


def measure(
    preset: str,
    settings: dict[str, object],
    rounds: int,
    seed: int,
    *,
    latency: float,
    bandwidth: float | None,
    spread: float,
) -> dict[str, object]:
    founder = PeerID(Identity(bytes(32)).peer_id)
    group = GroupPart(start_peers=PEERS)
    spec = make_spec(
        founder, name="overlap", model=MODEL, preset=preset, settings=settings, seed=seed, rounds=rounds, group=group
    )
    method, corpus, watch = spec.training_method, load_corpus(()), Watch()
    rate = float("inf") if bandwidth is None else bandwidth * 1e6 / 8
    built = build_with(spec, founder, corpus)
    config = SwarmConfig(
        peers=PEERS,
        rounds=rounds,
        seed=seed,
        link=Link(latency / 1000, latency / 4000),
        access=Access(uplink_bytes_per_second=rate, downlink_bytes_per_second=rate),
        train_seconds=TRAIN_SECONDS * method.round_steps,
        speed_spread=spread,
        snapshot_bytes=4 * built.parameters,
        validate_rounds=rounds,
    )
    outcome = run_virtual(
        lambda: run_swarm(
            config,
            lambda me: build_with(spec, me, corpus).learner,
            payload_bytes_max=built.engine.payload_bytes_max,
            on_report=watch.see,
        ),
        config=VirtualConfig(virtual_seconds_max=1000 * rounds),
    )
    first, last = watch.commits[SKIPPED_ROUNDS + 1], watch.commits[rounds]
    seconds = last[0] - first[0]
    ideal = PEERS * seconds / TRAIN_SECONDS * method.batch * model_config(MODEL).context
    return {
        "preset": preset,
        "overlap": method.overlap,
        "seed": seed,
        "latency_ms": latency,
        "bandwidth_mbit": bandwidth,
        "seconds_per_round": seconds / (rounds - SKIPPED_ROUNDS - 1),
        "train_seconds": config.train_seconds,
        "members": statistics.mean(watch.commits[n][1] for n in range(SKIPPED_ROUNDS + 2, rounds + 1)),
        "tokens_per_second": (last[2] - first[2]) / seconds,
        "tokens_share": (last[2] - first[2]) / ideal,
        "loss": outcome.validation[rounds],
        "fingerprints_equal": outcome.fingerprints_equal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=sorted(OVERLAPS), default=sorted(OVERLAPS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--latency", type=float, default=50.0)
    parser.add_argument("--bandwidth", type=float, default=10.0)
    parser.add_argument("--spread", type=float, default=0.3, help="peers differ in speed by up to this fraction")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    before = circumstances()
    torch.set_num_threads(1)
    figures = []
    for preset in options.presets:
        for seed in range(options.seeds):
            variants: list[tuple[dict[str, object], float, float | None]] = [
                ({"overlap": 0}, 0.0, None),
                ({"overlap": 0}, options.latency, options.bandwidth),
                (OVERLAPS[preset], options.latency, options.bandwidth),
            ]
            for settings, latency, bandwidth in variants:
                begun = time.monotonic()
                figure = measure(
                    preset,
                    settings,
                    options.rounds,
                    seed,
                    latency=latency,
                    bandwidth=bandwidth,
                    spread=options.spread,
                )
                figures.append(figure)
                print(
                    f"{preset} seed {seed} overlap {figure['overlap']} latency {latency:g}: "
                    f"{figure['seconds_per_round']:.3f} s a round, {figure['members']:.2f} members, "
                    f"{figure['tokens_per_second']:.0f} tokens/s ({figure['tokens_share']:.1%}), "
                    f"loss {figure['loss']:.4f} ({time.monotonic() - begun:.0f} s)",
                    flush=True,
                )
    write_json(options.json, {"figures": figures}, before)


if __name__ == "__main__":
    main()
