"""Moving along others' records: what is replayed next, when the chain is left for a better one, and jumps (R7, R9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from averaging.catch_up import CatchUp
from averaging.chain import Left
from averaging.contribution import Contribution
from averaging.fetcher import Fetcher
from averaging.forks import Recovery
from averaging.messages import LogEntry
from averaging.outbox import Fork, Outbox
from averaging.record import RECOVERY, Hash, Record
from averaging.rounds import Rounds
from network.seam import PeerID

REPLAY_AHEAD = 8
"""Of a gap, the contributions of so many rounds are fetched at a time."""


@final
@dataclass(frozen=True, slots=True)
class Moved:
    """How the log changed under a state that was fetched: rounds that were left, those that the state stands for now,
    and those that will be committed once more though this peer had counted them.
    """

    left: tuple[Left, ...]
    joined: tuple[Record, ...]
    again: frozenset[Hash]


@final
class Following:
    """Decides; the engine appends what it yields."""

    def __init__(self, rounds: Rounds, catch_up: CatchUp, recovery: Recovery, fetcher: Fetcher, outbox: Outbox) -> None:
        self._rounds = rounds
        self._catch_up = catch_up
        self._recovery = recovery
        self._fetcher = fetcher
        self._outbox = outbox

    def is_under_way(self, now: float) -> bool:
        """Whether verified records are about to be applied, so that training on this state would be in vain."""
        catch_up, head = self._catch_up, self._rounds.head
        if not catch_up.pending:
            return False
        if catch_up.follows(head):
            return self._may_follow(catch_up.pending[0].record, now)
        return catch_up.leads_away(head)

    def _may_follow(self, record: Record, now: float) -> bool:
        """A recovery is followed by those who are stalled as well, or when its chain has become the better one."""
        head = self._rounds.head
        if record.kind != RECOVERY or self._catch_up.tip(head).tokens > head.tokens:
            return True
        return self._recovery.is_stalled(head, self._rounds.voting.clock, self._rounds.timing, now)

    def next(self, now: float) -> tuple[LogEntry, list[Contribution]] | None:
        """The record to append next, with its contributions, once they are here; leaves the chain if need be."""
        catch_up, rounds = self._catch_up, self._rounds
        entry = catch_up.next(rounds.chain, now)
        if entry is None or not self.is_under_way(now):
            return None
        is_parted = not catch_up.follows(rounds.head)
        held = rounds.voting.instance.held
        # Another chain is moved to only when all of it is here.
        count = len(catch_up.pending) if is_parted else REPLAY_AHEAD
        lacking = [digest for digest in catch_up.lacking(count) if digest not in held]
        if lacking:
            self._fetcher.need(lacking, self._sources(), now)
        if is_parted:
            if lacking:
                return None
            left = self._leave(now)
            self._outbox.actions.commits.append(Fork(rounds.head, tuple(left)))
        found = [catch_up.held.get(m.digest) or held.get(m.digest) for m in entry.record.members]
        return (entry, [c for c in found if c is not None]) if all(found) else None

    def _sources(self) -> list[PeerID]:
        """Whom to ask for contributions: who gave the log, then who stands outside this peer's chain, then all."""
        links, source, chain = self._outbox.links, self._catch_up.source, self._rounds.chain

        def rank(peer: PeerID) -> tuple[bool, bool, PeerID]:
            head = links[peer].head
            return peer != source, head is None or head in chain, peer

        return sorted(links, key=rank)

    def move(self, head: Hash, now: float) -> tuple[Moved, list[LogEntry]] | None:
        """The state at `head` was fetched, which `CatchUp.child_of` attests: what that changes, and the records to be
        appended without contributions. None if nothing attests it any more.
        """
        catch_up, rounds = self._catch_up, self._rounds
        if catch_up.child_of(head, rounds.chain) is None:
            return None
        left = self._leave(now) if catch_up.leads_away(rounds.head) else []
        again: list[LogEntry] = []
        if head in rounds.chain:
            number = rounds.chain.round_of(head)
            again = rounds.chain.entries_after(number)
            catch_up.held |= {c.digest: c for c in rounds.chain.retained()}
            catch_up.resume(head, again)
            rounds.back_to(number, now)
            self._fetcher.clear()
        catch_up.is_lost = False
        catch_up.have_donor()
        entries = catch_up.up_to(head)
        joined = tuple(entry.record for entry in entries)
        return Moved(tuple(left), joined, frozenset(entry.record.hash for entry in again)), entries

    def _leave(self, now: float) -> list[Left]:
        base = self._catch_up.base
        assert base is not None
        number = self._rounds.chain.round_of(base)
        self._recovery.healed(self._catch_up.tip(self._rounds.head).round)
        self._fetcher.clear()
        return self._rounds.back_to(number, now)
