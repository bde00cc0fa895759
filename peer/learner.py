"""The `Learner` seam: what the loop trains; and the real one, a torch model under a run's method.

All calls block and are made one at a time, off the event loop where the worker is a thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import final

from torch import Tensor

from averaging.contribution import Contribution
from network.seam import PeerID
from peer import checkpoint, method
from peer.method import Rules, TrainingState
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

    @abstractmethod
    def train(self, round_index: int, should_stop: Callable[[], bool]) -> Trained:
        """The inner steps from the current state."""

    @abstractmethod
    def pack(self) -> bytes:
        """The payload that says all this peer wants to say; remembered until the next `apply`."""

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


@final
class TorchLearner(Learner):
    """A model trained by `Trainer`, merged and stepped by `peer.method`."""

    def __init__(self, me: PeerID, state: TrainingState, rules: Rules, trainer: Trainer, held_out: Sequence[Tensor]):
        self._state = state
        self._owed: tuple[bytes, dict[str, Tensor]] | None = None
        """The payload that was committed last and what was wanted then: the residual is worked out when it is needed,
        so that the next round need not wait for it.
        """
        self._me = me
        self._rules = rules
        self._trainer = trainer
        self._held_out = held_out
        self._delta: dict[str, Tensor] | None = None
        self._round_index = 0
        self._wanted: dict[str, Tensor] | None = None

    @property
    def state(self) -> TrainingState:
        if self._owed is not None:
            (payload, wanted), self._owed = self._owed, None
            residual = method.residual_after(payload, wanted, self._state.anchor, self._rules)
            self._state = replace(self._state, residual=residual, missed=False)
        return self._state

    @state.setter
    def state(self, state: TrainingState) -> None:
        self._state, self._owed = state, None

    def train(self, round_index: int, should_stop: Callable[[], bool]) -> Trained:
        self._round_index = round_index
        try:
            result = self._trainer.run_inner_steps(self.state.anchor, round_index, should_stop)
        except Diverged:
            return Trained(0, float("nan"))
        self._delta = result.delta
        return Trained(result.tokens, result.loss)

    def pack(self) -> bytes:
        assert self._delta is not None
        self._wanted = method.wanted(self.state, self._delta, self._rules.method)
        self._delta = None
        return method.make_payload(self._wanted, self._rules.compressor.seeded(self._round_index))

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        members = [method.Contribution(c.owner, c.weight, c.payload) for c in contributions]
        state, wanted = self.state, self._wanted
        if own is Own.MISSED and wanted is not None:
            state = replace(state, residual=wanted, missed=True)
        elif own is Own.FORGOTTEN:
            state = replace(state, residual={}, missed=False)
        self.state = method.apply_round(state, members, self._rules, round_index=number - 1)
        if own is Own.SAID:
            mine = next(member for member in members if member.peer == self._me)
            if wanted is not None:
                self._owed = mine.payload, wanted
            else:
                self.move([], [mine.payload])
        if own is not Own.NOTHING:
            self._wanted = None

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        state = self.state
        kept = state.residual if self._wanted is None else self._wanted
        if joined is None or (joined and not self._rules.method.error_feedback):
            kept, joined = {}, ()
        residual = method.moved_residual(kept, left, joined, state.anchor, self._rules.compressor)
        self.state = replace(state, residual=residual, missed=bool(residual))
        self._wanted = None

    def fingerprint(self) -> bytes:
        return method.fingerprint(self._state.anchor, self._state.outer)

    def validation_loss(self) -> float:
        return self._trainer.validation_loss(self.state.anchor, self._held_out)

    def check(self, payload: bytes) -> None:
        method.check_payload(payload, self._state.anchor, self._rules.compressor)

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        return checkpoint.dump(replace(self.state, residual={}, missed=False) if shared_only else self.state)

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        loaded = checkpoint.load(files, self.state)
        kept = self.state if self._wanted is None else replace(self.state, residual=self._wanted, missed=True)
        # A payload that was made before may still be offered after: what was wanted is remembered.
        self.state = loaded if own else replace(loaded, residual=kept.residual, missed=kept.missed)
        return self.fingerprint()

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        loaded = checkpoint.load(files, self.state)
        return method.fingerprint(loaded.anchor, loaded.outer)
