"""The learner of a run whose owners reduce: it speaks in parts, and merges for all the parts that it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from averaging.contribution import Contribution
from averaging.outbox import Reduction
from averaging.owners import encode_parts, parse_parts
from averaging.record import Malformed
from network.seam import PeerID
from peer import checkpoint, method
from peer.fragments import Fragments, partition
from peer.learner import Own, Shared, SharingLearner, Trained
from peer.method import Rules, TrainingState
from peer.progress import Progress
from peer.trainer import Diverged, Trainer


@final
class OwnersLearner(SharingLearner):
    """Error feedback on both sides: a peer keeps what its own packets left out, and an owner what the packets that it
    made of everybody's left out, until it owns that part's next round. Either is given up only when a round commits.

    What a crash or a move to another chain finds in the air is lost, not said again: a peer cannot know what others
    merged of it.
    """

    def __init__(
        self,
        me: PeerID,
        state: TrainingState,
        rules: Rules,
        trainer: Trainer,
        held_out: Sequence[Tensor],
        parts: int,
    ) -> None:
        """Raises `ValueError` where the model has too few parameters for so many parts."""
        self.state = state
        self.parts = Fragments(partition({name: value.numel() for name, value in state.anchor.items()}, parts))
        self._me = me
        self._rules = rules
        self._trainer = trainer
        self._held_out = held_out
        self._progress = Progress(trainer)
        self._wanted: dict[str, Tensor] | None = None
        self._packets: dict[int, bytes] = {}
        self._kept: dict[int, dict[str, Tensor]] = {}
        """As an owner: what earlier packets of a part left out."""
        self._merging: dict[int, tuple[bytes, dict[str, Tensor]]] = {}
        """As an owner: the newest packet of a part, and what it was made of."""
        self.round_steps = rules.method.round_steps
        self.overlap = rules.method.overlap

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def steps_left(self) -> int:
        return self._progress.steps_left

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        try:
            tokens, loss = self._progress.train(self.state.anchor, round_index, should_stop, steps)
        except Diverged:
            return Trained(0, float("nan"))
        return Trained(tokens, loss)

    def pack(self, round_index: int) -> bytes:
        self._give_up(missed=True)
        delta = self._progress.take(self.state.anchor)
        self._wanted = method.wanted(self.state, delta, self._rules.method)
        compressor = self._rules.compressor.seeded(round_index)
        self._packets = {
            part: method.make_payload(self.parts.part(part, self._wanted), compressor)
            for part in range(len(self.parts))
        }
        return encode_parts(self._packets)

    def reduce(self, reduction: Reduction) -> bytes:
        """Part by part `compress(kept + merge(shares))`."""
        compressor = self._rules.compressor.seeded(reduction.head.round)
        opened = [(share, parse_parts(share.payload)) for share in reduction.shares]
        merged: dict[int, bytes] = {}
        for part in sorted(opened[0][1]):
            members = [method.Contribution(s.owner, s.weight, packets[part]) for s, packets in opened]
            like = self.parts.part(part, self.state.anchor)
            delta = method.merged_delta(members, like, self._rules)
            kept = self._kept.get(part, {})
            wanted = {name: value + kept[name] if name in kept else value for name, value in delta.items()}
            merged[part] = method.make_payload(wanted, compressor)
            self._merging[part] = merged[part], wanted
        return encode_parts(merged)

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        self.apply_shared(number, contributions, None if own is Own.NOTHING else (frozenset(), frozenset()))

    def apply_shared(self, number: int, contributions: Sequence[Contribution], shared: Shared | None) -> None:
        before = self.state.anchor
        delta: dict[str, Tensor] = {}
        for contribution in sorted(contributions, key=lambda c: c.owner):
            for part, packet in parse_parts(contribution.payload).items():
                like = self.parts.part(part, before)
                if not like.keys() & delta.keys():
                    delta |= method.decode(packet, like, self._rules.compressor)
                if contribution.owner == self._me:
                    self._settle_merged(part, packet)
        if shared is not None:
            self._settle_shared(*shared)
        if delta:
            anchor, outer = self._rules.outer.update(before, delta, self.state.outer, round_index=number - 1)
            self.state = replace(self.state, anchor=anchor, outer=outer)
        settled = frozenset[int]() if shared is None else frozenset.union(*shared)
        for part in range(len(self.parts)):
            # What was heard others have taken over, and what may have been is given up; the rest is owed still.
            there, here = self.parts.part(part, before), self.parts.part(part, self.state.anchor)
            self._progress.arrived(there, here, said=part in settled)

    def _settle_merged(self, part: int, packet: bytes) -> None:
        """A packet that this peer made for all was committed: what it left out is kept for the part's next."""
        made = self._merging.pop(part, None)
        if made is not None and made[0] == packet:
            like = self.parts.part(part, self.state.anchor)
            self._kept[part] = method.residual_after(packet, made[1], like, self._rules)

    def _settle_shared(self, heard: frozenset[int], unknown: frozenset[int]) -> None:
        if self._wanted is None:
            return
        residual, missed = dict(self.state.residual), set(self.state.missed)
        for part, names in enumerate(self.parts.names):
            wanted = {name: self._wanted[name] for name in names}
            rest: dict[str, Tensor] = wanted
            if part in heard:
                like = self.parts.part(part, self.state.anchor)
                rest = method.residual_after(self._packets[part], wanted, like, self._rules)
            elif part in unknown:
                rest = {}
            for name in names:
                residual.pop(name, None)
                missed.discard(name)
            residual |= rest
            missed |= set(rest) if part not in heard else set()
        self.state = replace(self.state, residual=residual, missed=frozenset(missed))
        self._wanted = None

    def _give_up(self, *, missed: bool) -> None:
        """Nothing of what is in the air was heard, or nobody can tell."""
        everything = frozenset(range(len(self.parts)))
        self._settle_shared(frozenset(), frozenset() if missed else everything)

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        self._give_up(missed=False)
        self._kept, self._merging = {}, {}
        self._progress.moved()

    def fingerprint(self) -> bytes:
        return method.fingerprint(self.state.anchor, self.state.outer)

    def validation_loss(self) -> float:
        return self._trainer.validation_loss(self.state.anchor, self._held_out)

    def check(self, payload: bytes) -> None:
        try:
            packets = parse_parts(payload)
        except Malformed as error:
            raise ValueError(str(error)) from error
        for part, packet in packets.items():
            if part >= len(self.parts):
                raise ValueError(f"part {part}: the model has {len(self.parts)}")
            method.check_payload(packet, self.parts.part(part, self.state.anchor), self._rules.compressor)

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        # The residual may be in a share by the time that a later process reads this, and nobody could tell.
        return checkpoint.dump(replace(self.state, residual={}, missed=frozenset()))

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        loaded = checkpoint.load(files, self.state)
        self.state = replace(loaded, residual=self.state.residual, missed=self.state.missed)
        return self.fingerprint()

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        loaded = checkpoint.load(files, self.state)
        return method.fingerprint(loaded.anchor, loaded.outer)
