"""Values of the round protocol, drawn by Hypothesis and made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from averaging.chain import Chain
from averaging.contribution import Contribution, sign_contribution
from averaging.messages import (
    Accepted,
    Get,
    GetLog,
    Head,
    Log,
    LogEntry,
    Message,
    Nack,
    Offer,
    Prepare,
    Promise,
    Propose,
)
from averaging.record import (
    INTEGER_MAX,
    NO_BALLOT,
    NORMAL,
    RECOVERY,
    Ballot,
    Certificate,
    Hash,
    Member,
    Record,
    acceptance_message,
    genesis,
    recovery_message,
    sha256,
)
from network.identity import peer_id_of
from network.seam import PeerID
from simulator.toy import ToySigner

SIGNERS = [ToySigner(number) for number in range(9)]
BASE = bytes(16)

hashes = st.binary(min_size=32, max_size=32).map(Hash)
peers = st.binary(min_size=32, max_size=32).map(peer_id_of)
integers = st.integers(0, INTEGER_MAX)
signatures = st.binary(min_size=64, max_size=64)
ballots = st.builds(Ballot, st.integers(0, INTEGER_MAX), peers)


def _sorted_members(members: list[Member]) -> tuple[Member, ...]:
    return tuple(sorted({m.peer: m for m in members}.values(), key=lambda m: m.peer))


normals = st.builds(
    Record,
    kind=st.just(NORMAL),
    prev=hashes,
    round=integers,
    origin=peers,
    attempt=integers,
    members=st.lists(st.builds(Member, peers, integers, hashes), min_size=1, max_size=5).map(_sorted_members),
    voters=st.lists(peers, min_size=1, max_size=9).map(lambda p: tuple(sorted(set(p)))),
    base=st.binary(min_size=16, max_size=16),
    tokens=integers,
)
recoveries = normals.map(lambda record: replace(record, kind=RECOVERY, members=()))
records = normals | recoveries
certificates = st.builds(Certificate, ballots, st.dictionaries(peers, signatures, max_size=5))
entries = st.builds(LogEntry, records, certificates, integers)
accepted = st.one_of(st.just((NO_BALLOT, None)), st.tuples(ballots, records))
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Head, hashes, integers, integers, integers, st.booleans()),
    st.builds(Offer, st.binary(max_size=100)),
    st.builds(Get, st.lists(hashes, max_size=5).map(tuple)),
    st.builds(Propose, ballots, records, st.booleans(), signatures),
    st.builds(Accepted, hashes, ballots, hashes, signatures),
    st.builds(Prepare, hashes, ballots),
    st.builds(lambda h, b, a: Promise(h, b, *a), hashes, ballots, accepted),
    st.builds(Nack, hashes, st.one_of(st.just(NO_BALLOT), ballots), st.booleans()),
    st.builds(GetLog, st.lists(hashes, max_size=5).map(tuple)),
    st.builds(Log, hashes, integers, st.lists(entries, max_size=3).map(tuple)),
)


def first(num_voters: int = 1) -> Record:
    """A genesis with as many voters as asked; a real one has its creator alone."""
    start = genesis(sha256(b"run"), SIGNERS[0].peer_id, BASE)
    voters = tuple(sorted(s.peer_id for s in SIGNERS[:num_voters]))
    return Record(start.kind, start.prev, 0, start.origin, 0, (), voters, BASE, 0)


def offer_of(
    signer: ToySigner,
    head: Record,
    *,
    weight: int = 10,
    base: bytes = BASE,
    willing: bool = True,
    payload: bytes = b"x",
) -> Contribution:
    return sign_contribution(signer, head.hash, weight, base, willing, payload)


def child_of(head: Record, offers: Sequence[Contribution], origin: PeerID | None = None, attempt: int = 0) -> Record:
    """The fresh record that names all `offers`."""
    ordered = sorted(offers, key=lambda c: c.owner)
    members = tuple(Member(c.owner, c.weight, c.digest) for c in ordered)
    tokens = head.tokens + sum(c.weight for c in ordered)
    voters = tuple(c.owner for c in ordered if c.willing) or tuple(c.owner for c in ordered)
    return Record(
        NORMAL, head.hash, head.round + 1, origin or head.lead, attempt, members, voters, offers[0].base, tokens
    )


def certificate_of(
    head: Record, record: Record, signers: Sequence[ToySigner], ballot: Ballot | None = None
) -> Certificate:
    ballot = ballot or Ballot(0, head.lead)
    message = acceptance_message(head.hash, ballot, record.hash)
    return Certificate(ballot, {s.peer_id: s.sign(message) for s in signers})


def signer_of(peer: PeerID) -> ToySigner:
    return next(s for s in SIGNERS if s.peer_id == peer)


Grown = list[tuple[LogEntry, list[Contribution]]]
"""A certified piece of a chain, with its contributions."""


def grown(
    rounds: int,
    num_peers: int = 3,
    *,
    head: Record | None = None,
    signers: Sequence[ToySigner] | None = None,
    weight: int = 10,
) -> Grown:
    """What follows `head` (`first(num_peers)`): in every round all `signers` (as many) contribute, all voters vote."""
    head = first(num_peers) if head is None else head
    chain: Grown = []
    for number in range(rounds):
        offers = [offer_of(s, head, weight=weight, payload=b"%03d" % number) for s in signers or SIGNERS[:num_peers]]
        record = child_of(head, offers)
        offers.sort(key=lambda c: c.owner)
        voters = [signer_of(v) for v in head.voters]
        entry = LogEntry(record, certificate_of(head, record, voters), sum(len(c.encoded) for c in offers))
        chain.append((entry, offers))
        head = record
    return chain


def recovery_of(head: Record, survivors: Sequence[ToySigner], origin: ToySigner | None = None) -> LogEntry:
    """What `origin` (the first of the survivors) mints after `head`."""
    origin = survivors[0] if origin is None else origin
    voters = tuple(sorted(s.peer_id for s in survivors))
    record = Record(RECOVERY, head.hash, head.round + 1, origin.peer_id, 0, (), voters, BASE, head.tokens)
    signature = origin.sign(recovery_message(record))
    return LogEntry(record, Certificate(Ballot(0, origin.peer_id), {origin.peer_id: signature}), 0)


def forked(head: Record, survivors: Sequence[ToySigner], rounds: int, *, weight: int = 10) -> Grown:
    """A recovery after `head`, and so many rounds of its survivors."""
    entry = recovery_of(head, survivors)
    return [(entry, []), *grown(rounds, head=entry.record, signers=survivors, weight=weight)]


def chain_with(start: Record, *pieces: Grown) -> Chain:
    chain = Chain(start)
    for entry, contributions in (round_ for piece in pieces for round_ in piece):
        chain.append(entry.record, entry.certificate, contributions)
    return chain
