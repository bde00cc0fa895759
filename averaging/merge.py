"""Merging what the members of a round sent, in a fixed order: the same bits everywhere.

The transforms are linear, so what is merged are coefficients, before the way back; they are orthonormal, so the norms
that `rda` needs are those of the tensors (of what lies in a tile's padding besides, next to nothing).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from averaging.norms import norm, weighted_median
from compression.merging import merge_flat, split_flat
from compression.seam import Flat
from optimizers.inner import EMBEDDING_NAMES
from optimizers.schedule import float32


class Merge(ABC):
    """Pure. Every peer must get the same bits: members summed one after the other, sums over elements exact."""

    @abstractmethod
    def merge(self, contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
        """One contribution's shape; `contributions` are in peer-id order, all with the same names and shapes.

        `weights` are the tokens behind each contribution, positive. An empty sequence is the caller's mistake.
        """

    @abstractmethod
    def merge_flat(self, parts: Sequence[Flat], weights: Sequence[int], sizes: Mapping[str, int]) -> Tensor:
        """What `merge` gives, bit for bit, of contributions that are not dense: all coefficients in one row. `sizes`
        says how many of them each tensor has, in their order.
        """


class ElementwiseMerge(Merge):
    """What the elementwise rules share: one parameter at a time."""

    def merge(self, contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
        _check(contributions, weights)
        return {n: self.merge_one([c[n] for c in contributions], weights) for n in sorted(contributions[0])}

    def merge_flat(self, parts: Sequence[Flat], weights: Sequence[int], sizes: Mapping[str, int]) -> Tensor:
        return merge_flat(parts, lambda values: self.merge_one(values, weights))

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
    """Each member by its share of the tokens. Weights are self-reported: `peer.method.merged_delta` caps them."""

    def merge_one(self, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        # The shares are rounded first, so that no device may choose in which precision a tensor meets them.
        return scaled_sum(values, [w / sum(weights) for w in weights])


@final
class MeanOfSenders(ElementwiseMerge):
    """Per coefficient the mean over those who sent it, that is, whose value is not zero (DeMo's rule).

    Up to M times larger than `mean` where supports differ, and a lone sender has full weight: use it only under an
    outer step that does not depend on size, such as `sign`.
    """

    def merge_one(self, values: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        senders = ordered_sum([(value != 0).to(value.dtype) for value in values])
        return ordered_sum(values) / torch.clamp(senders, min=1.0)


WEIGHT_RATIO_MAX = 8
"""In `rda` nobody weighs more than so many times the median of the weights: they are self-reported."""
DIRECTION_MIN = 0.01
"""A mean of unit vectors that is shorter has no direction. That of 4,096 random ones has 1/64."""
_NORM_MIN = 1e-30
"""What is shorter points nowhere: its reciprocal must be a float32."""


@final
class RadialDirectional(Merge):
    """Radial-directional averaging, tensor by tensor (Decoupled DiLoCo, arXiv 2604.21428); embeddings by weighted mean.

    `radius * unit(sum w * unit(delta) / sum w)`: deltas of different peers are nearly orthogonal, so that their mean
    shrinks with their number, and this does not. The paper's radius is the weighted mean of the norms; here it is their
    weighted median, which one huge delta does not move. Where the directions cancel each other it is the weighted mean
    of the deltas, shortened to the radius if it is longer.

    The paper weighs by tokens * (tokens / steps). All peers of a run train on batches of one size, so the second factor
    is the same for all, and the weights are the tokens.
    """

    def merge(self, contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> dict[str, Tensor]:
        _check(contributions, weights)
        merged = {}
        for name in sorted(contributions[0]):
            flat = [Flat(None, c[name].reshape(-1), c[name].numel()) for c in contributions]
            merged[name] = self._merge_tensor(name, flat, weights).view(contributions[0][name].shape)
        return merged

    def merge_flat(self, parts: Sequence[Flat], weights: Sequence[int], sizes: Mapping[str, int]) -> Tensor:
        tensors = zip(*(split_flat(part, list(sizes.values())) for part in parts), strict=True)
        merged = [self._merge_tensor(name, flat, weights) for name, flat in zip(sizes, tensors, strict=True)]
        return torch.cat(merged) if merged else torch.zeros(0)

    def _merge_tensor(self, name: str, parts: Sequence[Flat], weights: Sequence[int]) -> Tensor:
        if len(parts) == 1:
            return parts[0].dense().clone()
        highest = WEIGHT_RATIO_MAX * sorted(weights)[(len(weights) - 1) // 2]
        capped = [min(weight, highest) for weight in weights]
        shares = [weight / sum(capped) for weight in capped]
        if is_embedding(name):
            return _scaled_sum_flat(parts, shares)
        norms = [norm(part.values) for part in parts]
        radius = weighted_median(norms, capped)
        units = [share / each if each > _NORM_MIN else 0.0 for share, each in zip(shares, norms, strict=True)]
        direction = _scaled_sum_flat(parts, units)
        length = norm(direction)
        if length < DIRECTION_MIN:
            direction = _scaled_sum_flat(parts, shares)
            length = max(radius, norm(direction))
        return direction * float32(radius / length) if length > _NORM_MIN else torch.zeros_like(direction)


def is_embedding(name: str) -> bool:
    """By the name of a parameter."""
    return not set(name.split(".")).isdisjoint(EMBEDDING_NAMES)


def _check(contributions: Sequence[Mapping[str, Tensor]], weights: Sequence[int]) -> None:
    assert contributions, "an empty round has nothing to merge"
    assert len(weights) == len(contributions)
    assert min(weights) > 0
    assert all(contribution.keys() == contributions[0].keys() for contribution in contributions)


MERGES: dict[str, type[Merge]] = {
    "mean": Mean,
    "mean_of_senders": MeanOfSenders,
    "rda": RadialDirectional,
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


def scaled_sum(values: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Each value times its factor, rounded to float32; their sum in order."""
    return ordered_sum([value * float32(factor) for value, factor in zip(values, factors, strict=True)])


def _scaled_sum_flat(parts: Sequence[Flat], factors: Sequence[float]) -> Tensor:
    return merge_flat(parts, lambda values: scaled_sum(values, factors))
