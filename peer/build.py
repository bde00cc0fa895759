"""From a run's specification to what trains it: model, data, method, learner and limits, for every way to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import nn

from averaging.config import EngineConfig
from averaging.gossip import GossipConfig
from averaging.snapshots import SnapshotConfig
from compression.chain import parse_chain
from compression.remembering import Remembering
from compression.seam import Compressor, TensorSpec
from models.registry import build_model, loss_fn, model_config
from network.seam import PeerID
from optimizers.inner import described
from optimizers.presets import Method
from optimizers.seam import Tensors
from peer.data import Corpus, load_corpus, sampler
from peer.fragments import fragments_of, partition
from peer.gossip_learner import PACKING_BYTES_MAX, GossipLearner, gossip_rules_of
from peer.learner import TorchLearner
from peer.method import initial_state, rules_of
from peer.owners_learner import OwnersLearner
from peer.spec import RunSpec
from peer.trainer import CPU, PRECISIONS, Hardware, Trainer

LIBRARY_DATA = "python-stdlib"
VALIDATION_SEQUENCES = 64
VALIDATION_BATCH = 16
MISSED_ROUNDS_MAX = 256
"""A contribution may hold the tokens of so many rounds that were missed; more is not believed."""
SMALL_MODEL_MAX = 200_000
"""Of layers times width squared."""
_PARAMETER_BYTES = 4


@final
@dataclass(frozen=True, slots=True)
class Built:
    """A run as one peer trains it."""

    learner: TorchLearner | GossipLearner | OwnersLearner
    parameters: int
    engine: EngineConfig
    gossip: GossipConfig
    """For runs whose mode is gossip, in place of `engine`."""
    snapshots: SnapshotConfig
    method: Method
    inner: str
    """Which inner optimiser steps which parameters, for people."""


def build(spec: RunSpec, me: PeerID, *, data: Sequence[Path] = (), hardware: Hardware = CPU) -> Built:
    """Loads the data and builds everything; takes seconds. Raises `ValueError` and `FileNotFoundError`."""
    if not data and spec.data.name != LIBRARY_DATA:
        raise ValueError(f"the run trains on {spec.data.name!r}, which every peer has to bring: give it with --data")
    corpus = load_corpus(tuple(data))
    if not data and spec.data.sha256 not in (None, corpus.sha256):
        raise ValueError(
            f"the run's text has the sha256 {spec.data.sha256}, this Python's standard library {corpus.sha256}: "
            "use the Python version of the run's founder, or bring the text with --data"
        )
    return build_with(spec, me, corpus, hardware)


def build_with(
    spec: RunSpec, me: PeerID, corpus: Corpus, hardware: Hardware = CPU, compressor: Compressor | None = None
) -> Built:
    """As `build`; peers of one process may share one `compressor_of` the run, so that each packet is unpacked once."""
    method, seed = spec.training_method, spec.run.seed
    context = model_config(spec.model.name).context
    if torch.get_num_threads() > 1 and is_small(spec.model.name):
        torch.set_num_threads(1)
    model: nn.Module = build_model(spec.model.name, seed)
    shared = compressor if compressor is not None else compressor_of(spec)
    rules = rules_of(method, lambda _: shared)
    state = initial_state(model, rules)
    sample = sampler(corpus, seed, me, batch=method.batch, length=context)
    held_out = corpus.validation_batches(
        batch=VALIDATION_BATCH, length=context, batches=VALIDATION_SEQUENCES // VALIDATION_BATCH
    )
    trainer = Trainer(model, loss_fn, sample, method, hardware)
    state_bytes = _PARAMETER_BYTES * sum(t.numel() for t in [*state.anchor.values(), *state.outer.values()])
    engine = EngineConfig(
        payload_bytes_max=payload_bytes_max(state.anchor, method, spec.group.parts),
        weight_max=method.inner_steps * method.batch * context * MISSED_ROUNDS_MAX,
        snapshot_bytes=state_bytes,
        start_peers=spec.group.start_peers,
        min_peers=spec.group.min_peers,
        max_peers=spec.group.max_peers,
        parts=spec.group.parts,
        recovery_share=spec.group.recovery_share,
        voters_max=spec.group.voters_max,
    )
    parameters = sum(t.numel() for t in state.anchor.values())
    snapshots = SnapshotConfig(bytes_max=2 * state_bytes + (1 << 20))
    learner: TorchLearner | GossipLearner | OwnersLearner
    if spec.group.parts:
        learner = OwnersLearner(me, state, rules, trainer, held_out, spec.group.parts)
    elif method.mode == "gossip":
        learner = GossipLearner(me, state, gossip_rules_of(method, parse_chain), trainer, held_out)
    else:
        learner = TorchLearner(me, state, rules, trainer, held_out)
    gossip = gossip_config(spec, engine, state.anchor)
    return Built(learner, parameters, engine, gossip, snapshots, method, described(method.inner, model))


def compressor_of(spec: RunSpec) -> Compressor:
    """What a run's packets are made and read with; raises `ValueError`."""
    return Remembering(parse_chain(spec.training_method.chain))


def payload_bytes_max(anchor: Tensors, method: Method, owned_parts: int = 0) -> int:
    """Of one contribution to a round, which concerns one fragment; raises `ValueError` where that cannot be."""
    if owned_parts:
        names = partition({name: value.numel() for name, value in anchor.items()}, owned_parts)
        sizes = [parse_chain(method.chain).size_max([TensorSpec.of(anchor[n]) for n in part]) for part in names]
        return sum(sizes) + PACKING_BYTES_MAX * owned_parts
    chain, parts = parse_chain(method.chain), fragments_of(anchor, method)
    specs = [[TensorSpec.of(anchor[name]) for name in names] for names in parts.names]
    return max(len(parts.labelled(0, b"")) + chain.size_max(part) for part in specs)


def gossip_config(spec: RunSpec, engine: EngineConfig, weights: Tensors) -> GossipConfig:
    """The limits of meetings: a payload holds a delta, as a contribution does, and a replica."""
    method = spec.training_method
    replica = parse_chain(method.gossip.chain).size_max([TensorSpec.of(weights[name]) for name in sorted(weights)])
    return GossipConfig(
        payload_bytes_max=engine.payload_bytes_max + replica + PACKING_BYTES_MAX,
        weight_max=engine.weight_max,
        group_size=method.gossip.group,
        start_peers=engine.start_peers,
        min_peers=engine.min_peers,
    )


def is_small(model: str) -> bool:
    """Whether one thread trains it as fast as two: its matrices are too small to share (gpt-nano, gpt-mini)."""
    config = model_config(model)
    return config.layers * config.width**2 < SMALL_MODEL_MAX


def dense_bytes(parameters: int, inner_steps: int, peers: int) -> float:
    """What each of `peers` sends when a ring all-reduces float32 gradients after each of `inner_steps`:
    2 (N-1)/N * 4 * parameters * H bytes a round.
    """
    return 2 * (peers - 1) / peers * _PARAMETER_BYTES * parameters * inner_steps


def chosen_hardware(device: str, precision: str = "auto", micro_batch: int = 0) -> Hardware:
    """`auto` precision is bf16 on a CUDA device that has it, else fp32; raises `ValueError` for what is not there."""
    device = chosen_device(device)
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    on_cuda = device.startswith("cuda")
    has_bf16 = on_cuda and torch.cuda.is_bf16_supported()
    if precision == "bf16" and on_cuda and not has_bf16:
        raise ValueError(f"precision 'bf16': {device} has no bfloat16; choose fp32, or auto")
    return Hardware(device, micro_batch, bf16=precision == "bf16" or (precision == "auto" and has_bf16))


def chosen_device(device: str) -> str:
    """`auto` is an accelerator if there is one; raises `ValueError` for one that is not there."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = device.partition(":")[0]
    if (kind == "cuda" and not torch.cuda.is_available()) or (kind == "mps" and not torch.backends.mps.is_available()):
        raise ValueError(f"device {device!r}: torch finds none on this machine; choose cpu, or auto")
    return device
