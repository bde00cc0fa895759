"""The `OuterOptimizer` seam and the value that moves through it: named tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Parameters, deltas or buffers by parameter name; never changed in place."""


class OuterOptimizer(ABC):
    """The step of all peers on the shared anchor. Every peer must get the same bits: elementwise operations only,
    multiplications and additions written apart (a fused one rounds once where two round twice), no reductions
    whose order a device may choose.
    """

    @abstractmethod
    def init(self, anchor: Tensors) -> dict[str, Tensor]:
        """The state before the first round; keys are `<buffer>.<parameter>`. May be empty."""

    @abstractmethod
    def update(
        self, anchor: Tensors, delta: Tensors, state: Tensors, *, round_index: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The next anchor and state; `delta` is the merged pseudo-gradient (it points uphill: it is subtracted).

        `delta` may name only some parameters (one fragment): the others, and their state, come back unchanged.
        `round_index` counts the committed rounds before this one, from 0; schedules and bias corrections follow it.
        """
