"""The fate of a share, by the owners' word: heard, missed, or unknown; with whole engines. And what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from averaging import journal
from averaging.contribution import sign_contribution
from averaging.engine import Engine
from averaging.messages import Message, Offer, Share
from averaging.outbox import Commit
from averaging.owners import encode_parts, owned_parts
from network.seam import PeerID
from simulator.toy import ToySigner
from tests.averaging.owning import CONFIG, HEAD, OWNER, PACKETS, PARTS, SHARER, VOTERS, owning, share_of
from tests.averaging.strategies import BASE, SIGNERS


class Swarm:
    """Engines that hear each other at once, and what each was told to apply."""

    def __init__(self, signers: Sequence[ToySigner] = SIGNERS[:5]) -> None:
        self.engines: dict[PeerID, Engine] = {}
        self.commits: dict[PeerID, list[Commit]] = {}
        self.signers = {s.peer_id: s for s in signers}
        self.deaf: set[tuple[PeerID, PeerID]] = set()
        """(from, to) of offers that are lost."""
        for signer in signers:
            self.start(signer)

    def start(self, signer: ToySigner) -> None:
        restored = journal.restore(HEAD, [], [], signer, 1000)
        # No owner closes by itself before so many have shared.
        config = replace(CONFIG, start_peers=len(SIGNERS))
        self.engines[signer.peer_id] = Engine(signer, config, restored, check=lambda payload: None, nonce=1, now=0.0)
        self.commits[signer.peer_id] = []
        self.engines[signer.peer_id].anchored(HEAD.hash, BASE, 0.0)
        for peer, engine in self.engines.items():
            if peer != signer.peer_id:
                engine.connected(signer.peer_id, 0.0)
                self.engines[signer.peer_id].connected(peer, 0.0)
        self.settle()

    def share(self, signer: ToySigner) -> None:
        self.engines[signer.peer_id].share(PACKETS, 10, True, 0.0)
        self.settle()

    def settle(self, now: float = 0.0) -> None:
        """Delivers what is said until nobody says anything."""
        busy = True
        while busy:
            busy = False
            for peer in sorted(self.engines):
                actions = self.engines[peer].drain()
                self.commits[peer] += [c for c in actions.commits if isinstance(c, Commit)]
                for target, message in actions.sends:
                    busy = True
                    self.deliver(peer, target, message, now)

    def deliver(self, source: PeerID, target: PeerID, message: Message, now: float) -> None:
        if not (isinstance(message, Offer) and (source, target) in self.deaf):
            self.engines[target].receive(source, message, now)

    def reduce(self, now: float = 1.0) -> None:
        """All owners close and offer what they merged."""
        for peer in sorted(self.engines):
            owners = self.engines[peer].rounds.owners
            assert owners is not None
            if owners.owned and not owners.collector.is_closed:
                owners.close()
                self.engines[peer].offer(encode_parts(dict.fromkeys(owners.owned, b"merged")), 10, True, now)
        self.settle(now)
        for _ in range(40):
            now += 1.0
            for engine in self.engines.values():
                engine.tick(now)
            self.settle(now)

    def fate(self, signer: ToySigner) -> tuple[frozenset[int], frozenset[int]] | None:
        return self.commits[signer.peer_id][0].shared


ALL = frozenset(range(PARTS))


def test_who_is_in_every_owners_offer_is_heard_whole() -> None:
    swarm = Swarm()
    for signer in swarm.signers.values():
        swarm.share(signer)
    swarm.reduce()
    for signer in swarm.signers.values():
        assert swarm.fate(signer) == (ALL, frozenset())


def test_who_shared_nothing_has_nothing_at_stake() -> None:
    swarm = Swarm()
    swarm.share(SIGNERS[0])
    swarm.reduce()
    assert swarm.fate(SHARER) is None


def test_what_comes_too_late_is_known_to_be_missed() -> None:
    swarm = Swarm()
    swarm.share(SIGNERS[0])
    owners = swarm.engines[OWNER.peer_id].rounds.owners
    assert owners is not None
    early = owners.close()
    assert [s.owner for s in early.shares] == [SIGNERS[0].peer_id]
    swarm.share(SHARER)
    swarm.engines[OWNER.peer_id].offer(encode_parts(dict.fromkeys(owners.owned, b"merged")), 10, True, 1.0)
    swarm.reduce()
    assert swarm.fate(SHARER) == (ALL - set(owned_parts(HEAD, OWNER.peer_id, PARTS)), frozenset())


def test_without_the_owners_own_word_the_fate_is_unknown() -> None:
    swarm = Swarm()
    for signer in swarm.signers.values():
        swarm.share(signer)
    swarm.deaf = {(OWNER.peer_id, SHARER.peer_id)}
    swarm.reduce()
    owned = frozenset(owned_parts(HEAD, OWNER.peer_id, PARTS))
    assert swarm.fate(SHARER) == (ALL - owned, owned)


def test_a_sharer_that_restarted_cannot_know_what_its_earlier_process_shared() -> None:
    swarm = Swarm()
    for signer in swarm.signers.values():
        swarm.share(signer)
    for peer, engine in swarm.engines.items():
        if peer != SHARER.peer_id:
            engine.disconnected(SHARER.peer_id)
    for owner in (swarm.engines[v.peer_id].rounds.owners for v in owning()):
        assert owner is not None
        owner.close()  # With what the earlier process shared.
    swarm.start(SHARER)
    swarm.engines[SHARER.peer_id].share([b"another"] * PARTS, 10, True, 0.0)
    swarm.settle()
    for signer in owning():
        engine = swarm.engines[signer.peer_id]
        assert engine.rounds.owners is not None
        engine.offer(encode_parts(dict.fromkeys(engine.rounds.owners.owned, b"merged")), 10, True, 1.0)
    swarm.reduce()
    assert swarm.fate(SHARER) == (frozenset(), ALL)


def test_an_owner_that_restarted_says_that_a_share_it_no_longer_has_is_not_in_its_offer() -> None:
    swarm = Swarm()
    for signer in swarm.signers.values():
        swarm.share(signer)
    for peer, engine in swarm.engines.items():
        if peer != OWNER.peer_id:
            engine.disconnected(OWNER.peer_id)
    owned = frozenset(owned_parts(HEAD, OWNER.peer_id, PARTS))
    swarm.start(OWNER)
    owners = swarm.engines[OWNER.peer_id].rounds.owners
    assert owners is not None
    assert SHARER.peer_id in owners.collector.shares, "a new link is told again"
    del owners.collector.shares[SHARER.peer_id]
    swarm.reduce()
    assert swarm.fate(SHARER) == (ALL - owned, frozenset())


def test_a_share_that_reached_no_owner_is_missed() -> None:
    swarm = Swarm()
    for signer in VOTERS:
        swarm.share(signer)
    lonely = swarm.engines[SHARER.peer_id]
    lonely.disconnected(OWNER.peer_id)
    swarm.engines[OWNER.peer_id].disconnected(SHARER.peer_id)
    swarm.share(SHARER)
    swarm.reduce()
    owned = frozenset(owned_parts(HEAD, OWNER.peer_id, PARTS))
    fate = swarm.commits[SHARER.peer_id]
    assert fate and fate[0].shared == (ALL - owned, frozenset())


# Bounds on what strangers claim.


def refused(weight: int, *, as_share: bool) -> bool:
    swarm = Swarm()
    owned = {part: PACKETS[part] for part in owned_parts(HEAD, OWNER.peer_id, PARTS)}
    engine = swarm.engines[OWNER.peer_id]
    said = sign_contribution(SHARER, HEAD.hash, weight, BASE, True, encode_parts(owned))
    engine.receive(SHARER.peer_id, Share(said.encoded) if as_share else Offer(said.encoded), 0.0)
    return bool(engine.drain().refusals)


@pytest.mark.parametrize(("weight", "is_refused"), [(0, True), (1, False), (1000, False), (1001, True)])
def test_a_share_claims_no_more_than_one_peer_can_train(weight: int, is_refused: bool) -> None:
    assert refused(weight, as_share=True) == is_refused


def test_an_owner_may_claim_the_tokens_of_a_whole_group_and_no_more() -> None:
    limit = CONFIG.weight_max * CONFIG.max_peers
    assert not refused(limit, as_share=False)
    assert refused(limit + 1, as_share=False)


def test_a_share_is_believed_from_its_own_peer_only() -> None:
    engine = Swarm().engines[OWNER.peer_id]
    engine.receive(SIGNERS[3].peer_id, Share(share_of(SHARER).encoded), 0.0)
    assert engine.drain().refusals
    assert engine.rounds.owners is not None and not engine.rounds.owners.collector.shares


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_early_share_waits_for_its_round_unless_its_link_goes(is_cut: bool) -> None:
    swarms = Swarm(), Swarm()
    for swarm in swarms:
        for signer in VOTERS:
            swarm.share(signer)
    swarms[0].reduce()
    record = swarms[0].commits[OWNER.peer_id][0].record
    owner = next(s for s in SIGNERS[:5] if owned_parts(record, s.peer_id, PARTS))
    engine = swarms[1].engines[owner.peer_id]
    engine.receive(SHARER.peer_id, Share(share_of(SHARER, owner, record).encoded), 0.0)
    owners = engine.rounds.owners
    assert owners is not None and SHARER.peer_id not in owners.collector.shares
    if is_cut:
        engine.disconnected(SHARER.peer_id)
        engine.connected(SHARER.peer_id, 0.0)
    swarms[1].reduce()
    assert engine.head == record
    assert (SHARER.peer_id in owners.collector.shares) is not is_cut


def test_where_everybody_gets_everything_a_share_is_refused() -> None:
    restored = journal.restore(HEAD, [], [], OWNER, 1000)
    config = replace(CONFIG, parts=0)
    engine = Engine(OWNER, config, restored, check=lambda payload: None, nonce=1, now=0.0)
    engine.connected(SHARER.peer_id, 0.0)
    engine.receive(SHARER.peer_id, Share(share_of(SHARER).encoded), 0.0)
    assert engine.drain().refusals
