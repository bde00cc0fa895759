"""A learner of 64 real numbers: the real learner, method and compressor under books that must balance to rounding."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import final

import torch
from torch import Tensor, nn

from averaging.contribution import Contribution
from compression.chain import parse_chain
from compression.remembering import Remembering
from network.seam import PeerID
from optimizers.inner import InnerSettings
from optimizers.outer import OuterSettings
from optimizers.presets import Method
from optimizers.schedule import Schedule
from peer import method
from peer.learner import Learner, Own, TorchLearner, Trained
from peer.trainer import Trainer
from simulator.ledger import BooksWrong, History

SIZE = 64
TOLERANCE = 1e-5
"""Of what was produced in all: sums of float32 in another order differ by less."""
METHOD = Method(
    batch=1,
    inner=InnerSettings(kind="none", lr=1.0, clip=0.0),
    outer=OuterSettings(kind="sgd", lr=0.5),
    schedule=Schedule(kind="constant", warmup=0),
    error_feedback=True,
    residual_decay=1.0,
    chain="dct(8) topk(4/16) bits(4)",
)
"""Linear, so that work is conserved: no clipping, no decay, an outer step that adds."""
STREAMING = replace(
    METHOD,
    inner=InnerSettings(kind="sgd", lr=1.0, momentum=0.0, clip=0.0),
    inner_steps=8,
    fragments=4,
    overlap=1,
)
"""Linear too: a step moves the weights by its gradient, which is the same wherever they are."""
METHODS = {"vector": METHOD, "overlap": replace(METHOD, overlap=1), "streaming": STREAMING}
PAYLOAD_BYTES_MAX = 4096
_QUARTERS = ("a", "b", "c", "d")


class _Vector(nn.Module):
    """A vector in four parts."""

    def __init__(self) -> None:
        super().__init__()
        for name in _QUARTERS:
            self.register_parameter(name, nn.Parameter(torch.zeros(SIZE // len(_QUARTERS))))


def vector_model() -> nn.Module:
    return _Vector()


def linear_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Linear in the vector, so that its gradient is the batch."""
    return (torch.cat([parameter for _, parameter in sorted(model.named_parameters())]) * batch[0]).sum()


def joined(parts: Mapping[str, Tensor]) -> Tensor:
    """The vector whose parts are given, zero where one is not."""
    quarter = torch.zeros(SIZE // len(_QUARTERS))
    return torch.cat([parts.get(name, quarter) for name in _QUARTERS]).double()


@lru_cache(maxsize=8)
def rules_for(chosen: Method) -> method.Rules:
    # All peers read the same payloads.
    return method.rules_of(chosen, lambda text: Remembering(parse_chain(text)))


@final
class VectorBooks:
    """The books of a swarm of vectors, and the place to get learners from."""

    def __init__(self, chosen: Method = METHOD) -> None:
        self.method = chosen
        self.history: History[Tensor] = History()
        self.produced: dict[PeerID, Tensor] = defaultdict(_zeros)
        self._drawn: dict[PeerID, int] = defaultdict(int)

    def learner(self, me: PeerID) -> VectorLearner:
        return VectorLearner(me, self)

    def draw(self, peer: PeerID) -> Tensor:
        """A gradient that nobody has had before, `(1, 64)`; it counts as produced."""
        self._drawn[peer] += 1
        seed = hashlib.blake2b(f"{peer} {self._drawn[peer]}".encode(), digest_size=7).digest()
        drawn = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(int.from_bytes(seed, "big")))
        self.produced[peer] = self.produced[peer] + drawn[0].double()
        return drawn

    def merged(self, owner: PeerID, state: bytes) -> Tensor:
        said = [step.said[owner] for step in self.history.back_from(state) if owner in step.said]
        return torch.stack(said).sum(0) if said else _zeros()


class CheckedLearner(Learner):
    """A learner inside another one, which tells of a number that does not balance."""

    inner: Learner

    @property
    def steps_left(self) -> int:
        return self.inner.steps_left

    def fingerprint(self) -> bytes:
        return self.inner.fingerprint()

    def validation_loss(self) -> float:
        return self.inner.validation_loss()

    def check(self, payload: bytes) -> None:
        self.inner.check(payload)

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        return self.inner.dump(shared_only=shared_only)

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        return self.inner.load(files, own=own)

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        return self.inner.fingerprint_of(files)

    def _check(self, what: str, difference: Tensor, scale: Tensor) -> None:
        wrong, allowed = float(difference.abs().max()), TOLERANCE * (1 + float(scale.abs().max()))
        if not wrong <= allowed:
            raise BooksWrong(f"{what} is wrong by {wrong:.3g}, more than {allowed:.3g}")


@final
class VectorLearner(CheckedLearner):
    """`TorchLearner` with a check of every step: all that was produced is merged, waits here, or was lost with the
    memory of an earlier process, and the anchor has moved by the mean of what was said, late work evened out.
    """

    inner: TorchLearner

    def __init__(self, me: PeerID, books: VectorBooks) -> None:
        self.me = me
        model = vector_model()
        rules = rules_for(books.method)
        state = method.initial_state(model, rules)
        trainer = Trainer(model, linear_loss, lambda round_index, step: books.draw(me), books.method)
        self.inner = TorchLearner(me, state, rules, trainer, [torch.ones(1, SIZE)])
        self.round_steps = self.inner.round_steps
        self.overlap = self.inner.overlap
        self.fragments = self.inner.fragments
        self._books = books
        self._lost: Tensor | None = None

    def waiting(self) -> Tensor:
        """All that was made and not said, or said in vain so far."""
        inner = self.inner
        held = inner.state.residual | (inner._wanted or {})
        return joined(held) + joined(inner._progress.unpacked())

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        self._balance()
        return self.inner.train(round_index, should_stop, steps)

    def pack(self, round_index: int) -> bytes:
        return self.inner.pack(round_index)

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        before, anchor = self.fingerprint(), joined(self.inner.state.anchor)
        if own is Own.FORGOTTEN:
            self._lost = None  # An earlier process said it, and took with it what it did not say.
        self.inner.apply(number, contributions, own)
        if contributions and self._books.history.known(before, contributions) is None:
            self._write_down(before, anchor, contributions)

    def _write_down(self, before: bytes, anchor: Tensor, contributions: Sequence[Contribution]) -> None:
        said = {c.owner: joined(self.inner.heard(c.payload)) for c in contributions}
        self._books.history.add(before, contributions, self.fingerprint(), said)
        rounds = method.rounds_of_work([c.weight for c in contributions]) if self.fragments == 1 else [1.0] * len(said)
        evened = [said[c.owner] / k for c, k in zip(contributions, rounds, strict=True)]
        mean = torch.stack(evened).mean(0)
        expected = anchor - self._books.method.outer.lr * mean
        self._check("the anchor", joined(self.inner.state.anchor) - expected, expected)

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        if joined is None:
            self._lost = None
        self.inner.move(left, joined)

    def _balance(self) -> None:
        produced = self._books.produced[self.me]
        lost = produced - self._books.merged(self.me, self.fingerprint()) - self.waiting()
        if self._lost is not None:
            self._check(f"the residual of {self.me}", lost - self._lost, produced)
        self._lost = lost

    def check_left(self, *, crashed: bool) -> None:
        """At a peer's end: without a crash all that was made is either merged or waits."""
        self._balance()
        assert self._lost is not None
        if not crashed:
            self._check(f"the work of {self.me}", self._lost, self._books.produced[self.me])


def _zeros() -> Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)
