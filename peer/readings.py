"""What the log is to one peer: its commits as the learner takes them, what the chains left hold, what is told of it."""

from __future__ import annotations

from collections.abc import Sequence

from averaging.chain import Left as LeftRound
from averaging.outbox import Commit
from averaging.record import Record
from network.seam import PeerID
from peer.learner import Learner, Own
from peer.reports import Healed, RoundDone


def replay(learner: Learner, me: PeerID, commits: Sequence[Commit]) -> None:
    """Brings a restored learner up to the log's head; what it offered before the restart is forgotten."""
    for commit in commits:
        mine = commit.record.member(me) is not None
        learner.apply(commit.record.round, commit.contributions, Own.FORGOTTEN if mine else Own.NOTHING)


def payloads_of(left: Sequence[LeftRound]) -> list[bytes]:
    return [r.mine.payload for r in left if r.mine is not None]


def healed(left: Sequence[LeftRound], me: PeerID, number: int) -> Healed:
    """The rounds `left` were left for the chain whose round `number` is applied."""
    mine = [r for r in left if r.record.member(me) is not None]
    lost = sum(m.weight for r in mine if r.mine is None for m in r.record.members if m.peer == me)
    returned = sum(r.mine.weight for r in mine if r.mine is not None)
    return Healed(number, len(left), returned, lost)


def round_done(record: Record, me: PeerID, base: bytes, *, tokens_processed: int, train_loss: float) -> RoundDone:
    return RoundDone(
        round=record.round,
        prev=record.prev,
        head=record.hash,
        members=tuple(m.peer for m in record.members),
        mine=record.member(me) is not None,
        tokens=record.tokens,
        tokens_processed=tokens_processed,
        fingerprint=base,
        train_loss=train_loss,
    )
