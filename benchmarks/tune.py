"""Several peers in one process, without a network: what a method's settings give in loss, bytes and seconds.

python -m benchmarks.tune --model gpt-nano --preset distro --rounds 200 --set outer.lr=1e-2 --set batch=8

In a gossip run the groups are those of peers in step, and the loss is that of the first peer's replica.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import torch

from averaging.gossip import groups_of
from compression.chain import parse_chain
from models.registry import build_model, loss_fn, model_config
from network.seam import PeerID
from optimizers.presets import PRESETS, Method, method_from_settings
from peer.data import Corpus, load_corpus, sampler
from peer.gossip_learner import GossipRules, apply_meeting, gossip_rules_of, make_gossip_payload
from peer.method import (
    Contribution,
    Rules,
    TrainingState,
    apply_round,
    initial_state,
    make_payload,
    residual_after,
    rules_of,
    wanted,
)
from peer.trainer import Trainer

VALIDATION = {"batch": 32, "batches": 8}


@dataclass(frozen=True, slots=True)
class RoundReport:
    """Means over the peers."""

    loss: float
    payload_bytes: float
    inner_seconds: float


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    overrides = dict(setting.split("=", 1) for setting in options.set)
    method = method_from_settings(options.preset, {"schedule.rounds": options.rounds} | overrides)
    corpus = load_corpus()
    run(options, method, corpus)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-nano")
    parser.add_argument("--preset", default="distro", choices=sorted(PRESETS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="rounds between two validations")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the method")
    return parser.parse_args()


def run(options: argparse.Namespace, method: Method, corpus: Corpus) -> None:
    """Trains and prints one line every `options.every` rounds."""
    rules = rules_of(method, parse_chain)
    meetings = gossip_rules_of(method, parse_chain) if method.mode == "gossip" else None
    receivers = (method.gossip.group if meetings else options.peers) - 1
    length = model_config(options.model).context
    peers = {f"peer-{index}": trainer(options, method, corpus, f"peer-{index}") for index in range(options.peers)}
    validator = next(iter(peers.values()))
    batches = corpus.validation_batches(length=length, **VALIDATION)
    state = initial_state(validator.model, rules)
    states = dict.fromkeys(peers, state)
    parameters = sum(tensor.numel() for tensor in state.anchor.values())
    print(f"{options.model}: {parameters} parameters; {method}", flush=True)
    started = time.perf_counter()
    for round_index in range(options.rounds):
        if meetings is None:
            states, report = one_round(states, peers, rules, round_index)
        else:
            states, report = one_round_of_meetings(states, peers, meetings, round_index)
        if (round_index + 1) % options.every == 0 or round_index + 1 == options.rounds:
            loss = validator.validation_loss(states["peer-0"].anchor, batches)
            # A ring all-reduce of fp32 gradients sends 2 (M - 1) / M of the model at every inner step.
            dense = 2 * (options.peers - 1) / options.peers * 4 * parameters * method.inner_steps
            sent = report.payload_bytes * receivers
            print(
                f"round {round_index + 1:4d}  train {report.loss:.3f}  validation {loss:.3f}  "
                f"packet {report.payload_bytes:.0f} B  {dense / sent if sent else 0:.0f}x below all-reduce  "
                f"{report.inner_seconds:.3f} s a peer  {time.perf_counter() - started:.0f} s in all",
                flush=True,
            )


def trainer(options: argparse.Namespace, method: Method, corpus: Corpus, peer: str) -> Trainer:
    length = model_config(options.model).context
    sample = sampler(corpus, options.seed, peer, batch=method.batch, length=length)
    return Trainer(build_model(options.model, options.seed), loss_fn, sample, method)


def one_round(
    states: dict[str, TrainingState], peers: dict[str, Trainer], rules: Rules, round_index: int
) -> tuple[dict[str, TrainingState], RoundReport]:
    """Every peer trains and sends, and all commit; the shared part is computed once, since it is the same bits."""
    contributions, said = [], {}
    started, loss = time.perf_counter(), 0.0
    for peer, trainer in peers.items():
        result = trainer.run_inner_steps(states[peer].anchor, round_index)
        said[peer] = wanted(states[peer], result.delta, rules.method)
        contributions.append(Contribution(peer, result.tokens, make_payload(said[peer], rules.compressor)))
        loss += result.loss
    seconds = time.perf_counter() - started
    observed = apply_round(next(iter(states.values())), contributions, rules, round_index=round_index)
    new = {
        sent.peer: replace(observed, residual=residual_after(sent.payload, said[sent.peer], observed.anchor, rules))
        for sent in contributions
    }
    payload_bytes = sum(len(contribution.payload) for contribution in contributions)
    return new, RoundReport(loss / len(peers), payload_bytes / len(peers), seconds / len(peers))


def one_round_of_meetings(
    states: dict[str, TrainingState], peers: dict[str, Trainer], rules: GossipRules, round_index: int
) -> tuple[dict[str, TrainingState], RoundReport]:
    """Every peer trains its own replica, and meets its group."""
    said, payloads = {}, {}
    started, loss = time.perf_counter(), 0.0
    for peer, trainer in peers.items():
        result = trainer.run_inner_steps(states[peer].anchor, round_index)
        said[peer] = wanted(states[peer], result.delta, rules.delta.method)
        payload = make_gossip_payload(said[peer], states[peer], rules, round_index)
        payloads[peer] = Contribution(peer, result.tokens, payload)
        loss += result.loss
    seconds = time.perf_counter() - started
    new = {}
    for group in groups_of([PeerID(peer) for peer in peers], round_index, "tune", rules.delta.method.gossip.group):
        members = [payloads[peer] for peer in group]
        for peer in group:
            new[str(peer)] = apply_meeting(
                states[peer], members, rules, me=peer, wanted=said[peer], round_index=round_index
            )
    payload_bytes = sum(len(contribution.payload) for contribution in payloads.values())
    return new, RoundReport(loss / len(peers), payload_bytes / len(peers), seconds / len(peers))


if __name__ == "__main__":
    main()
