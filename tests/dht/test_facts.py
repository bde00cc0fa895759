"""Facts: what one peer says, another reads; what nobody may say is refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.facts import SPEC_BYTES_MAX, MemberFact, RunFact, SpecFact, run_id_of
from dht.record import InvalidRecord
from network.identity import Identity

ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
RUN = RunFact(run_id_of(b"spec"), "tiny", ALICE.peer_id)
MEMBER = MemberFact(
    version="1.0",
    name="alice",
    addresses=("/ip4/127.0.0.1/tcp/1/p2p/" + ALICE.peer_id,),
    nonce=1,
    head=b"h" * 32,
    round=3,
    tokens=4,
    loss=1.5,
    reachable=True,
    trains=True,
)

words = st.text(st.characters(categories=("L", "N", "P")), max_size=20)
counts = st.integers(0, 2**63 - 1)
members = st.builds(
    MemberFact,
    version=words,
    name=words,
    addresses=st.lists(words, max_size=8).map(tuple),
    nonce=counts,
    head=st.binary(max_size=64),
    round=counts,
    tokens=counts,
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    reachable=st.booleans(),
    trains=st.booleans(),
    offers=st.lists(words, max_size=8).map(tuple),
    left=st.booleans(),
)


@given(members)
def test_a_member_fact_is_read_as_it_was_said(fact: MemberFact) -> None:
    assert MemberFact.decode(fact.encode()) == fact


@given(words, st.binary(min_size=1, max_size=100))
def test_run_and_spec_facts_are_read_as_they_were_said(name: str, spec: bytes) -> None:
    run, fact = RunFact(run_id_of(spec), name, BOB.peer_id), SpecFact.by(ALICE, spec)
    assert RunFact.decode(run.encode()) == run
    assert SpecFact.decode(fact.encode(), run.run_id) == fact


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_member_whose_loss_diverged_is_still_seen(loss: float | None) -> None:
    assert MemberFact.decode(replace(MEMBER, loss=loss).encode()).loss is None


def test_a_later_version_may_say_more() -> None:
    fields = {**msgpack.unpackb(MEMBER.encode()), "mood": "good"}
    assert MemberFact.decode(msgpack.packb(fields)) == MEMBER


@given(st.binary(max_size=200))
def test_garbage_is_refused_by_name(payload: bytes) -> None:
    for decode in (RunFact.decode, MemberFact.decode, lambda payload: SpecFact.decode(payload, RUN.run_id)):
        with pytest.raises(InvalidRecord):
            decode(payload)


@pytest.mark.parametrize(
    "payload", [b"\x81" * 2000, b"\x91" * 2000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc1"]
)
def test_msgpack_bombs_are_refused_by_name(payload: bytes) -> None:
    with pytest.raises(InvalidRecord):
        MemberFact.decode(payload)


@given(st.sampled_from(sorted(msgpack.unpackb(MEMBER.encode()))), st.data())
def test_a_field_of_another_type_or_none_at_all_is_refused(name: str, data: st.DataObject) -> None:
    fields = msgpack.unpackb(MEMBER.encode())
    fields[name] = data.draw(st.sampled_from([{}, [[]], -1, 2**64 - 1, 1e400, "\x1b[2J", b"b" * 65, "s" * 200, [1]]))
    with pytest.raises(InvalidRecord):
        MemberFact.decode(msgpack.packb(fields))
    del fields[name]
    if name != "loss":
        with pytest.raises(InvalidRecord):
            MemberFact.decode(msgpack.packb(fields))


@pytest.mark.parametrize(
    "wrong",
    [
        {"addresses": ("a",) * 9},
        {"addresses": ("a" * 161,)},
        {"name": "n" * 65},
        {"name": "two\nlines"},
        {"round": -1},
        {"nonce": 2**63},
        {"head": b"h" * 65},
    ],
)
def test_nobody_can_say_what_nobody_would_read(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(MEMBER, **wrong).encode()  # type: ignore[arg-type]


def test_a_specification_counts_for_its_own_run_and_creator_only() -> None:
    fact = SpecFact.by(ALICE, b"spec")
    with pytest.raises(InvalidRecord, match="is of run"):
        SpecFact.decode(fact.encode(), run_id_of(b"other"))
    with pytest.raises(InvalidRecord, match="not signed"):
        SpecFact.decode(replace(fact, creator=BOB.peer_id).encode(), fact.run_id)
    with pytest.raises(InvalidRecord, match="is of run"):
        SpecFact.decode(replace(fact, spec=b"forged").encode(), fact.run_id)


@pytest.mark.parametrize("num_bytes", [0, SPEC_BYTES_MAX + 1])
def test_a_specification_of_no_or_too_many_bytes_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="specification"):
        SpecFact.by(ALICE, bytes(num_bytes))


def test_the_largest_specification_fits_a_record() -> None:
    fact = SpecFact.by(ALICE, bytes(SPEC_BYTES_MAX))
    assert SpecFact.decode(fact.encode(), fact.run_id) == fact


@pytest.mark.parametrize("run_id", ["", "f" * 63, "F" * 64, "g" * 64, "f" * 64 + "\n"])
def test_a_run_id_is_a_hash(run_id: str) -> None:
    with pytest.raises(InvalidRecord, match="run"):
        RunFact(run_id, "name", ALICE.peer_id).encode()
