"""A peer's own work that is in no contribution yet, and where its local weights are meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from optimizers.seam import Tensors
from peer.trainer import Diverged, Trainer


@final
class Progress:
    """The local weights are `anchor - offset - made`: what was made since a parameter was packed last, from a start
    that lies off the anchor by the part that others have not taken over yet: what is in the air or missed its round.
    (From the anchor itself the same would be learnt, and then said, once more.) All of it is kept as values; the module
    holds the weights only while it trains. So what happens to the anchor in between never touches what was made.

    Where there is no inner optimiser `made` is the sum of the gradients, and training is at the anchor itself.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        method = trainer.method
        self._blend = method.blend
        self._has_weights = bool(trainer.optimizers)
        self._offset: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._batches = 0
        self._steps_done = 0
        self._has_diverged = False

    @property
    def steps_left(self) -> int:
        """Of the round that was begun."""
        return self._trainer.method.round_steps - self._steps_done

    def train(
        self, anchor: Tensors, round_index: int, should_stop: Callable[[], bool], steps: int | None = None
    ) -> tuple[int, float]:
        """At most `steps` of those that are left, from where the last call ended; all of a round if none are. Returns
        tokens and mean loss.

        Raises `Diverged`: then nothing was made. If it comes twice in a row what was made before may be the reason, and
        is dropped.
        """
        if self.steps_left == 0:
            self._steps_done = 0
        last = self._trainer.method.round_steps if steps is None else self._steps_done + steps
        wanted = range(self._steps_done, min(last, self._trainer.method.round_steps))
        start = {name: anchor[name] - self._offset[name] if name in self._offset else anchor[name] for name in anchor}
        try:
            piece = self._trainer.run(start, self._made, wanted, round_index, should_stop)
        except Diverged:
            if self._has_diverged:
                self._offset, self._made, self._batches = {}, {}, 0
            self._has_diverged = True
            raise
        self._has_diverged = False
        self._made = piece.made
        self._batches += len(piece.losses)
        self._steps_done += len(piece.losses)
        return piece.tokens, sum(piece.losses) / len(piece.losses)

    def unpacked(self) -> dict[str, Tensor]:
        """All that `take` would give."""
        return self._trainer.delta(self._made, self._batches) if self._made else {}

    def take(self, like: Tensors) -> dict[str, Tensor]:
        """The delta of the parameters in `like`: it counts as packed, and `train` begins a round."""
        made = {n: self._made[n] if n in self._made else torch.zeros_like(value) for n, value in like.items()}
        delta = self._trainer.delta(made, max(1, self._batches))
        self._made = {name: value for name, value in self._made.items() if name not in like}
        self._batches = self._steps_done = 0
        if self._has_weights:
            # The weights stay where they are.
            self._offset |= {n: self._offset[n] + d if n in self._offset else d for n, d in delta.items()}
        return delta

    def arrived(self, before: Tensors, after: Tensors, *, said: bool) -> None:
        """A round has moved the anchor of some parameters; what they made and packed is `said`, or it is still owed.

        With weights w, anchor A and blend alpha: w <- alpha w + (1 - alpha) A, and for alpha = 0 w <- A - made, so that
        the newest steps are not undone. In either case `made` stays as it is: only the start moves, so each inner step
        is in one contribution, whatever blending does to the weights that it was taken at.
        """
        if self._blend == 0:
            if said:
                self._offset = {name: value for name, value in self._offset.items() if name not in after}
            return
        for name, anchor in after.items():
            made, offset = self._made.get(name), self._offset.get(name)
            weights = before[name] if offset is None else before[name] - offset
            self._offset[name] = (anchor - weights) * self._blend
            if made is not None:
                self._offset[name] -= made * (1 - self._blend)

    def moved(self) -> None:
        """The anchor is another one: everything starts there."""
        self._offset = {}
