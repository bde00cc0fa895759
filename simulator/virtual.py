"""`peer simulate --virtual`: production peers that train a real model, on virtual time and simulated links."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch

from compression.chain import parse_chain
from models.registry import build_model
from network.identity import Identity
from network.seam import PeerID
from network.simulated import Access, Link
from peer.build import build_with, compressor_of, dense_bytes
from peer.data import load_corpus
from peer.errors import TrainingFailed
from peer.gossip_learner import GossipLearner
from peer.learner import Learner, TorchLearner
from peer.method import initial_state, rules_of
from peer.owners_learner import OwnersLearner
from peer.reports import Report, RoundDone, Trained, Validated
from peer.spec import RunSpec, make_spec
from simulator.checkers import NoProgress
from simulator.curve import Curve, loss_held_out
from simulator.gossip_virtual import run_virtual_gossip
from simulator.group import group_of
from simulator.options import SimulateOptions, Summary, tokens_by_peer
from simulator.outcome import Outcome, SwarmConfig
from simulator.progress import Progress
from simulator.swarm import run_swarm
from simulator.virtual_time import VirtualConfig, VirtualTimeExceeded, run_virtual

PROGRESS_SECONDS = 0.2
CURVE_POINTS = 10
"""Of the curve of losses, about."""


def run_virtual_swarm(
    options: SimulateOptions, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Summary:
    """See `SimulateOptions`; `timeout_seconds` bounds virtual time."""
    begun = time.monotonic()
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    spec = _spec_of(options)
    corpus = load_corpus(options.data)
    method = spec.training_method
    if method.mode == "gossip":
        return run_virtual_gossip(options, spec, corpus, on_progress)
    state = initial_state(build_model(options.model, options.seed), rules_of(method, parse_chain))
    parameters = sum(tensor.numel() for tensor in state.anchor.values())

    @lru_cache(maxsize=1)
    def limits() -> int:
        return build_with(spec, PeerID(Identity(bytes(32)).peer_id), corpus).engine.payload_bytes_max

    learners: dict[PeerID, TorchLearner | OwnersLearner] = {}
    compressor = compressor_of(spec)

    def make_learner(me: PeerID) -> Learner:
        learner = build_with(spec, me, corpus, compressor=compressor).learner
        assert not isinstance(learner, GossipLearner)
        learners[me] = learner
        return learner

    watch = _Watch(options, dense_bytes(parameters, method.round_steps, options.peers), on_progress, begun)
    config = _swarm_config(options, method.round_steps, parameters)
    try:
        outcome = run_virtual(
            lambda: run_swarm(config, make_learner, payload_bytes_max=limits(), on_report=watch.see),
            config=VirtualConfig(virtual_seconds_max=_virtual_seconds_max(options, method.round_steps)),
        )
    except (NoProgress, VirtualTimeExceeded) as error:
        raise TrainingFailed(f"only round {watch.progress.round} of {options.rounds} was committed: {error}") from error
    held_out = loss_held_out(options.model, [next(iter(learners.values())).state.anchor], corpus)
    return replace(
        _summary(options, outcome, parameters, method.round_steps),
        loss_held_out=held_out,
        seconds_to_goal=watch.curve.seconds_to_goal,
        curve=watch.curve.points(),
    )


def _spec_of(options: SimulateOptions) -> RunSpec:
    return make_spec(
        PeerID(Identity(bytes(32)).peer_id),
        name="virtual",
        model=options.model,
        preset=options.preset,
        settings=options.settings,
        seed=options.seed,
        rounds=options.rounds,
        group=group_of(options),
    )


def _swarm_config(options: SimulateOptions, inner_steps: int, parameters: int) -> SwarmConfig:
    return SwarmConfig(
        peers=options.peers,
        parts=options.parts,
        rounds=options.rounds,
        seed=options.seed,
        link=Link(options.latency_ms / 1000, options.latency_ms / 4000),
        access=_access(options.bandwidth_mbit),
        churn_rate=options.churn_rate,
        kill_every_seconds=options.kill_every_seconds,
        train_seconds=options.step_seconds * inner_steps,
        speed_spread=options.speed_spread,
        snapshot_bytes=4 * parameters,
        validate_rounds=max(1, options.rounds * options.peers // CURVE_POINTS),  # All have one anchor: they take turns.
        stall_seconds_max=max(600.0, 20 * options.step_seconds * inner_steps),
    )


def _access(bandwidth_mbit: float | None) -> Access:
    if bandwidth_mbit is None:
        return Access()
    rate = bandwidth_mbit * 1e6 / 8
    return Access(uplink_bytes_per_second=rate, downlink_bytes_per_second=rate)


def _virtual_seconds_max(options: SimulateOptions, inner_steps: int) -> float:
    """Generous: a round that takes a hundred times its training, or the asked time-out, is no progress any more."""
    return max(options.timeout_seconds, 100 * options.step_seconds * inner_steps * options.rounds)


class _Watch:
    """Follows the reports for the progress line and the ledger."""

    def __init__(
        self, options: SimulateOptions, dense: float, on_progress: Callable[[Progress], None], begun: float
    ) -> None:
        self.progress = Progress(peers_wanted=options.peers, rounds_goal=options.rounds, dense_bytes=dense)
        self.begun = begun
        self.curve = Curve(options.rounds)
        self._on_progress = on_progress
        self._training: set[PeerID] = set()
        self._told_at = 0.0

    def see(self, peer: PeerID, report: Report) -> None:
        progress = self.progress
        self.curve.see(report)
        if isinstance(report, Trained):
            self._training.add(peer)
        elif isinstance(report, Validated):
            progress.loss, progress.loss_round = report.loss, report.round
        elif isinstance(report, RoundDone) and report.round > progress.round:
            progress.round, progress.members = report.round, len(report.members)
            progress.train_loss, progress.fingerprint = report.train_loss, report.fingerprint.hex()
            progress.peers = len(self._training)
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_SECONDS:
            self._told_at = now
            progress.seconds = now - self.begun
            self._on_progress(progress)


def _summary(options: SimulateOptions, outcome: Outcome, parameters: int, inner_steps: int) -> Summary:
    rounds = max(1, outcome.rounds_committed)
    return Summary(
        preset=options.preset,
        model=options.model,
        parameters=parameters,
        seed=options.seed,
        peers=options.peers,
        rounds_committed=outcome.rounds_committed,
        loss_first=outcome.validation.get(0, float("nan")),
        loss_last=outcome.validation.get(outcome.rounds_committed, float("nan")),
        fingerprints_equal=outcome.fingerprints_equal,
        bytes_sent_per_peer_per_round=outcome.bytes_sent / options.peers / rounds,
        packet_bytes_sent_per_peer_per_round=outcome.packet_bytes_sent / options.peers / rounds,
        dense_bytes_per_peer_per_round=dense_bytes(parameters, inner_steps, options.peers),
        tokens=tokens_by_peer(outcome.tokens_of),
        seconds=outcome.seconds,
        restarts=outcome.restarts,
    )
