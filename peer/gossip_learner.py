"""The learner of a gossip run: a replica of one's own, which each meeting moves; and the tensor side of it, pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import msgpack
from torch import Tensor

from averaging.contribution import Contribution
from averaging.merge import Mean
from averaging.record import as_bytes, unpack_list
from compression.seam import Compressor
from network.seam import PeerID
from optimizers.gossip import gossip_update
from optimizers.presets import Method
from optimizers.seam import Tensors
from peer import checkpoint, method
from peer.learner import Learner, Own, Trained
from peer.method import Rules, TrainingState, rules_of
from peer.trainer import Diverged, Trainer

PACKING_BYTES_MAX = 16
"""What a payload has beside its two parts."""


@final
@dataclass(frozen=True, slots=True)
class GossipRules:
    """`delta` is for what was trained, `replica` for what is said of the replica itself: same method, other chain."""

    delta: Rules
    replica: Rules


def gossip_rules_of(chosen: Method, parse_chain: Callable[[str], Compressor]) -> GossipRules:
    """Raises `ValueError` naming the setting that is wrong."""
    rules = rules_of(chosen, parse_chain)
    try:
        chain = parse_chain(chosen.gossip.chain)
    except ValueError as error:
        raise ValueError(f"gossip.chain = {chosen.gossip.chain!r}: {error}") from error
    return GossipRules(rules, replace(rules, compressor=chain, merge=Mean()))


def make_gossip_payload(wanted: Tensors, state: TrainingState, rules: GossipRules, round_index: int = 0) -> bytes:
    """What this peer says in a meeting: its delta and its replica (`state.anchor`), each through its own chain."""
    delta = method.make_payload(wanted, rules.delta.compressor.seeded(round_index))
    replica = method.make_payload(state.anchor, rules.replica.compressor.seeded(round_index))
    packed: bytes = msgpack.packb([delta, replica])
    return packed


def check_gossip_payload(payload: bytes, replica: Tensors, rules: GossipRules) -> None:
    """Raises `ValueError` unless the payload can be applied; the first thing to do with what a stranger sent."""
    delta, said = _parts(payload)
    method.check_payload(delta, replica, rules.delta.compressor)
    method.check_payload(said, replica, rules.replica.compressor)


def apply_meeting(
    state: TrainingState,
    members: Sequence[method.Contribution],
    rules: GossipRules,
    *,
    me: str,
    wanted: Tensors | None,
    round_index: int,
) -> TrainingState:
    """The state after meeting `members`, `me` among them (alone: after the outer step on one's own delta).

    See `optimizers.gossip.gossip_update`. The own replica enters as it was said, rounded like the others': so the
    moves within the meeting add up to zero whatever the chain loses. The residual is what the delta's packet did not
    say of `wanted`, or nothing without error feedback.
    """
    chosen, replica = rules.delta.method, state.anchor
    parts = {member.peer: _parts(member.payload) for member in members}
    deltas = [replace(member, payload=parts[member.peer][0]) for member in members]
    delta = method.merged_delta(sorted(deltas, key=lambda member: member.peer), replica, rules.delta)
    apart = None
    if len(members) > 1:
        replicas = [replace(member, payload=parts[member.peer][1], weight=1) for member in members]
        mean = method.merged_delta(sorted(replicas, key=lambda member: member.peer), replica, rules.replica)
        mine = method.decode(parts[me][1], replica, rules.replica.compressor)
        apart = {name: value - mean[name] for name, value in mine.items()}
    anchor, outer = gossip_update(
        rules.delta.outer,
        chosen.outer.lr,
        chosen.gossip.mixing,
        replica=replica,
        state=state.outer,
        delta=delta,
        apart=apart,
        round_index=round_index,
    )
    residual = {} if wanted is None else method.residual_after(parts[me][0], wanted, replica, rules.delta)
    return TrainingState(anchor, outer, residual)


def _parts(payload: bytes) -> tuple[bytes, bytes]:
    delta, replica = unpack_list(payload, "gossip payload", len(payload), 2)
    return as_bytes(delta, "gossip payload: delta", len(payload)), as_bytes(replica, "replica", len(payload))


@final
class GossipLearner(Learner):
    """A model trained by `Trainer` from its own replica. What was trained stays wanted until a meeting took it."""

    def __init__(
        self, me: PeerID, state: TrainingState, rules: GossipRules, trainer: Trainer, held_out: Sequence[Tensor]
    ) -> None:
        self.state = state
        self._me = me
        self._rules = rules
        self._trainer = trainer
        self._held_out = held_out
        self._wanted: dict[str, Tensor] | None = None
        self._delta: dict[str, Tensor] | None = None

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        assert steps is None, "between two meetings all steps are done at once"
        try:
            result = self._trainer.run_inner_steps(self.state.anchor, round_index, should_stop)
        except Diverged:
            return Trained(0, float("nan"))
        self._delta = result.delta
        return Trained(result.tokens, result.loss)

    def pack(self, round_index: int) -> bytes:
        assert self._delta is not None
        self._wanted = method.wanted(self.state, self._delta, self._rules.delta.method)
        self._delta = None
        return make_gossip_payload(self._wanted, self.state, self._rules, round_index)

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        members = [method.Contribution(c.owner, c.weight, c.payload) for c in contributions]
        self.state = apply_meeting(
            self.state, members, self._rules, me=self._me, wanted=self._wanted, round_index=number - 1
        )
        self._wanted = None

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        raise AssertionError("a gossip run has no chain to move to")

    def fingerprint(self) -> bytes:
        return method.fingerprint(self.state.anchor, self.state.outer)

    def validation_loss(self) -> float:
        return self._trainer.validation_loss(self.state.anchor, self._held_out)

    def check(self, payload: bytes) -> None:
        check_gossip_payload(payload, self.state.anchor, self._rules)

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        return checkpoint.dump(replace(self.state, residual={}) if shared_only else self.state)

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        loaded = checkpoint.load(files, self.state)
        self.state = loaded if own else replace(loaded, residual={})
        self._wanted = self._delta = None
        return self.fingerprint()

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        loaded = checkpoint.load(files, self.state)
        return method.fingerprint(loaded.anchor, loaded.outer)
