"""`peer simulate --virtual` for gossip runs: production peers, each with a replica of a real model, on virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from network.identity import Identity
from network.seam import PeerID
from network.simulated import Access, Link
from peer.build import build_with, dense_bytes
from peer.data import Corpus
from peer.errors import TrainingFailed
from peer.gossip_learner import GossipLearner
from peer.learner import Learner
from peer.reports import Report, RoundDone, Trained, Validated
from peer.spec import RunSpec
from simulator.checkers import NoProgress
from simulator.curve import Curve, loss_held_out
from simulator.gossip_swarm import GossipOutcome, GossipSwarmConfig, run_gossip_swarm
from simulator.options import SimulateOptions, Summary, Tokens
from simulator.progress import Progress
from simulator.replicas import distance_max, mean_of
from simulator.virtual_time import VirtualConfig, VirtualTimeExceeded, run_virtual

PROGRESS_SECONDS = 0.2


def run_virtual_gossip(
    options: SimulateOptions, spec: RunSpec, corpus: Corpus, on_progress: Callable[[Progress], None]
) -> Summary:
    """See `SimulateOptions`; `timeout_seconds` bounds virtual time. Raises `TrainingFailed`."""
    begun, method = time.monotonic(), spec.training_method
    built = build_with(spec, PeerID(Identity(bytes(32)).peer_id), corpus)
    watch = _Watch(options, dense_bytes(built.parameters, method.inner_steps, options.peers), on_progress, begun)

    def make_learner(me: PeerID) -> Learner:
        return build_with(spec, me, corpus).learner

    rate = float("inf") if options.bandwidth_mbit is None else options.bandwidth_mbit * 1e6 / 8
    train_seconds = options.step_seconds * method.inner_steps
    config = GossipSwarmConfig(
        peers=options.peers,
        rounds=options.rounds,
        seed=options.seed,
        group_size=method.gossip.group,
        link=Link(options.latency_ms / 1000, options.latency_ms / 4000),
        access=Access(uplink_bytes_per_second=rate, downlink_bytes_per_second=rate),
        churn_rate=options.churn_rate,
        kill_every_seconds=options.kill_every_seconds,
        train_seconds=train_seconds,
        speed_spread=options.speed_spread,
        validate_rounds=max(1, options.rounds // 10),
        stall_seconds_max=max(300.0, 20 * train_seconds),
        payload_bytes_max=built.gossip.payload_bytes_max,
    )
    limit = VirtualConfig(virtual_seconds_max=max(options.timeout_seconds, 100 * train_seconds * options.rounds))
    try:
        outcome = run_virtual(lambda: run_gossip_swarm(config, make_learner, on_report=watch.see), config=limit)
    except (NoProgress, VirtualTimeExceeded) as error:
        raise TrainingFailed(f"only round {watch.progress.round} of {options.rounds} was reached: {error}") from error
    return _summary(options, outcome, built.parameters, method.inner_steps, watch, corpus)


class _Watch:
    """Follows the reports for the progress line and the ledger."""

    def __init__(
        self, options: SimulateOptions, dense: float, on_progress: Callable[[Progress], None], begun: float
    ) -> None:
        self.progress = Progress(peers_wanted=options.peers, rounds_goal=options.rounds, dense_bytes=dense)
        self.processed = 0
        self._begun = begun
        self._on_progress = on_progress
        self._lives: dict[PeerID, int] = {}
        self._losses: dict[PeerID, float] = {}
        self._told_at = 0.0
        self.curve = Curve(options.rounds)

    def see(self, peer: PeerID, report: Report) -> None:
        progress = self.progress
        self.curve.see(report)
        if isinstance(report, Trained):
            before = self._lives.get(peer, 0)
            # A restarted peer counts from zero again.
            self.processed += report.tokens_processed - (before if report.tokens_processed > before else 0)
            self._lives[peer] = report.tokens_processed
        elif isinstance(report, Validated):
            self._losses[peer] = report.loss
            progress.loss, progress.loss_round = fmean(self._losses.values()), report.round
        elif isinstance(report, RoundDone) and report.round >= progress.round:
            progress.round, progress.members = report.round, len(report.members)
            progress.train_loss, progress.fingerprint = report.train_loss, report.fingerprint.hex()
            progress.peers = len(self._lives)
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_SECONDS:
            self._told_at = now
            progress.seconds = now - self._begun
            self._on_progress(progress)


def _summary(
    options: SimulateOptions,
    outcome: GossipOutcome,
    parameters: int,
    inner_steps: int,
    watch: _Watch,
    corpus: Corpus,
) -> Summary:
    rounds = max(1, outcome.rounds)
    learners = [learner for learner in outcome.learners.values() if isinstance(learner, GossipLearner)]
    replicas = [learner.state.anchor for learner in learners]
    apart = distance_max(replicas)
    learners[0].state = replace(learners[0].state, anchor=mean_of(replicas))
    return Summary(
        preset=options.preset,
        model=options.model,
        parameters=parameters,
        seed=options.seed,
        peers=options.peers,
        rounds_committed=outcome.rounds,
        loss_first=outcome.first_loss,
        loss_last=fmean(outcome.last_losses.values()),
        fingerprints_equal=len(set(outcome.fingerprints.values())) == 1,
        bytes_sent_per_peer_per_round=outcome.bytes_sent / options.peers / rounds,
        packet_bytes_sent_per_peer_per_round=outcome.packet_bytes_sent / options.peers / rounds,
        dense_bytes_per_peer_per_round=dense_bytes(parameters, inner_steps, options.peers),
        tokens=Tokens(watch.processed, outcome.tokens_merged, watch.processed - outcome.tokens_merged),
        seconds=outcome.seconds,
        restarts=outcome.restarts,
        mode="gossip",
        replicas_apart=apart,
        loss_of_mean=learners[0].validation_loss(),
        loss_held_out=loss_held_out(options.model, replicas, corpus),
        seconds_to_goal=watch.curve.seconds_to_goal,
        curve=watch.curve.points(),
    )
