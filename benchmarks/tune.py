"""Several peers in one process, without a network: what a method's settings give in loss, bytes and seconds.

python -m benchmarks.tune --preset distro --tokens 250000 --grid outer.lr=5e-3,1e-2,2e-2 --set batch=8

`--grid` runs every combination of the values given and ends with all of them, the best first. All peers are in step and
every round has all contributions, but for a share `--missing`; in a gossip run the groups are those of peers in step,
and the loss is the mean over the replicas.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from averaging.contribution import Contribution
from averaging.gossip import groups_of
from averaging.record import Hash
from models.registry import model_config
from network.identity import Identity
from network.seam import PeerID
from optimizers.presets import PRESETS, method_from_settings
from peer.build import build_with, compressor_of, dense_bytes
from peer.data import Corpus, load_corpus
from peer.gossip_learner import GossipLearner
from peer.learner import Own, TorchLearner
from peer.owners_learner import OwnersLearner
from peer.spec import GroupPart, make_spec
from simulator.compare_runs import rounds_of
from simulator.curve import loss_held_out

CREATOR = PeerID(Identity(bytes(32)).peer_id)


@dataclass(frozen=True, slots=True)
class Point:
    """One run: settings that differ from the preset's, and what came of them."""

    preset: str
    label: str
    """What `draw_points` names it; the preset unless `--label` says otherwise."""
    model: str
    peers: int
    seed: int
    tokens: int
    rounds: int
    settings: dict[str, str]
    loss: float
    payload_bytes: float
    """Mean of a peer and round."""
    times_below_dense: float
    """If each of the others is sent the payload."""
    seconds: float


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    corpus = load_corpus()
    points = []
    for settings in grid(options.grid, options.set):
        points.append(run(options, settings, corpus))
        print(described(points[-1]), flush=True)
        if options.json is not None:
            with options.json.open("a") as file:
                print(json.dumps(asdict(points[-1])), file=file)
    if len(points) > 1:
        print("best first:")
        for point in sorted(points, key=lambda point: point.loss):
            print(described(point))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-nano")
    parser.add_argument("--preset", default="distro", choices=sorted(PRESETS))
    parser.add_argument("--tokens", type=int, default=245_760, help="what all peers together train on")
    parser.add_argument("--rounds", type=int, help="so many, whatever the tokens")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of the method")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=VALUE,...", help="settings to try all values of")
    parser.add_argument(
        "--missing", type=float, default=0.0, metavar="SHARE", help="so many contributions, by lot, miss their round"
    )
    parser.add_argument("--label", help="what to call it in a plot (benchmarks/draw_points.py)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line of JSON for each run")
    return parser.parse_args()


def grid(axes: list[str], fixed: list[str]) -> Iterator[dict[str, str]]:
    """Every combination, with what is fixed."""
    names = [axis.split("=", 1)[0] for axis in axes]
    values = [axis.split("=", 1)[1].split(",") for axis in axes]
    for chosen in itertools.product(*values):
        yield dict(setting.split("=", 1) for setting in fixed) | dict(zip(names, chosen, strict=True))


def run(options: argparse.Namespace, settings: Mapping[str, str], corpus: Corpus) -> Point:
    """Trains with one choice of settings."""
    method = method_from_settings(options.preset, settings)
    rounds = options.rounds or rounds_of(options.tokens, method, options.peers, model_config(options.model).context)
    spec = make_spec(
        CREATOR,
        name="tune",
        model=options.model,
        preset=options.preset,
        settings=dict(settings),
        seed=options.seed,
        rounds=rounds,
        group=GroupPart(max_peers=max(64, options.peers)),
    )
    peers = [PeerID(f"peer-{index}") for index in range(options.peers)]
    compressor = compressor_of(spec)
    built = [build_with(spec, peer, corpus, compressor=compressor) for peer in peers]
    learners = {peer: each.learner for peer, each in zip(peers, built, strict=True)}
    started, sent = time.perf_counter(), 0
    chance, owed = random.Random(options.seed), dict.fromkeys(peers, 0)
    for number in range(1, rounds + 1):
        contributions = contributed(learners, number, owed)
        sent += sum(len(contribution.payload) for contribution in contributions.values())
        if method.mode == "gossip":
            groups = groups_of(peers, number - 1, "tune", method.gossip.group)
        else:
            groups = [[peer for peer in peers if chance.random() >= options.missing] or peers[:1]]
        for group in groups:
            for peer in peers if method.mode == "consensus" else group:
                own = Own.SAID if peer in group else Own.MISSED
                learners[peer].apply(number, [contributions[member] for member in group], own)
            owed |= dict.fromkeys(group, 0)
    seconds = time.perf_counter() - started
    # Of one anchor, or of replicas that differ.
    replicas = [learner.state.anchor for learner in learners.values()][: None if method.mode == "gossip" else 1]
    loss = loss_held_out(options.model, replicas, corpus)
    receivers = (method.gossip.group if method.mode == "gossip" else options.peers) - 1
    payload_bytes = sent / rounds / options.peers
    dense = dense_bytes(built[0].parameters, method.round_steps, options.peers)
    below = dense / (payload_bytes * receivers) if payload_bytes * receivers else 0.0
    tokens = rounds * method.round_steps * method.batch * model_config(options.model).context * options.peers
    return Point(
        preset=options.preset,
        label=options.label or options.preset,
        model=options.model,
        peers=options.peers,
        seed=options.seed,
        tokens=tokens,
        rounds=rounds,
        settings=dict(settings),
        loss=loss,
        payload_bytes=payload_bytes,
        times_below_dense=below,
        seconds=seconds,
    )


def contributed(
    learners: Mapping[PeerID, TorchLearner | GossipLearner | OwnersLearner], number: int, owed: dict[PeerID, int]
) -> dict[PeerID, Contribution]:
    """What every peer says in round `number`; where rounds overlap, the first steps of the next are done. `owed` counts
    the rounds of work that are in no round yet, which are a contribution's weight.
    """
    contributions = {}
    for peer, learner in learners.items():
        owed[peer] += 1
        if learner.steps_left:
            learner.train(number - 1, lambda: False, learner.steps_left if learner.overlap else None)
        contributions[peer] = Contribution(Hash(bytes(32)), peer, owed[peer], b"", True, learner.pack(number - 1))
        if learner.overlap:
            learner.train(number, lambda: False, learner.overlap)
    return contributions


def described(point: Point) -> str:
    settings = " ".join(f"{name}={value}" for name, value in point.settings.items()) or "as in the preset"
    return (
        f"loss {point.loss:.4f}  {point.payload_bytes:,.0f} B a packet, {point.times_below_dense:,.0f} x below dense  "
        f"{point.seconds:.0f} s  {point.preset}, seed {point.seed}: {settings}"
    )


if __name__ == "__main__":
    main()
