"""Merging what the members of a round sent, coefficient by coefficient, in a fixed order: the same bits everywhere.

The transforms are linear, so what is merged are coefficients, before the way back. Names kept for later: `rda`
(radial-directional averaging), `median_clip`, `centred_clip`, `trimmed_mean`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from optimizers.schedule import float32


class Merge(ABC):
    """Pure. Every peer must get the same bits: elementwise operations only, members summed one after the other."""

    @abstractmethod
    def merge(self, contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
        """One contribution's shape; `contributions` are in peer-id order, all with the same names and shapes.

        `weights` are the tokens behind each contribution, positive. An empty sequence is the caller's mistake.
        """


class ElementwiseMerge(Merge):
    """What the elementwise rules share: one parameter at a time."""

    def merge(self, contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
        assert contributions, "an empty round has nothing to merge"
        assert len(weights) == len(contributions)
        assert min(weights) > 0
        names = sorted(contributions[0])
        assert all(sorted(contribution) == names for contribution in contributions)
        return {name: self.merge_one([c[name] for c in contributions], weights) for name in names}

    @abstractmethod
    def merge_one(self, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor: ...


@final
class Mean(ElementwiseMerge):
    """(1 / M) * sum (SparseLoCo's rule): a coefficient that few sent counts for little, a lone attacker for 1 / M."""

    def merge_one(self, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        # Not a division by a number: CUDA would multiply by the reciprocal, a CPU would not.
        return ordered_sum(values) * float32(1 / len(values))


@final
class WeightedMean(ElementwiseMerge):
    """Each member by its share of the tokens. Weights are self-reported: whoever admits members must cap them."""

    def merge_one(self, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        # The shares are rounded first, so that no device may choose in which precision a tensor meets them.
        return ordered_sum([value * float32(w / sum(weights)) for value, w in zip(values, weights, strict=True)])


@final
class MeanOfSenders(ElementwiseMerge):
    """Per coefficient the mean over those who sent it, that is, whose value is not zero (DeMo's rule).

    Up to M times larger than `mean` where supports differ, and a lone sender has full weight: use it only under an
    outer step that does not depend on size, such as `sign`.
    """

    def merge_one(self, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        senders = ordered_sum([(value != 0).to(value.dtype) for value in values])
        return ordered_sum(values) / torch.clamp(senders, min=1.0)


MERGES: dict[str, type[ElementwiseMerge]] = {
    "mean": Mean,
    "mean_of_senders": MeanOfSenders,
    "weighted_mean": WeightedMean,
}


def build_merge(name: str) -> Merge:
    """Raises `ValueError` naming the rules there are."""
    if name not in MERGES:
        raise ValueError(f"merge = {name!r}: must be one of {', '.join(sorted(MERGES))}")
    return MERGES[name]()


def ordered_sum(values: Sequence[Tensor]) -> Tensor:
    # In peer-id order: float addition is not associative, and every peer must get the same bits.
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
