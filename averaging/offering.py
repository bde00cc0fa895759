"""Contributions, out and in (R1): made and pushed, checked and held, kept for a head that is not known yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from averaging.catch_up import CatchUp
from averaging.config import EngineConfig
from averaging.contribution import HEADER_BYTES_MAX, Contribution, parse_contribution, sign_contribution
from averaging.early import Early
from averaging.fetcher import Fetcher
from averaging.instance import Instance
from averaging.messages import Offer, Share
from averaging.outbox import Outbox
from averaging.owners import Owners
from averaging.record import Hash, Malformed, Record
from averaging.rounds import Rounds
from network.identity import Signer
from network.seam import PeerID

Tell = Callable[[PeerID, Hash, float], None]
"""(peer, record, now): tells the peer what followed that record."""


@final
class Offering:
    """What peers offer to the round in the air, by contributions to it or by shares for those who own its parts."""

    def __init__(
        self,
        signer: Signer,
        config: EngineConfig,
        rounds: Rounds,
        catch_up: CatchUp,
        fetcher: Fetcher,
        outbox: Outbox,
        check: Callable[[bytes], None],
        tell: Tell,
    ) -> None:
        self.far_from_lead: set[PeerID] = set()
        """Who asked for a relay in this round: without a link to the lead they miss its vote, and have to be told."""
        self._signer = signer
        self._me = signer.peer_id
        self._config = config
        self._rounds = rounds
        self._catch_up = catch_up
        self._fetcher = fetcher
        self._outbox = outbox
        self._check_payload = check
        self._tell = tell
        self.early = Early()
        self.early_shares = Early()

    @property
    def _head(self) -> Record:
        return self._rounds.head

    @property
    def _instance(self) -> Instance:
        return self._rounds.voting.instance

    @property
    def _owners(self) -> Owners | None:
        return self._rounds.owners

    # Out.

    def offer(self, payload: bytes, weight: int, willing: bool, now: float) -> Contribution:
        """Pushes this peer's contribution to all."""
        instance = self._instance
        assert instance.base is not None
        willing = willing and self._may_vote()
        weight = max(1, min(weight, self._config.contribution_weight_max))
        mine = sign_contribution(self._signer, self._head.hash, weight, instance.base, willing, payload)
        if instance.hold(mine):
            self._speaks(now)
            self._observe(mine, now)
            if self._owners is not None:
                self._owners.offered(mine)
            is_far = self._head.lead != self._me and self._head.lead not in self._outbox.links
            relays = [p for p in sorted(self._outbox.links) if is_far and self._outbox.alive(p, now)][:1]
            for peer in sorted(self._outbox.links):
                self._outbox.send(peer, Offer(mine.encoded, [peer] == relays, self._merged_of(peer)), now)
        return mine

    def _merged_of(self, peer: PeerID) -> bytes | None:
        return None if self._owners is None else self._owners.merged.get(peer, b"")

    def share(self, packets: list[bytes], weight: int, willing: bool, now: float) -> None:
        """Sends each part of what this peer wants to say to its owner."""
        base, owners = self._instance.base, self._owners
        assert base is not None and owners is not None
        weight = max(1, min(weight, self._config.weight_max))
        self._speaks(now)
        owners.share(packets, weight, base, willing and self._may_vote(), now)

    def _speaks(self, now: float) -> None:
        clock = self._rounds.voting.clock
        clock.spoke = now if clock.spoke is None else clock.spoke

    def connected(self, peer: PeerID, now: float) -> None:
        """A new link hears of this peer's contribution."""
        if self._owners is not None:
            self._owners.send_to(peer, now)
        own = self._instance.offers.get(self._me)
        if own is not None:
            self._outbox.send(peer, Offer(own.encoded, merged=self._merged_of(peer)), now)

    def disconnected(self, peer: PeerID) -> None:
        """When the link is there again the peer says what still holds."""
        self.early.drop(peer)
        self.early_shares.drop(peer)

    def _may_vote(self) -> bool:
        """Who is not linked with all the others (two that can only dial out never are) cannot lead them."""
        named = {m.peer for m in self._head.members} or set(self._head.voters)
        return named <= {self._me, *self._outbox.links} and not self._outbox.leaving

    # In.

    def on_offer(self, peer: PeerID, message: Offer, now: float) -> None:
        limit = self._config.payload_bytes_max + HEADER_BYTES_MAX
        contribution = parse_contribution(message.encoded, self._signer, limit)
        if contribution.owner == peer and self._owners is None:
            self._outbox.links[peer].head = contribution.prev
        if message.relay:
            self.far_from_lead.add(peer)
        is_wanted, is_current = contribution.digest in self._fetcher, contribution.prev == self._head.hash
        if is_wanted or is_current:
            self._check(contribution, self._config.contribution_weight_max, now)
        if is_wanted:
            self._fetcher.arrived(contribution.digest, now)
            if not is_current:
                self._catch_up.held[contribution.digest] = contribution
        if is_current:
            self._on_current(peer, contribution, message, now)
        elif contribution.prev not in self._rounds.chain:
            if contribution.owner == peer:
                self.early.keep(contribution)
            self._catch_up.notice(peer, 0, now)
        elif contribution.owner == peer:
            self._void(peer, contribution, now)

    def _on_current(self, peer: PeerID, contribution: Contribution, message: Offer, now: float) -> None:
        if contribution.owner not in self._outbox.links:
            self._outbox.heard_of(contribution.owner, now)
        if self._owners is not None and contribution.owner == peer and message.merged is not None:
            self._owners.told(contribution, message.merged)
        if self._instance.hold(contribution):
            self._observe(contribution, now)
            if message.relay:
                self._outbox.send(self._head.lead, Offer(message.encoded), now)

    def _void(self, peer: PeerID, contribution: Contribution, now: float) -> None:
        """It is for a round that is decided: its owner trains anew, and hears what was."""
        self._observe(contribution, now)
        self._freed[peer] = now
        self._tell(peer, contribution.prev, now)

    def on_share(self, peer: PeerID, message: Share, now: float) -> None:
        """A share for this owner."""
        if self._owners is None:
            raise Malformed("share: in this run everybody gets everything")
        limit = self._config.payload_bytes_max + HEADER_BYTES_MAX
        share = parse_contribution(message.encoded, self._signer, limit)
        if share.owner != peer:
            raise Malformed(f"share of {share.owner}: sent by {peer}")
        self._outbox.links[peer].head = share.prev
        if share.prev == self._head.hash:
            self._take_share(share, now)
        elif share.prev in self._rounds.chain:
            self._void(peer, share, now)
        else:
            self.early_shares.keep(share)
            self._catch_up.notice(peer, 0, now)

    def _check(self, contribution: Contribution, weight_max: int, now: float) -> None:
        if not 0 < contribution.weight <= weight_max:
            raise Malformed(f"contribution of {contribution.owner}: claims {contribution.weight} tokens")
        try:
            self._check_payload(contribution.payload)
        except ValueError as error:
            self._fetcher.arrived(contribution.digest, now)
            raise Malformed(f"contribution of {contribution.owner}: {error}") from error

    @property
    def _freed(self) -> dict[PeerID, float]:
        return self._rounds.voting.clock.freed if self._owners is None else self._owners.collector.clock.freed

    def _observe(self, contribution: Contribution, now: float) -> None:
        freed = self._freed.pop(contribution.owner, None)
        if freed is not None:
            self._rounds.timing = self._rounds.timing.cycled(contribution.owner, now - freed)

    # The next round.

    def begun(self, prev: Hash, now: float) -> None:
        """The round after the head has begun; `prev` is what the head follows."""
        for peer in sorted(self.far_from_lead):
            self._tell(peer, prev, now)
        self.far_from_lead.clear()
        for early, take in ((self.early, self._take_offer), (self.early_shares, self._take_share)):
            for contribution in early.take(self._head.hash, self._rounds.chain.__contains__):
                try:
                    take(contribution, now)
                except Malformed as error:
                    self._outbox.refuse(contribution.owner, str(error))

    def _take_offer(self, contribution: Contribution, now: float) -> None:
        self._check(contribution, self._config.contribution_weight_max, now)
        if self._instance.hold(contribution):
            self._observe(contribution, now)

    def _take_share(self, share: Contribution, now: float) -> None:
        assert self._owners is not None
        self._check(share, self._config.weight_max, now)
        if self._owners.on_share(share):
            self._observe(share, now)
