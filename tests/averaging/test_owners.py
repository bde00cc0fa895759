"""Reducing by owners: who owns what, which shares are taken, and what each peer knows of the fate of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from averaging import journal
from averaging.config import EngineConfig
from averaging.contribution import Contribution, sign_contribution
from averaging.engine import Engine
from averaging.instance import Instance, Vote
from averaging.messages import Message, Offer, Share
from averaging.outbox import Commit, Link, Outbox
from averaging.owners import (
    PARTS_MAX,
    RECENT_ROUNDS,
    Owners,
    encode_parts,
    owned_parts,
    owner_of,
    parse_parts,
)
from averaging.record import GENESIS, Malformed, Record, sha256
from averaging.timing import Timing, TimingConfig, start_patience
from network.seam import PeerID
from simulator.toy import ToySigner
from tests.averaging.strategies import BASE, SIGNERS, first

PARTS = 6
HEAD = first(3)
VOTERS = SIGNERS[:3]
CONFIG = EngineConfig(
    payload_bytes_max=1000, weight_max=1000, snapshot_bytes=10**9, parts=PARTS, max_peers=20, voters_max=5
)
OTHER_BASE = b"\x01" * 16
PACKETS = [b"packet %d" % part for part in range(PARTS)]

many_voters = st.sets(st.integers(0, 39), min_size=1, max_size=12)


def voted_by(numbers: set[int]) -> Record:
    voters = tuple(sorted(ToySigner(number).peer_id for number in numbers))
    return Record(GENESIS, sha256(b"run"), 0, voters[0], 0, (), voters, BASE, 0)


def owning(head: Record = HEAD) -> list[ToySigner]:
    """The voters that own something."""
    owners = [s for s in VOTERS if owned_parts(head, s.peer_id, PARTS)]
    assert len(owners) > 1
    return owners


OWNER, OTHER_OWNER = owning()[:2]
SHARER = SIGNERS[4]


def share_of(signer: ToySigner, owner: ToySigner = OWNER, head: Record = HEAD, base: bytes = BASE) -> Contribution:
    packets = {part: PACKETS[part] for part in owned_parts(head, owner.peer_id, PARTS)}
    return sign_contribution(signer, head.hash, 10, base, True, encode_parts(packets))


def owners_of(signer: ToySigner, linked: Sequence[ToySigner] = SIGNERS[:6], head: Record = HEAD) -> Owners:
    outbox = Outbox(signer.peer_id, CONFIG.timing.silence_seconds)
    for other in linked:
        if other is not signer:
            outbox.links[other.peer_id] = Link(up=0.0, heard=0.0, sent=0.0)
    owners = Owners(signer, outbox, CONFIG, head)
    owners.begin(head, 0.0)
    owners.collector.base = BASE
    return owners


# Who owns what.


@given(many_voters)
def test_every_part_has_one_owner_and_it_votes(numbers: set[int]) -> None:
    head = voted_by(numbers)
    assert sorted(p for v in head.voters for p in owned_parts(head, v, PARTS)) == list(range(PARTS))


@given(many_voters, st.integers(0, 39))
def test_only_the_parts_of_who_comes_or_goes_move(numbers: set[int], changed: int) -> None:
    one, other, who = voted_by(numbers | {changed}), voted_by(numbers - {changed} or {99}), ToySigner(changed).peer_id
    if numbers - {changed}:
        moved = [part for part in range(64) if owner_of(one, part) != owner_of(other, part)]
        assert moved == owned_parts(one, who, 64)


def test_parts_spread_over_the_voters() -> None:
    head = voted_by(set(range(8)))
    counts = [len(owned_parts(head, voter, 256)) for voter in head.voters]
    assert sum(counts) == 256
    assert min(counts) > 8 and max(counts) < 80


# Payloads.

packets = st.dictionaries(st.integers(0, PARTS_MAX - 1), st.binary(max_size=20), max_size=8)


@given(packets)
def test_parts_go_there_and_back(parts: dict[int, bytes]) -> None:
    assert parse_parts(encode_parts(parts)) == parts


@pytest.mark.parametrize(
    "fields",
    [
        7,
        {},
        [7],
        [[0]],
        [[0, b"x", 1]],
        [["0", b"x"]],
        [[True, b"x"]],
        [[-1, b"x"]],
        [[PARTS_MAX, b"x"]],
        [[0, "x"]],
        [[0, None]],
        [[1, b"x"], [0, b"y"]],
        [[0, b"x"], [0, b"y"]],
        [[part, b""] for part in [*range(PARTS_MAX), 0]],
    ],
)
def test_what_is_no_list_of_sorted_parts_is_malformed(fields: object) -> None:
    with pytest.raises(Malformed):
        parse_parts(msgpack.packb(fields))


@given(st.binary(max_size=60))
def test_any_bytes_are_parts_or_malformed(data: bytes) -> None:
    try:
        parts = parse_parts(data)
    except Malformed:
        return
    assert list(parts) == sorted(parts)


# What an owner collects.


def test_a_newer_share_of_the_same_peer_takes_the_place_of_its_older() -> None:
    owners = owners_of(OWNER)
    older, newer = share_of(SHARER), replace(share_of(SHARER), weight=20)
    assert owners.on_share(older) and owners.on_share(newer)
    assert owners.close().shares == (newer,)


def test_no_share_is_taken_after_the_owner_has_closed() -> None:
    owners = owners_of(OWNER)
    owners.on_share(share_of(SIGNERS[3]))
    closed = owners.close()
    assert not owners.on_share(share_of(SHARER))
    assert [share.owner for share in closed.shares] == [SIGNERS[3].peer_id]
    assert owners.collector.usable() == list(closed.shares)
    assert owners.due_at(Timing(), 1, 100.0) is None, "it merges once a round"


def test_shares_are_merged_in_peer_id_order_and_those_of_another_state_are_not() -> None:
    owners = owners_of(OWNER)
    for signer in reversed(SIGNERS[:5]):
        owners.on_share(share_of(signer, base=OTHER_BASE if signer is SIGNERS[2] else BASE))
    merged = [share.owner for share in owners.close().shares]
    assert merged == sorted(s.peer_id for s in SIGNERS[:5] if s is not SIGNERS[2])


def test_a_share_of_parts_that_this_peer_does_not_own_is_refused() -> None:
    owners = owners_of(OWNER)
    for wrong in (share_of(SHARER, OTHER_OWNER), replace(share_of(SHARER), payload=encode_parts({}))):
        with pytest.raises(Malformed):
            owners.on_share(wrong)
    assert not owners.collector.shares


def test_who_owns_nothing_never_merges() -> None:
    owners = owners_of(SHARER)
    assert owners.owned == []
    assert owners.due_at(Timing(), 1, 0.0) is None


def test_an_owner_waits_for_those_who_shared_lately_and_are_heard() -> None:
    owners = owners_of(OWNER)
    owners._owning_since = -RECENT_ROUNDS
    for signer in SIGNERS[3:5]:
        owners.on_share(share_of(signer))
    owners.begin(HEAD, 10.0)
    owners.collector.base = BASE
    owners.on_share(share_of(SIGNERS[3]))
    for signer in SIGNERS[3:5]:
        owners._outbox.links[signer.peer_id].heard = 10.0
    due = owners.due_at(Timing(), 1, 10.0)
    assert due is not None and due > 10.0, "one of two is there"
    owners.on_share(share_of(SIGNERS[4]))
    assert owners.due_at(Timing(), 1, 10.0) == 10.0, "both are"


def test_a_new_owner_waits_for_those_who_stand_where_it_stands() -> None:
    """Nobody has shared with it yet: it would close on its own share, and leave out everybody else's."""
    owners = owners_of(OWNER)
    here, behind, elsewhere = SIGNERS[3:5], SIGNERS[5], next(s for s in VOTERS if s is not OWNER)
    for signer in here:
        owners._outbox.links[signer.peer_id].head = HEAD.hash
    owners._outbox.links[elsewhere.peer_id].head = sha256(b"another")
    assert owners._outbox.links[behind.peer_id].head is None
    owners.on_share(share_of(OWNER))
    assert owners.due_at(Timing(), 1, 1.0) == 1.0 + start_patience(Timing(), TimingConfig()), "one of three"
    owners.on_share(share_of(here[0]))
    due = owners.due_at(Timing(), 1, 1.0)
    assert due is not None and due > 1.0, "two of three"
    owners.on_share(share_of(here[1]))
    assert owners.due_at(Timing(), 1, 1.0) == 1.0, "all three"
    for number in range(1, RECENT_ROUNDS + 1):
        head = replace(HEAD, round=number)
        owners.begin(head, 2.0)
        owners._outbox.links[here[1].peer_id].head = head.hash
        owners.collector.base = BASE
        owners.due_at(Timing(), 1, 2.0)
        is_expected = here[1].peer_id in owners.collector.clock.contributors
        assert is_expected == (number < RECENT_ROUNDS), "later only those who shared lately"
        owners.collector.shares.clear()
        owners._recent.clear()


def test_who_shared_in_none_of_the_last_rounds_is_not_waited_for() -> None:
    owners = owners_of(OWNER)
    owners.on_share(share_of(SHARER))
    head = HEAD
    for number in range(1, RECENT_ROUNDS + 2):
        head = replace(HEAD, round=number)
        owners.begin(head, float(number))
        assert (SHARER.peer_id in owners.collector.clock.contributors) == (number <= RECENT_ROUNDS)


# Who votes next.


@given(st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.integers(-2, 12))
def test_recruits_are_willing_alive_new_and_no_more_than_there_is_room(
    willing: set[int], alive: set[int], room: int
) -> None:
    crowd = [ToySigner(100 + n) for n in range(12)]
    owners = owners_of(OWNER, [crowd[n] for n in alive])
    for number, signer in enumerate(crowd):
        owners.collector.shares[signer.peer_id] = replace(share_of(signer), willing=number in willing)
    taken = [crowd[0].peer_id]
    recruits = owners.recruits(taken, room, 0.0)
    able = {crowd[n].peer_id for n in willing & alive} - set(taken)
    assert set(recruits) <= able
    assert len(recruits) == min(max(0, room), len(able))


def test_a_round_has_at_most_so_many_voters() -> None:
    owners = owners_of(OWNER, [ToySigner(100 + n) for n in range(12)])
    for number in range(12):
        signer = ToySigner(100 + number)
        owners.collector.shares[signer.peer_id] = share_of(signer)
    instance = Instance(HEAD, Vote())
    instance.base = BASE
    instance.hold(sign_contribution(OWNER, HEAD.hash, 10, BASE, True, b"x"))
    record = instance.fresh(
        OWNER.peer_id, 0, lambda p: True, lambda v: owners.recruits(v, CONFIG.voters_max - len(v), 0.0)
    )
    assert len(record.voters) == CONFIG.voters_max


# The fate of a share: heard, missed, or unknown; with whole engines.


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


def test_an_early_share_waits_for_its_round() -> None:
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
    swarms[1].reduce()
    assert engine.head == record
    assert SHARER.peer_id in owners.collector.shares


def test_where_everybody_gets_everything_a_share_is_refused() -> None:
    restored = journal.restore(HEAD, [], [], OWNER, 1000)
    config = replace(CONFIG, parts=0)
    engine = Engine(OWNER, config, restored, check=lambda payload: None, nonce=1, now=0.0)
    engine.connected(SHARER.peer_id, 0.0)
    engine.receive(SHARER.peer_id, Share(share_of(SHARER).encoded), 0.0)
    assert engine.drain().refusals
