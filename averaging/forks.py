"""Forks by choice (R8): when a round without a quorum is given up, who may go on, and the record that says so."""

from __future__ import annotations

from collections.abc import Container
from typing import final

from averaging.outbox import Outbox
from averaging.record import RECOVERY, Ballot, Certificate, Hash, Record, recovery_message, sha256
from averaging.round_clock import RoundClock
from averaging.timing import Timing, TimingConfig
from network.identity import Signer
from network.seam import PeerID

CAUTION_MAX = 6
CAUTION_ROUNDS = 32
"""After so many rounds without a fork, one that proved needless is forgotten."""
PATIENCE = 4
"""So much longer waits who hears a quorum of voters, which may just be slow, or is not of the last round itself."""


@final
class Recovery:
    """Watches the round in the air: a stalled one is left for a recovery record that names the survivors.

    Safety needs none of these times: a recovery is a fork, and forks heal (R9). They weigh the rounds lost by waiting
    against the rounds that a fork in vain would have to give back.
    """

    def __init__(
        self,
        signer: Signer,
        outbox: Outbox,
        config: TimingConfig,
        share_min: float,
        now: float,
        chain: Container[Hash] = (),
    ) -> None:
        """`share_min`: a smaller share of those whom the last record names never goes on. `chain`: the records of this
        peer's chain.
        """
        self._me = signer.peer_id
        self._signer = signer
        self._outbox = outbox
        self._config = config
        self._share_min = share_min
        self._chain = chain
        self._awake_since = now
        self._expected = self._looked = now
        self._caution = 0
        self._caution_round = 0

    def awake(self, now: float, next_at: float, clock: RoundClock) -> None:
        """Called at `next_at` and at `look_again_at` at the latest, again and again: if much later, this process slept,
        and heard nobody for that reason.
        """
        again = self.look_again_at(clock)
        expected = self._expected if again is None else min(self._expected, again)
        if now - expected > self._pause:
            self._awake_since = now
        self._expected, self._looked = next_at, now

    def look_again_at(self, clock: RoundClock) -> float | None:
        """Nothing may have to be said for a minute; but who never looks cannot tell a silence of others from a sleep of
        its own, once a round can be stalled.
        """
        return None if clock.waits_since is None else max(clock.waits_since, self._looked) + self._pause

    @property
    def _pause(self) -> float:
        return self._config.silence_seconds - self._config.heartbeat_seconds

    def healed(self, number: int) -> None:
        """This peer gave up its chain for a better one in round `number`: the next time it waits longer."""
        self._caution = min(CAUTION_MAX, self._caution + 1)
        self._caution_round = number

    def due_at(self, head: Record, clock: RoundClock, timing: Timing, now: float) -> float | None:
        """When this peer is to mint a recovery after `head`; None if it may not, or the round is not stalled. Too few
        contributions are no reason, as more may come; unless somebody cannot come before a recovery.
        """
        if clock.started is None and not self._behind(head, clock, now):
            return None
        return self._stalled_at(head, clock, timing, now)

    def _stalled_at(self, head: Record, clock: RoundClock, timing: Timing, now: float) -> float | None:
        if (since := clock.waits_since) is None:
            return None
        survivors, share = self.survivors(head, now), self._share_here(head, clock, now)
        if self._me not in survivors or share < self._share_min:
            return None
        if head.round - self._caution_round > CAUTION_ROUNDS:
            self._caution = 0
        wait = stall_seconds(timing, self._config, since - clock.began, share) * 2.0**self._caution
        if not self.lacks_quorum(head, clock, now):
            wait *= PATIENCE
        if self._me not in head.peers:
            wait *= PATIENCE
        # One tries first, so that the others follow it instead of making forks of their own.
        rank = sorted(survivors, key=lambda peer: sha256(head.hash + peer.encode())).index(self._me)
        turn = max(8 * self._config.delay_seconds_min, 4 * timing.decide.high)
        # Whoever has just come back is heard out first: it may know what was decided.
        heard_out = [link.up + self._config.silence_seconds for link in self._outbox.links.values()]
        return max([max(since, self._awake_since) + wait + rank * turn, *heard_out])

    def look_at(self, clock: RoundClock) -> float | None:
        """`due_at` is not before this, and much dearer: it looks at everybody."""
        if clock.waits_since is None:
            return None
        return max(clock.waits_since, self._awake_since) + 2 * self._config.silence_seconds

    def is_stalled(self, head: Record, clock: RoundClock, timing: Timing, now: float) -> bool:
        """Whether this peer would rather follow somebody's recovery than wait for the voters of `head`."""
        if self.lacks_quorum(head, clock, now):
            return True
        stalled_at = self._stalled_at(head, clock, timing, now)
        return stalled_at is not None and stalled_at <= now

    def lacks_quorum(self, head: Record, clock: RoundClock, now: float) -> bool:
        """Whether the voters of `head` that are heard, and are not behind it, are too few."""
        heard = {v for v in head.voters if self._outbox.alive(v, now)}
        return not head.is_quorum(heard - set(self._behind(head, clock, now)))

    def _behind(self, head: Record, clock: RoundClock, now: float) -> list[PeerID]:
        """Those whom `head` names, who are heard and stand at an older record of this chain: they cannot vote at the
        head, but are not gone either. All may have died with only this peer's disk written, and then they can come to
        the head only by a record that attests its state: a recovery. What they said before the round could stall does
        not count: who votes and offers has no need to say where it stands.
        """
        if (since := clock.waits_since) is None:
            return []
        links = self._outbox.links
        older = [p for p in head.peers if p in links and links[p].said >= since and links[p].head != head.hash]
        return [p for p in older if links[p].head in self._chain and self._outbox.alive(p, now)]

    def _share_here(self, head: Record, clock: RoundClock, now: float) -> float:
        """Of those whom `head` names, the share that stands there or will follow."""
        return min(1.0, (len(self.survivors(head, now)) + len(self._behind(head, clock, now))) / len(head.peers))

    def survivors(self, head: Record, now: float) -> list[PeerID]:
        """Those who stand at `head` and are heard now; of these, if there are any, those whom it names."""
        links = self._outbox.links
        standing = [p for p, link in links.items() if link.head == head.hash and self._outbox.alive(p, now)]
        standing += [] if self._outbox.leaving else [self._me]
        return sorted([p for p in standing if p in head.peers] or standing)

    def mint(self, head: Record, base: bytes, now: float) -> tuple[Record, Certificate]:
        """The recovery after `head`, and its origin's signature."""
        survivors = self.survivors(head, now)
        assert self._me in survivors
        record = Record(RECOVERY, head.hash, head.round + 1, self._me, 0, (), tuple(survivors), base, head.tokens)
        signature = self._signer.sign(recovery_message(record))
        return record, Certificate(Ballot(0, self._me), {self._me: signature})

    def situation(self, head: Record, clock: RoundClock, timing: Timing, now: float) -> str:
        """What this peer will do about a missing quorum, in words."""
        survivors, named = self.survivors(head, now), len(head.peers)
        if self._me not in survivors:
            return "this peer is not of the last round, and waits for those who are"
        if (share := self._share_here(head, clock, now)) < self._share_min:
            return f"{share * named:.0f} of {named} are here, and the run lets no fewer than {self._share_min:g} go on"
        due = self.due_at(head, clock, timing, now)
        if due is None:
            return "it is not known yet whether others will come"
        behind = len(self._behind(head, clock, now))
        who = f"{behind} of {named} are behind and cannot vote; " if behind else ""
        return f"{who}without them {len(survivors)} of {named} go on in {max(0.0, due - now):.0f} s"


def stall_seconds(timing: Timing, config: TimingConfig, length: float, share: float) -> float:
    """How long a round may lack its quorum: about one more round, and for each who is missing beside each who is here
    twice as long, so that a lone peer of many practically never goes on alone. `length`: of the round so far.
    """
    usual = timing.interval.high if timing.interval.is_known else length
    missing = min(1 / max(share, 1e-3) - 1, 30.0)
    return float(max(2 * config.silence_seconds, usual) * 2.0**missing)
