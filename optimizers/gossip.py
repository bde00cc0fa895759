"""NoLoCo's outer step (arXiv 2506.10911): a few replicas step together, and each moves towards their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from optimizers.schedule import float32
from optimizers.seam import OuterOptimizer, Tensors

MODES = ("consensus", "gossip")
GOSSIP_OUTERS = ("sgd", "heavyball")
"""Linear ones: only then do the moves within a meeting add up to zero, so that the mean of all replicas stays."""
GROUP_MAX = 64
MIXING_MAX = 2.0


@dataclass(frozen=True, slots=True)
class GossipSettings:
    """Only for `mode = "gossip"`: `group` peers meet; each moves by `mixing` (the paper's gamma) of its way to their
    mean; `chain` compresses the replica itself, apart from the delta.
    """

    group: int = 2
    mixing: float = 0.7
    chain: str = "identity all fp16"

    def validate(self, prefix: str = "gossip") -> None:
        """Raises `ValueError` naming the setting and its value."""
        if not 2 <= self.group <= GROUP_MAX:
            raise ValueError(f"{prefix}.group = {self.group}: must lie between 2 and {GROUP_MAX}")
        if not 0 < self.mixing <= MIXING_MAX:
            raise ValueError(f"{prefix}.mixing = {self.mixing}: must be above 0 and at most {MIXING_MAX}")


def gossip_update(
    outer: OuterOptimizer,
    lr: float,
    mixing: float,
    *,
    replica: Tensors,
    state: Tensors,
    delta: Tensors,
    apart: Tensors | None,
    round_index: int,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The replica phi and the outer state after a meeting.

    With phi_j the slow weights of the members, theta_j the weights after their inner steps, Delta_j = phi_j - theta_j
    their pseudo-gradients (downhill is minus) and means over the members, peer i does

      m_i   <- momentum m_i - lr mean(Delta) + mixing (mean(phi) - phi_i)
      phi_i <- phi_i + m_i

    which is the authors' code, where `mixing` equals `lr` (they write +lr mean(theta - phi)). `delta` is mean(Delta),
    `apart` is phi_i - mean(phi), None where nobody else was there. `outer` is heavy-ball momentum with a constant `lr`:
    with m = -lr b its b <- momentum b + g, phi <- phi - lr b is the same for g = delta + (mixing / lr) apart. Without
    momentum, with lr 1 and mixing 1, phi_i <- mean(theta): plain averaging, as in Moshpit SGD (arXiv 2103.03239).

    Summed over the members, the terms with `mixing` vanish, so what meetings keep is the sum over all peers of
    phi + momentum / (1 - momentum) m, where a replica comes to rest: it moves by the deltas only. That holds for any
    compression if all members, the peer itself too, use the replicas as they were said.
    """
    gradient = dict(delta)
    if apart is not None:
        gain = float32(mixing / lr)
        gradient = {name: value + apart[name] * gain for name, value in delta.items()}
    return outer.update(replica, gradient, state, round_index=round_index)


def variance_factor(size: int, mixing: float = 1.0, momentum: float = 0.0) -> float:
    """By which the variance among many replicas shrinks in one round of groups of `size` drawn at random; >= 1: never.

    With c = 1 - 1/size, V, C, M the second moments of a replica's distance x from the mean, of x times its momentum m,
    and of m: m <- momentum * m - mixing * (x - its group's mean), x <- x + m gives
      M' = momentum^2 M - 2 momentum mixing c C + mixing^2 c V
      C' = momentum C - mixing c V + M'
      V' = V + 2 (momentum C - mixing c V) + M'
    and the factor is the largest eigenvalue of that map, found by iterating it. Without momentum and with mixing 1 it
    is 1 / size.
    """
    share = 1 - 1 / size
    v, c, m = 1.0, 0.0, 0.0
    logarithm = 0.0
    for step in range(2 * _ITERATIONS):
        m = momentum**2 * m - 2 * momentum * mixing * share * c + mixing**2 * share * v
        moved = momentum * c - mixing * share * v
        v, c = v + 2 * moved + m, moved + m
        scale = v + m
        if not 0 < scale < 1e300:
            return 0.0 if scale == 0 else float("inf")
        v, c, m = v / scale, c / scale, m / scale
        # A pair of complex eigenvalues makes single steps differ: average over the second half.
        if step >= _ITERATIONS:
            logarithm += math.log(scale)
    return math.exp(logarithm / _ITERATIONS)


_ITERATIONS = 400
