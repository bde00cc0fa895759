"""The `Learner` seam: what the loop trains; and the real one, a torch model under a run's method.

All calls block and are made one at a time, off the event loop where the worker is a thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import final

from torch import Tensor

from averaging.contribution import Contribution
from averaging.outbox import Reduction
from network.seam import PeerID
from optimizers.seam import Tensors
from peer import checkpoint, method
from peer.fragments import fragments_of
from peer.method import Rules, TrainingState
from peer.progress import Progress
from peer.trainer import Diverged, Trainer


@dataclass(frozen=True, slots=True)
class Trained:
    """What the inner steps of one round did; `tokens` is 0 and `loss` NaN when they diverged."""

    tokens: int
    loss: float


class Own(Enum):
    """What a committed round is to this peer's own work."""

    NOTHING = auto()
    """No concern of it: nothing was offered, or it is accounted for already."""
    SAID = auto()
    """It names something that this process offered, and so holds in `wanted` or the residual."""
    MISSED = auto()
    """What was offered is void: it is wanted still."""
    FORGOTTEN = auto()
    """It names what an earlier process offered, which held all of the residual that this one began with."""


class Learner(ABC):
    """Holds the state after the newest applied round, this peer's residual, and what it has trained since."""

    round_steps: int = 1
    """Inner steps of one round."""
    overlap: int = 0
    """So many of them are done while the round before is in the air."""
    fragments: int = 1
    """Above 1 a round concerns one part of the model, and a payload is good for that round only."""

    @property
    def steps_left(self) -> int:
        """Until `pack`."""
        return self.round_steps

    @abstractmethod
    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        """The inner steps that are left until `pack`, or the next `steps` of them, from the current state and what was
        trained since the last `pack`. What comes in between two calls, `apply` or `load`, takes nothing of that away.
        """

    @abstractmethod
    def pack(self, round_index: int) -> bytes:
        """The payload that says all this peer wants to say after so many rounds; remembered until the next `apply`."""

    @abstractmethod
    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        """Commits round `number`; a recovery has no contributions."""

    @abstractmethod
    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        """The shared state now stands for other rounds than those applied: without the own payloads `left`, which are
        to be said again, and with `joined`, which are not. None for `joined`: with something that this process does not
        remember; that held all that waits.
        """

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Of the state that all peers share after the same rounds."""

    @abstractmethod
    def validation_loss(self) -> float:
        """Of the shared state, on held-out data."""

    @abstractmethod
    def check(self, payload: bytes) -> None:
        """Raises `ValueError` unless `payload` can be merged. Called from the event loop while other calls run."""

    @abstractmethod
    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        """The state as files; with the peer's own residual unless `shared_only`."""

    @abstractmethod
    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        """Takes the state from `dump`'s files and returns its fingerprint.

        `own` files bring the residual; a stranger's replace the shared state only. Raises `ValueError`, with nothing
        changed, if they do not fit.
        """

    @abstractmethod
    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        """What `load` would return, without loading; raises `ValueError`."""


Shared = tuple[frozenset[int], frozenset[int]]
"""The parts of this peer that a round merged, and those of which it does not know."""


class SharingLearner(Learner):
    """Where owners reduce: it packs all parts of the model, and merges for others those that its peer owns."""

    @property
    @abstractmethod
    def num_parts(self) -> int: ...

    @abstractmethod
    def reduce(self, reduction: Reduction) -> bytes:
        """What an owner makes of these shares: its payload for the round."""

    @abstractmethod
    def apply_shared(self, number: int, contributions: Sequence[Contribution], shared: Shared | None) -> None:
        """Commits round `number`. `shared` is None where nothing of this peer was in the air."""


@final
class TorchLearner(Learner):
    """A model trained by `Trainer`, merged and stepped by `peer.method`."""

    def __init__(self, me: PeerID, state: TrainingState, rules: Rules, trainer: Trainer, held_out: Sequence[Tensor]):
        """Raises `ValueError` where the model cannot be shared out into the method's fragments."""
        self._state = state
        self._owed: tuple[bytes, dict[str, Tensor]] | None = None
        """What was committed last and what was wanted then: the residual is worked out when it is needed, so that the
        next round need not wait for it.
        """
        self._me = me
        self._rules = rules
        self._trainer = trainer
        self._held_out = held_out
        self._parts = fragments_of(state.anchor, rules.method)
        self._progress = Progress(trainer)
        self._wanted: dict[str, Tensor] | None = None
        """What the newest payload is to say, of the parameters that it speaks of; None once a round has settled it."""
        self._in_flight: tuple[int, bytes] | None = None
        """Round index and content of the newest payload; for looking ahead."""
        self.round_steps = rules.method.round_steps
        self.overlap = rules.method.overlap
        self.fragments = len(self._parts)

    @property
    def state(self) -> TrainingState:
        if self._owed is not None:
            (packed, wanted), self._owed = self._owed, None
            residual = method.residual_after(packed, wanted, self._state.anchor, self._rules)
            self._state = _with_residual(self._state, wanted.keys(), residual, missed=False)
        return self._state

    @state.setter
    def state(self, state: TrainingState) -> None:
        self._state, self._owed = state, None

    @property
    def steps_left(self) -> int:
        return self._progress.steps_left

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        try:
            tokens, loss = self._progress.train(self._ahead(), round_index, should_stop, steps)
        except Diverged:
            return Trained(0, float("nan"))
        return Trained(tokens, loss)

    def _ahead(self) -> dict[str, Tensor]:
        """The anchor; but gradients without inner optimiser, while a round is in the air, are taken where the anchor
        would be if all said what this peer says: so they are not a whole round old (Psyche's look-ahead).
        """
        state, rules = self.state, self._rules
        if self._in_flight is None or self._wanted is None or rules.method.inner.kind != "none":
            return state.anchor
        round_index, payload = self._in_flight
        return rules.outer.update(state.anchor, self.heard(payload), state.outer, round_index=round_index)[0]

    def pack(self, round_index: int) -> bytes:
        self._keep_wanted()
        index = self._parts.of_round(round_index + 1)
        delta = self._progress.take(self._parts.part(index, self.state.anchor))
        self._wanted = method.wanted(self.state, delta, self._rules.method)
        packed = method.make_payload(self._wanted, self._rules.compressor.seeded(round_index))
        payload = self._parts.labelled(index, packed)
        self._in_flight = (round_index, payload) if self.overlap else None
        return payload

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        index = self._parts.of_round(number)
        names = self._parts.names[index]
        is_of_it = self._wanted is not None and self._wanted.keys() == set(names)
        # With fragments the round of the newest payload is over, whatever was committed.
        if own is Own.MISSED or (self.fragments > 1 and (own is Own.NOTHING or not is_of_it)):
            self._keep_wanted()
        if own is Own.FORGOTTEN:
            self.state = _with_residual(self.state, names, {}, missed=False)
        before = self._parts.part(index, self.state.anchor)
        members, rounds = self._members(index, contributions), (number - 1) // self.fragments
        self.state = method.apply_round(self.state, members, self._rules, round_index=rounds, names=names)
        said = own in (Own.SAID, Own.FORGOTTEN)
        self._progress.arrived(before, self._parts.part(index, self._state.anchor), said=said)
        if own is Own.SAID:
            mine = next(c.payload for c in contributions if c.owner == self._me)
            if self._wanted is not None:
                self._owed = self._parts.opened(mine)[1], self._wanted
            else:
                self._change_residual([], [mine])
        if own is not Own.NOTHING:
            self._wanted = None

    def _members(self, index: int, contributions: Sequence[Contribution]) -> list[method.Contribution]:
        """Those that speak of the round's fragment; no honest peer's speaks of another."""
        opened = [(c, *self._parts.opened(c.payload)) for c in contributions]
        return [method.Contribution(c.owner, c.weight, packed) for c, named, packed in opened if named == index]

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        self._change_residual(left, joined)
        self._progress.moved()

    def _change_residual(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        self._keep_wanted()
        state = self.state
        if joined is None:
            state, joined = _with_residual(state, state.anchor.keys(), {}, missed=False), ()
        elif not self._rules.method.error_feedback:
            for index in {self._parts.opened(payload)[0] for payload in joined}:
                state = _with_residual(state, self._parts.names[index], {}, missed=False)
            joined = ()
        residual = state.residual
        for payloads, returns in ((left, True), (joined, False)):
            for index, packed in map(self._parts.opened, payloads):
                there, here = ([packed], []) if returns else ([], [packed])
                part = self._parts.part(index, state.anchor)
                residual = method.moved_residual(residual, there, here, part, self._rules.compressor)
        self.state = replace(state, residual=residual, missed=frozenset(residual))

    def _keep_wanted(self) -> None:
        """What the newest payload was to say is owed whole: its round is over without it."""
        if self._wanted is not None:
            self.state = _with_residual(self.state, self._wanted.keys(), self._wanted, missed=True)
            self._wanted = None

    def fingerprint(self) -> bytes:
        return method.fingerprint(self._state.anchor, self._state.outer)

    def validation_loss(self) -> float:
        return self._trainer.validation_loss(self.state.anchor, self._held_out)

    def heard(self, payload: bytes) -> dict[str, Tensor]:
        """What a payload says, as every receiver reads it; raises `InvalidPacket`."""
        index, packed = self._parts.opened(payload)
        return method.decode(packed, self._parts.part(index, self._state.anchor), self._rules.compressor)

    def check(self, payload: bytes) -> None:
        index, packed = self._parts.opened(payload)
        method.check_payload(packed, self._parts.part(index, self._state.anchor), self._rules.compressor)

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        if shared_only:
            return checkpoint.dump(replace(self.state, residual={}, missed=frozenset()))
        # What is in no contribution yet is owed by whoever goes on from these files.
        state, made = self.state, self._progress.unpacked()
        owed = {name: value + state.residual[name] if name in state.residual else value for name, value in made.items()}
        return checkpoint.dump(_with_residual(state, owed.keys(), owed, missed=True))

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        loaded = checkpoint.load(files, self.state)
        kept = self.state
        if self._wanted is not None:
            # A payload that was made before may still be offered after: what was wanted is remembered.
            kept = _with_residual(kept, self._wanted.keys(), self._wanted, missed=True)
        self.state = loaded if own else replace(loaded, residual=kept.residual, missed=kept.missed)
        return self.fingerprint()

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        loaded = checkpoint.load(files, self.state)
        return method.fingerprint(loaded.anchor, loaded.outer)


def _with_residual(state: TrainingState, names: Collection[str], residual: Tensors, *, missed: bool) -> TrainingState:
    """The residual of `names` alone replaced; None waits where `residual` lacks one."""
    others = {name: value for name, value in state.residual.items() if name not in names}
    owed = (state.missed - set(names)) | (frozenset(residual) if missed else frozenset())
    return replace(state, residual=others | dict(residual), missed=owed)
