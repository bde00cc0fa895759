"""The format of a run covers what its peers say to each other: bytes that change are told from older ones by it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from averaging import gossip_messages as gossip
from averaging.gossip import NONCE_BYTES
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
    Share,
    encode_message,
)
from averaging.owners import encode_parts
from averaging.record import Ballot, sha256
from compression.header import VERSION
from peer.spec import FORMAT
from tests.averaging.strategies import SIGNERS, certificate_of, child_of, first, offer_of, recovery_of

KNOWN = {2: "f8ac82d36da7074a8178bdbeefa100d0e24a33cb93a1cbcbfc51e3097e09eb7e"}
"""The hash of all the bytes below, by format."""

HEAD = first(3)
OFFERS = [offer_of(signer, HEAD, payload=encode_parts({0: b"x", 3: b"y"})) for signer in SIGNERS[:3]]
RECORD = child_of(HEAD, OFFERS)
WITH_OWNERS = replace(RECORD, owners=tuple(sorted(s.peer_id for s in SIGNERS[:5])))
BALLOT = Ballot(1, SIGNERS[0].peer_id)
VOTE = bytes(range(64))
ENTRIES = (LogEntry(RECORD, certificate_of(HEAD, RECORD, SIGNERS[:3]), 100), recovery_of(RECORD, SIGNERS[:2]))

MESSAGES: tuple[Message, ...] = (
    Head(HEAD.hash, 1, 2, 3, False, 4000),
    Offer(OFFERS[0].encoded),
    Offer(OFFERS[0].encoded, True, OFFERS[1].digest),
    Get((HEAD.hash, RECORD.hash)),
    Propose(BALLOT, WITH_OWNERS, True, VOTE),
    Accepted(HEAD.hash, BALLOT, RECORD.hash, VOTE),
    Prepare(HEAD.hash, BALLOT),
    Promise(HEAD.hash, BALLOT, Ballot(0, HEAD.lead), RECORD),
    Nack(HEAD.hash, BALLOT, True),
    GetLog((RECORD.hash, HEAD.hash)),
    Log(HEAD.hash, 2, ENTRIES),
    Share(OFFERS[0].encoded),
)
GOSSIP: tuple[gossip.GossipMessage, ...] = (
    gossip.Invite(bytes(NONCE_BYTES), 1, 2000),
    gossip.Later(),
    gossip.Accept(1),
    gossip.Refuse(),
    gossip.Payload(OFFERS[0].encoded),
    gossip.Prepare(HEAD.voters),
    gossip.Held(),
    gossip.Done(3, HEAD.voters),
    gossip.Abort(),
    gossip.Ask(HEAD.hash),
)


def test_bytes_that_changed_are_of_another_format() -> None:
    said = [encode_message(message) for message in MESSAGES] + [gossip.encode_gossip(message) for message in GOSSIP]
    digest = sha256(bytes([VERSION]) + b"".join(sha256(one) for one in said)).hex()
    assert KNOWN.get(FORMAT) == digest, "a release that says this is not understood by others: raise peer.spec.FORMAT"


def test_no_kind_of_message_is_left_out() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))
    assert {type(message) for message in GOSSIP} == set(get_args(gossip.GossipMessage))
