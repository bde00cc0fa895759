"""What a peer answers to those who lack something: contributions by digest, records after a head."""

from __future__ import annotations

from averaging.chain import Chain
from averaging.instance import Instance
from averaging.messages import Get, GetLog, Log, Message, Offer


def asked_for(question: Get | GetLog, chain: Chain, instance: Instance) -> list[Message]:
    """As much of it as is here; empty if nothing is."""
    if isinstance(question, Get):
        found = [instance.held.get(digest) or chain.contribution(digest) for digest in question.digests]
        return [Offer(contribution.encoded) for contribution in found if contribution is not None]
    after = chain.first_known(question.known)
    entries = None if after is None else chain.after(after)
    return [Log(after, chain.head.round, tuple(entries))] if after is not None and entries else []
