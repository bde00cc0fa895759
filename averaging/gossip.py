"""Gossip, the pure part: who meets whom in which round, and how long it is worth waiting.

In this mode there is no chain and no quorum. Every peer holds a replica of its own; in each round it meets a few
others, and those in one meeting move towards their common mean. Nobody coordinates: whom to meet follows from the
members' names, the round's number and the run's id. Where two peers see different members or stand at different
rounds, their choices may not fit; then whoever is ready meets somebody else who is (`averaging.gossip_node`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import final

from averaging.record import Hash, sha256
from averaging.timing import Pace
from network.identity import public_key_of
from network.seam import PeerID

NONCE_BYTES = 16


@final
@dataclass(frozen=True, slots=True)
class GossipConfig:
    """What a run fixes for its meetings, and limits on what strangers send; times follow what is observed."""

    payload_bytes_max: int
    weight_max: int
    group_size: int = 2
    """Peers in a meeting, at most."""
    start_peers: int = 1
    """The first round waits for so many members."""
    min_peers: int = 1
    """1: who finds nobody in time steps alone; more: it goes on looking."""
    invitations_max: int = 16
    """A peer that meets somebody other than its group invites so many in turn, at most."""
    invited_at_once: int = 3
    kept_max: int = 16
    """Invitations that wait for this peer to be ready; more are refused."""
    failures_max: int = 3
    """Meetings of one round that may break; then the peer steps alone."""
    outcomes_max: int = 64
    """Meetings that this peer organised and whose outcome it can still tell."""
    round_leap_max: int = 1024
    """A partner's round counts for at most so much more than one's own."""
    first_seconds: float = 2.0
    """How long things take as long as nothing has been observed."""
    seconds_min: float = 0.05
    seconds_max: float = 60.0
    """No deadline is longer."""


# Who meets whom.


def groups_of(members: Sequence[PeerID], number: int, run_id: str, size: int) -> list[tuple[PeerID, ...]]:
    """All meetings of round `number`: every member is in exactly one group, of at most `size`; the first organises it.

    `members` in any order, without repetition. The groups are the columns of the members written row by row into
    `size` rows; the next round reads them column by column. So with `size ** d` members nobody meets twice within d
    rounds, and all replicas reach the common mean after exactly d (Moshpit SGD, arXiv 2103.03239, has the same grid).
    Then the order is drawn anew from the hashes of the names.
    """
    order = _arranged(tuple(sorted(members)), number, run_id, size)
    columns = -(-len(order) // size)
    return [order[column::columns] for column in range(columns)]


def group_of(me: PeerID, members: Sequence[PeerID], number: int, run_id: str, size: int) -> tuple[PeerID, ...]:
    """The group of `me`, which counts as a member whether `members` holds it or not."""
    order = _arranged(tuple(sorted({*members, me})), number, run_id, size)
    columns = -(-len(order) // size)
    return order[order.index(me) % columns :: columns]


def candidates(me: PeerID, members: Sequence[PeerID], number: int, run_id: str, count: int) -> list[PeerID]:
    """Whom else to ask in round `number`, the first ones of an order that depends on the two names alone.

    So it changes nothing for a pair who else is a member, and what comes first for one often does so for the other.
    """
    others = (peer for peer in members if peer != me)
    return heapq.nsmallest(count, others, key=lambda peer: _pair_rank(run_id, number, *sorted((me, peer))))


def is_prior(one: PeerID, other: PeerID, run_id: str) -> bool:
    """Of two peers that invite each other at the same moment: whether `one` organises the meeting."""
    return (_rank(run_id, -1, one), one) < (_rank(run_id, -1, other), other)


def meeting_id(run_id: str, organiser: PeerID, number: int, nonce: bytes) -> Hash:
    """What a contribution to this meeting is signed for: it is good for no other."""
    return sha256(b"peer meeting 1\0" + run_id.encode() + public_key_of(organiser) + number.to_bytes(8, "big") + nonce)


def rounds_of_cycle(members: int, size: int) -> int:
    """The rounds after which everybody has met everybody, directly or not: the least d with size ** d >= members."""
    rounds = 1
    while size**rounds < members:
        rounds += 1
    return rounds


@lru_cache(maxsize=16)
def _arranged(members: tuple[PeerID, ...], number: int, run_id: str, size: int) -> tuple[PeerID, ...]:
    assert size >= 2, "a meeting takes two"
    cycle, turn = divmod(number, rounds_of_cycle(len(members), size))
    order = tuple(sorted(members, key=lambda peer: (_rank(run_id, cycle, peer), peer)))
    columns = -(-len(order) // size)
    for _ in range(turn):
        order = tuple(peer for column in range(columns) for peer in order[column::columns])
    return order


def _rank(run_id: str, number: int, peer: PeerID) -> bytes:
    return hashlib.blake2b(f"{run_id} {number} {peer}".encode(), digest_size=8).digest()


def _pair_rank(run_id: str, number: int, one: PeerID, other: PeerID) -> bytes:
    return hashlib.blake2b(f"{run_id} {number} {one} {other}".encode(), digest_size=8).digest()


# How long to wait.


@final
@dataclass(frozen=True, slots=True)
class GossipTiming:
    """What one peer has learnt about its meetings; monotonic seconds."""

    trained: Pace = field(default_factory=Pace)
    """One's own inner steps between two meetings."""
    answers: Pace = field(default_factory=Pace)
    """From an invitation to the first word back."""
    exchanges: Pace = field(default_factory=Pace)
    """From an acceptance to the end of the meeting."""
    misses: int = 0
    """Deadlines in a row that passed: each doubles what is allowed, for they may have been too short."""

    def has_trained(self, seconds: float) -> GossipTiming:
        return replace(self, trained=self.trained.observed(seconds))

    def answered(self, seconds: float) -> GossipTiming:
        return replace(self, answers=self.answers.observed(seconds))

    def exchanged(self, seconds: float) -> GossipTiming:
        return replace(self, exchanges=self.exchanges.observed(seconds), misses=0)

    def missed(self) -> GossipTiming:
        return replace(self, misses=min(self.misses + 1, 10))

    def patience(self, config: GossipConfig) -> float:
        """How long to wait for a partner that still trains: half of one's own training is the most that waiting may
        cost, but a few answers must have the time to come.
        """
        trained = self.trained.mean / 2 if self.trained.is_known else config.first_seconds
        answer = 4 * self.answers.high if self.answers.is_known else config.first_seconds * 2.0**self.misses
        return min(max(trained, answer, config.seconds_min), config.seconds_max)

    def answer_seconds(self, config: GossipConfig) -> float:
        """How long an invited peer may say nothing at all: then it is not there, and need not be waited for."""
        known = 2 * self.answers.high if self.answers.is_known else config.first_seconds * 2.0**self.misses
        return min(max(known, config.seconds_min), config.seconds_max)

    def exchange_seconds(self, config: GossipConfig) -> float:
        """How long one step of a meeting may take before the partner counts as gone."""
        known = 2 * self.exchanges.high if self.exchanges.is_known else config.first_seconds
        return min(max(known, config.seconds_min) * 2.0**self.misses, config.seconds_max)
