"""The tensor side of a round, pure: what a peer wants to say, its payload, and what follows from a set of payloads."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from averaging.merge import Merge, build_merge
from compression.seam import Compressor, Flat, InvalidPacket, Packet, TensorSpec
from optimizers.outer import build_outer
from optimizers.presets import Method
from optimizers.schedule import Schedule, float32
from optimizers.seam import OuterOptimizer, Tensors

FINGERPRINT_BYTES = 16
LATE_ROUNDS_MAX = 8
"""No contribution weighs more than so many times the median of its round: tokens are self-reported."""
COEFFICIENT_MAX = 2.0**40
"""A coefficient above this is refused: sums over any group stay finite, so no stranger puts infinity in the anchor."""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a peer holds between two rounds; float32, by parameter name.

    `anchor` and `outer` are the same bits at every peer that committed the same rounds. `residual` is the peer's own,
    of the parameters where something waits. `missed` names those whose last contribution reached no commit, so that
    the residual is owed whole. Nothing in it is ever changed in place.
    """

    anchor: dict[str, Tensor]
    outer: dict[str, Tensor]
    residual: dict[str, Tensor]
    missed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Rules:
    """A method with its machinery: what all peers of a run must share to get the same anchor."""

    method: Method
    compressor: Compressor
    merge: Merge
    outer: OuterOptimizer


@dataclass(frozen=True, slots=True)
class Contribution:
    """One member's part of a round: `weight` in tokens, `payload` as it travelled."""

    peer: str
    weight: int
    payload: bytes


def rules_of(method: Method, parse_chain: Callable[[str], Compressor]) -> Rules:
    """Raises `ValueError` naming the setting that is wrong."""
    method.validate()
    schedule = method.schedule if method.inner.kind == "none" else Schedule(kind="constant", warmup=0)
    return Rules(method, parse_chain(method.chain), build_merge(method.merge), build_outer(method.outer, schedule))


def initial_state(model: nn.Module, rules: Rules) -> TrainingState:
    """The state before the first round: the model's trainable weights, copied, on the CPU as float32."""
    anchor = {
        name: parameter.detach().to("cpu", torch.float32, copy=True)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return TrainingState(anchor, rules.outer.init(anchor), {})


def fingerprint(anchor: Tensors, outer: Tensors) -> bytes:
    """The first 16 bytes of the SHA-256 over the names, types, shapes and raw bytes of both mappings, in sorted order.

    Tensors hash as little-endian, as every supported machine holds them.
    """
    digest = hashlib.sha256()
    for part in (anchor, outer):
        digest.update(len(part).to_bytes(8, "little"))
        for name in sorted(part):
            tensor = part[name].detach().cpu().contiguous()
            header = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode()
            digest.update(len(header).to_bytes(8, "little") + header)
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()[:FINGERPRINT_BYTES]


def wanted(state: TrainingState, delta: Tensors, method: Method) -> dict[str, Tensor]:
    """`decay * residual + delta`, of the parameters in `delta`: what the peer would send if packets had no size.

    No decay when the last contribution missed its round or without error feedback: then the residual is a debt, not a
    memory.
    """
    decay = method.residual_decay if method.error_feedback else 1.0
    return {
        name: state.residual[name] * (1.0 if name in state.missed else decay) + value
        if name in state.residual
        else value
        for name, value in delta.items()
    }


def make_payload(wanted: Tensors, compressor: Compressor) -> bytes:
    """Every tensor compressed, in the order of the names; raises `ValueError` naming one with NaN or infinity."""
    return compressor.pack(compressor.compress_all(wanted), specs_of(wanted))


def check_payload(payload: bytes, anchor: Tensors, compressor: Compressor) -> None:
    """Raises `InvalidPacket` unless the payload can be merged; the first thing to do with what a stranger sent."""
    flattened(payload, anchor, compressor)


def decode(payload: bytes, anchor: Tensors, compressor: Compressor) -> dict[str, Tensor]:
    """The tensors that a payload says, as every receiver reads it."""
    tensors = compressor.decompress_all(unpacked(payload, anchor, compressor), specs_of(anchor))
    return dict(zip(sorted(anchor), tensors, strict=True))


def apply_round(
    state: TrainingState,
    contributions: Sequence[Contribution],
    rules: Rules,
    *,
    round_index: int,
    names: Sequence[str] | None = None,
) -> TrainingState:
    """The state after committing `contributions` (any order, at most one a peer) as round `round_index`; the residual
    stays as it is. They speak of the parameters `names`, None for all, and the others stay as they are.

    No contributions: the anchor stays, bit for bit. Raises `InvalidPacket`; `check_payload` on receipt prevents it.
    """
    members = sorted(contributions, key=lambda contribution: contribution.peer)
    assert len({member.peer for member in members}) == len(members), "two contributions of one peer"
    if not members:
        return state
    part = state.anchor if names is None else {name: state.anchor[name] for name in names}
    # With fragments the tokens are not those behind the fragment.
    rounds = rounds_of_work([member.weight for member in members]) if rules.method.fragments == 1 else None
    delta = merged_delta(members, part, rules, rounds)
    anchor, outer = rules.outer.update(state.anchor, delta, state.outer, round_index=round_index)
    return replace(state, anchor=anchor, outer=outer)


def rounds_of_work(weights: Sequence[int]) -> list[float]:
    """How many rounds' work each contribution to a round holds: its tokens over their lower median, at least 1.

    What missed its round is said in the next, so that a delta may be that of several rounds. Added to the others' as it
    is, it would make the anchor's step longer by what the rounds before lacked, though these have divided by those who
    were there: steps grow by 1 / (1 - share missed), which diverges. So it is read as the mean of its rounds.
    """
    usual = sorted(weights)[(len(weights) - 1) // 2]
    return [min(max(weight / usual, 1.0), float(LATE_ROUNDS_MAX)) for weight in weights]


def merged_delta(
    members: Sequence[Contribution], anchor: Tensors, rules: Rules, rounds: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """The merged pseudo-gradient, each contribution divided by its `rounds`; none weighs more than `LATE_ROUNDS_MAX`
    times the lower median. Only the result is dense: what members sent stays sparse, or is dense a piece at a time.
    """
    flat = [flattened(member.payload, anchor, rules.compressor) for member in members]
    if rounds is not None:
        flat = [
            part if k == 1 else replace(part, values=part.values * float32(1 / k))
            for part, k in zip(flat, rounds, strict=True)
        ]
    weights = capped([member.weight for member in members])
    specs = specs_of(anchor)
    sizes = dict(zip(sorted(anchor), rules.compressor.coefficient_counts(specs), strict=True))
    restored = rules.compressor.restore_all(rules.merge.merge_flat(flat, weights, sizes), specs)
    return {name: tensor.to(anchor[name].device) for name, tensor in zip(sorted(anchor), restored, strict=True)}


def capped(weights: Sequence[int]) -> list[int]:
    highest = LATE_ROUNDS_MAX * sorted(weights)[(len(weights) - 1) // 2]
    return [min(weight, highest) for weight in weights]


def residual_after(payload: bytes, wanted: Tensors, anchor: Tensors, rules: Rules) -> dict[str, Tensor]:
    """What is left to say once all have heard `payload`: what it did not say, or nothing without error feedback."""
    if not rules.method.error_feedback:
        return {}
    heard = decode(payload, {name: anchor[name] for name in wanted}, rules.compressor)
    return {name: value - heard[name] for name, value in wanted.items()}


def moved_residual(
    wanted: Tensors, left: Sequence[bytes], joined: Sequence[bytes], anchor: Tensors, compressor: Compressor
) -> dict[str, Tensor]:
    """The residual on moving to another chain: `wanted` + mine on the chain left - mine on the chain joined.

    Both since the common ancestor; `anchor` has the parameters that they speak of.
    What only the chain left had heard is said again on the other.
    """
    residual = dict(wanted)
    for sign, payloads in ((1.0, left), (-1.0, joined)):
        for payload in payloads:
            for name, value in decode(payload, anchor, compressor).items():
                residual[name] = residual[name] + sign * value if name in residual else sign * value
    return residual


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    """In the order of the names, as tensors travel."""
    return [TensorSpec.of(tensors[name]) for name in sorted(tensors)]


def unpacked(payload: bytes, anchor: Tensors, compressor: Compressor) -> list[Packet]:
    packets = compressor.unpack(payload, specs_of(anchor))
    if len(packets) != len(anchor):
        raise InvalidPacket(f"payload holds {len(packets)} tensors: the model has {len(anchor)}")
    return packets


def flattened(payload: bytes, anchor: Tensors, compressor: Compressor) -> Flat:
    """All coefficients that were sent; raises `InvalidPacket` on NaN, infinity or an absurd size among them."""
    specs = specs_of(anchor)
    flat = compressor.flatten(unpacked(payload, anchor, compressor), specs)
    # The comparison is false for NaN too.
    absurd = torch.logical_not(flat.values.abs() <= COEFFICIENT_MAX).nonzero().view(-1)
    if len(absurd):
        place = int(absurd[0]) if flat.positions is None else int(flat.positions[absurd[0]])
        ends = list(accumulate(compressor.coefficient_counts(specs)))
        name = sorted(anchor)[bisect_right(ends, place)]
        raise InvalidPacket(f"{name}: a coefficient is not a number of at most {COEFFICIENT_MAX:g}")
    return flat
