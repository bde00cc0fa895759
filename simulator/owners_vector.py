"""The learner of 64 real numbers where owners reduce: what they merge of whom is written down, and must balance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from averaging.contribution import Contribution
from averaging.outbox import Reduction
from averaging.owners import parse_parts
from network.seam import PeerID
from peer import method
from peer.learner import Own, Shared, SharingLearner, Trained
from peer.owners_learner import OwnersLearner
from peer.trainer import Trainer
from simulator.ledger import BooksWrong
from simulator.vector import METHOD, SIZE, CheckedLearner, VectorBooks, joined, linear_loss, rules_for, vector_model

PARTS = 4


@final
class OwnersBooks:
    """The books of a swarm of such learners, and the place to get them from."""

    def __init__(self, parts: int = PARTS) -> None:
        self.parts = parts
        self.vectors = VectorBooks(METHOD)
        self.made: dict[bytes, list[tuple[PeerID, int, Tensor]]] = {}
        """What an owner's payload merges: whose, of which of its lives, and what that says."""
        self.lives: dict[tuple[PeerID, bytes], int] = {}
        """In which life a peer made a packet."""
        self.num_learners = 0

    def learner(self, me: PeerID) -> OwnersVectorLearner:
        return OwnersVectorLearner(me, self)


@final
class OwnersVectorLearner(CheckedLearner, SharingLearner):
    """`OwnersLearner` with a check of every step: all that was produced is merged, waits here, or was given up because
    nobody could tell, and owners lose nothing of what they merge.
    """

    inner: OwnersLearner

    def __init__(self, me: PeerID, books: OwnersBooks) -> None:
        self.me = me
        model, rules = vector_model(), rules_for(METHOD)
        state = method.initial_state(model, rules)
        trainer = Trainer(model, linear_loss, lambda round_index, step: books.vectors.draw(me), METHOD)
        self.inner = OwnersLearner(me, state, rules, trainer, [torch.ones(1, SIZE)], books.parts)
        self.round_steps = self.inner.round_steps
        self._books = books
        self._rules = rules
        books.num_learners += 1
        self._life = books.num_learners
        self._lost: Tensor | None = None
        """None as long as something may have been given up since the last look."""
        self._is_whole = True
        """Whether this process began with nothing, and never had to give anything up."""
        self._reduced: dict[bytes, dict[str, Tensor]] = {}
        """As an owner: the packets that this process made of everybody's, and of what."""

    @property
    def num_parts(self) -> int:
        return self.inner.num_parts

    def waiting(self) -> Tensor:
        """All that was made and not said, or said in vain so far."""
        inner = self.inner
        return joined(inner.state.residual | (inner._wanted or {})) + joined(inner._progress.unpacked())

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        self._balance()
        return self.inner.train(round_index, should_stop, steps)

    def pack(self, round_index: int) -> bytes:
        payload = self.inner.pack(round_index)
        for packet in parse_parts(payload).values():
            self._books.lives[self.me, packet] = self._life
        return payload

    def reduce(self, reduction: Reduction) -> bytes:
        inner = self.inner
        said = [self._said(share) for share in reduction.shares]
        payload = inner.reduce(reduction)
        made = {part: inner._merging[part][1] for part in parse_parts(payload)}
        self._reduced |= {packet: made[part] for part, packet in parse_parts(payload).items()}
        kept = _sum([joined(inner._kept[part]) for part in made if part in inner._kept])
        mean = torch.stack([vector for _, _, vector in said]).mean(0)
        wanted = _sum([joined(tensors) for tensors in made.values()])
        self._check(f"what {self.me} merges", wanted - kept - mean, wanted)
        self._books.made[payload] = said
        return payload

    def _said(self, share: Contribution) -> tuple[PeerID, int, Tensor]:
        """Whose share this is, of which life, and what its parts say together."""
        inner, packets = self.inner, parse_parts(share.payload)
        parts = {p: inner.parts.part(p, inner.state.anchor) for p in packets}
        said = [joined(method.decode(packet, parts[p], self._rules.compressor)) for p, packet in packets.items()]
        return share.owner, self._books.lives[share.owner, next(iter(packets.values()))], _sum(said)

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        self._on_apply(contributions, lambda: self.inner.apply(number, contributions, own))

    def apply_shared(self, number: int, contributions: Sequence[Contribution], shared: Shared | None) -> None:
        if shared is not None and shared[1]:
            self._give_up()
        self._on_apply(contributions, lambda: self.inner.apply_shared(number, contributions, shared))

    def _on_apply(self, contributions: Sequence[Contribution], apply: Callable[[], None]) -> None:
        before, anchor = self.fingerprint(), joined(self.inner.state.anchor)
        kept = {part: joined(tensors) for part, tensors in self.inner._kept.items()}
        apply()
        if not contributions:
            return
        merged = [said for c in contributions for said in self._books.made[c.payload]]
        foreign = [vector for owner, life, vector in merged if owner == self.me and life != self._life]
        if self._lost is not None:  # What an earlier process took with it was heard after all.
            self._lost = self._lost - _sum(foreign)
        self._check_kept(kept, contributions)
        history = self._books.vectors.history
        if history.known(before, contributions) is None:
            said: dict[PeerID, Tensor] = defaultdict(_zeros)
            for owner, _, vector in merged:
                said[owner] = said[owner] + vector
            history.add(before, contributions, self.fingerprint(), said)
            self._check_anchor(anchor, contributions)

    def _check_anchor(self, before: Tensor, contributions: Sequence[Contribution]) -> None:
        """Of two owners that speak of one part the first counts."""
        moved, seen = _zeros(), set()
        for contribution in sorted(contributions, key=lambda c: c.owner):
            for part, packet in parse_parts(contribution.payload).items():
                if part in seen:
                    raise BooksWrong(f"part {part} is merged by two owners in one round")
                seen.add(part)
                like = self.inner.parts.part(part, self.inner.state.anchor)
                moved = moved + joined(method.decode(packet, like, self._rules.compressor))
        expected = before - METHOD.outer.lr * moved
        self._check("the anchor", joined(self.inner.state.anchor) - expected, expected)

    def _check_kept(self, before: Mapping[int, Tensor], contributions: Sequence[Contribution]) -> None:
        """What a committed packet of this process left out of all that was to be said is kept; no other changes that,
        one of its earlier lives no more than another owner's.
        """
        own = [parse_parts(c.payload) for c in contributions if c.owner == self.me]
        committed = {part: packet for packets in own for part, packet in packets.items() if packet in self._reduced}
        for part in range(self.num_parts):
            expected = before.get(part, _zeros())
            if part in committed:
                wanted, like = self._reduced[committed[part]], self.inner.parts.part(part, self.inner.state.anchor)
                said = method.decode(committed[part], like, self._rules.compressor)
                expected = joined(wanted) - joined(said)
            kept = joined(self.inner._kept.get(part, {}))
            self._check(f"what {self.me} keeps of part {part}", expected - kept, expected)

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        self._give_up()
        self.inner.move(left, joined)

    def _give_up(self) -> None:
        """What is in the air may be merged or not."""
        self._balance()
        self._lost, self._is_whole = None, False

    def _balance(self) -> None:
        books = self._books.vectors
        produced = books.produced[self.me]
        lost = produced - books.merged(self.me, self.fingerprint()) - self.waiting()
        if self._lost is not None:
            self._check(f"the residual of {self.me}", lost - self._lost, produced)
        self._lost = lost

    def check_left(self, *, crashed: bool) -> None:
        """At a peer's end: if it never had to give anything up, all that was made is either merged or waits."""
        self._balance()
        assert self._lost is not None
        if self._is_whole and not crashed:
            self._check(f"the work of {self.me}", self._lost, self._books.vectors.produced[self.me])

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        if own:
            self._is_whole = False  # An earlier process kept to itself what it owed.
        else:
            self._give_up()
        return self.inner.load(files, own=own)


def _sum(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).sum(0) if vectors else _zeros()


def _zeros() -> Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)
