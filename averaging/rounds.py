"""The chain and the round in the air: what a commit appends, what a move to another chain undoes, what stays said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from averaging import journal
from averaging.chain import Left
from averaging.config import EngineConfig
from averaging.contribution import Contribution
from averaging.instance import Assembly, Instance, Vote, settled_votes
from averaging.outbox import Commit, Outbox
from averaging.owners import Owners, owner_of
from averaging.record import NORMAL, Certificate, Hash, Record
from averaging.round_clock import RoundClock
from averaging.timing import Timing
from averaging.voting import Fetch, Voting
from network.identity import Signer
from network.seam import PeerID

RECENT_ROUNDS = 4
"""Who contributed to none of so many rounds is no longer waited for."""
PARKED_MAX = 64
SETTLED_MAX = 4096
"""Of what was decided on chains that were left, so many votes are kept, the newest."""


@final
class Rounds:
    """Votes are never forgotten while what they were about may still be decided: a round that is left undecided, for a
    recovery or another chain, is parked, and goes on as it was if this peer stands there again.
    """

    def __init__(
        self,
        signer: Signer,
        config: EngineConfig,
        restored: journal.Restored,
        outbox: Outbox,
        fetch: Fetch,
        now: float,
    ) -> None:
        self.chain = restored.chain
        self.chain.keep_own(signer.peer_id, config.remembered_bytes_max)
        self.timing = Timing()
        self._signer = signer
        self._config = config
        self._outbox = outbox
        self._fetch = fetch
        self._votes = dict(restored.votes)
        """Of rounds that are neither in the air, nor parked, nor decided in this chain."""
        self._undecided = {c.digest: c for c in restored.undecided}
        """Contributions that were durable before a restart, to rounds that may still be decided."""
        self._parked: dict[Hash, Instance] = {}
        self.owners = Owners(signer, outbox, config, self.head) if config.parts else None
        self.voting = self._begin(now, {}, {})

    @property
    def head(self) -> Record:
        return self.chain.head

    def append(
        self, record: Record, certificate: Certificate, contributions: list[Contribution] | None, now: float
    ) -> None:
        """Commits `record`; None for `contributions` if the state after it is fetched instead."""
        actions, instance, clock = self._outbox.actions, self.voting.instance, self.voting.clock
        self.chain.append(record, certificate, contributions)
        actions.log.append(journal.encode_commit(record, certificate))
        if contributions is not None:
            durable = self.voting.durable
            actions.lazy += [journal.encode_packet(c) for c in contributions if c.digest not in durable]
            shared = None if self.owners is None else self.owners.shared(record)
            actions.commits.append(Commit(record, tuple(contributions), shared))
            if instance.base not in (None, record.base):
                actions.diverged = True
        if record.kind != NORMAL:
            self._park()
        elif clock.started is not None:
            # From a log it says how late this peer is, not how long votes take.
            proposed = None if instance.decided() is None else clock.proposed
            decide = None if proposed is None else now - proposed
            self.timing = self.timing.committed(now - clock.began, decide)
        self.voting = self._begin(now, {**clock.freed, **dict.fromkeys(instance.offers, now)}, clock.came)

    def look_again(self) -> None:
        """Who lives has changed."""
        if self.owners is not None:
            self.owners.look_again()

    def lost(self, peer: PeerID) -> None:
        """The link to `peer` is gone."""
        self.voting.clock.forget(peer)
        if self.owners is not None:
            self.owners.collector.clock.forget(peer)
        self.look_again()

    def back_to(self, number: int, now: float) -> list[Left]:
        """Leaves all rounds after `number`: others follow, or the same, but the state there is worked out anew."""
        self._park()
        chain = self.chain
        first = max(number + 1, len(chain.records) - SETTLED_MAX)
        self._votes |= settled_votes(chain.records[first:], chain.certificates[first:], self._votes)
        left = chain.back_to(number)
        self.voting = self._begin(now, {}, {})
        return left

    def journal(self) -> list[bytes]:
        """The journal begun anew: what a restart, or a peer that replays the log, may still ask for."""
        self._forget_decided()
        instances = [*self._parked.values(), self.voting.instance]
        votes = self._votes | {i.head.hash: i.vote for i in instances}
        held = {d: c for i in instances for d, c in i.held.items()}
        return journal.compacted(self.chain, votes, {**self._undecided, **held})

    def _assemble(self, voters: Sequence[PeerID], now: float) -> Assembly:
        return (voters, ()) if self.owners is None else self.owners.assemble(voters, now)

    def _park(self) -> None:
        instance = self.voting.instance
        instance.base = None
        self._parked[instance.head.hash] = instance
        while len(self._parked) > PARKED_MAX:
            head, oldest = next(iter(self._parked.items()))
            self._votes[head] = oldest.vote
            del self._parked[head]

    def _forget_decided(self) -> None:
        decided = self.chain.is_decided
        self._votes = {head: vote for head, vote in self._votes.items() if not decided(head)}
        self._parked = {head: instance for head, instance in self._parked.items() if not decided(head)}
        self._undecided = {d: c for d, c in self._undecided.items() if not decided(c.prev)}

    def _begin(self, now: float, freed: dict[PeerID, float], came: dict[PeerID, float]) -> Voting:
        """The round after the head begins, with what this peer said about it and held when it left it or restarted."""
        head = self.head
        recent = self.chain.records[-RECENT_ROUNDS:]
        contributors = frozenset(m.peer for record in recent for m in record.members) or frozenset(head.voters)
        needed = max(1, self._config.min_peers, self._config.start_peers if head.round == 0 else 1)
        if self.owners is not None:  # Then it is shares that are needed; those who own parts contribute.
            needed = 1
            self.owners.begin(head, now)
            contributors = frozenset(owner_of(head, part, self._config.parts) for part in range(self._config.parts))
        instance = self._parked.pop(head.hash, None)
        if instance is None:
            instance = Instance(head, self._votes.pop(head.hash, Vote()), members_max=self._config.max_peers)
            instance.may_recruit = self.owners is not None
        voting = Voting(
            instance,
            RoundClock(
                now,
                contributors,
                freed=freed,
                came=came,
                ballot_seen=now if instance.vote != Vote() else None,
                is_patient=self.owners is not None,
            ),
            signer=self._signer,
            outbox=self._outbox,
            fetch=self._fetch,
            config=self._config.timing,
            needed=needed,
            assemble=self._assemble,
        )
        for contribution in [c for c in self._undecided.values() if c.prev == head.hash]:
            instance.held[contribution.digest] = contribution
            voting.durable.add(contribution.digest)
            del self._undecided[contribution.digest]
        return voting
