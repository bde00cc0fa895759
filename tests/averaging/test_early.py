"""What came before its head: of each peer the newest, within so many bytes, and nothing for a round gone by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from averaging.contribution import HEADER_BYTES_MAX, Contribution
from averaging.early import Early
from averaging.record import Hash, sha256
from tests.averaging.strategies import BASE, SIGNERS

HEADS = [sha256(bytes([number])) for number in range(3)]
KINDS = st.sampled_from(["keep", "drop", "take"])
CALLS = st.lists(st.tuples(KINDS, st.integers(0, 5), st.sampled_from(HEADS), st.integers(0, 3000)))
BYTES_MAX = 4 * (HEADER_BYTES_MAX + 1000)


def early(peer: int, head: Hash, size: int = 1000) -> Contribution:
    return Contribution(head, SIGNERS[peer].peer_id, 10, BASE, True, bytes(size))


def nothing(head: Hash) -> bool:
    return False


@given(CALLS)
def test_it_keeps_of_each_peer_the_newest_and_no_more_bytes(
    calls: list[tuple[str, int, Hash, int]],
) -> None:
    kept = Early(BYTES_MAX)
    newest: dict[int, Contribution] = {}
    for call, peer, head, size in calls:
        if call == "keep":
            newest[peer] = early(peer, head, size)
            kept.keep(newest[peer])
            assert newest[peer] in kept._kept.values()
        elif call == "drop":
            newest.pop(peer, None)
            kept.drop(SIGNERS[peer].peer_id)
        else:
            taken = kept.take(head, {head}.__contains__)
            assert all(c in newest.values() and c.prev == head for c in taken)
            newest = {peer: c for peer, c in newest.items() if c.prev != head}
        assert set(map(id, kept._kept.values())) <= set(map(id, newest.values()))
        assert kept.bytes_kept == sum(len(c.payload) + HEADER_BYTES_MAX for c in kept._kept.values())
        assert kept.bytes_kept <= BYTES_MAX


def test_when_it_is_full_a_newcomer_takes_the_place_of_what_has_waited_longest() -> None:
    kept = Early(BYTES_MAX)
    for peer in range(4):
        kept.keep(early(peer, HEADS[0]))
    again = early(0, HEADS[1])
    kept.keep(again)
    assert len(kept) == 4
    kept.keep(early(4, HEADS[1]))
    assert [c.owner for c in kept.take(HEADS[0], nothing)] == sorted(SIGNERS[peer].peer_id for peer in (2, 3))
    assert kept.take(HEADS[1], nothing) == sorted([again, early(4, HEADS[1])], key=lambda c: c.owner)


def test_the_newest_is_kept_whatever_its_size() -> None:
    kept = Early(BYTES_MAX)
    kept.keep(early(0, HEADS[0]))
    large = early(1, HEADS[0], BYTES_MAX)
    kept.keep(large)
    assert kept.take(HEADS[0], nothing) == [large]
    assert kept.bytes_kept == 0


def test_what_is_for_a_round_gone_by_is_dropped_and_what_is_for_an_unknown_one_stays() -> None:
    kept = Early()
    for peer, head in enumerate(HEADS):
        kept.keep(early(peer, head))
    assert kept.take(HEADS[1], HEADS[:2].__contains__) == [early(1, HEADS[1])]
    assert len(kept) == 1
    assert kept.take(HEADS[2], HEADS.__contains__) == [early(2, HEADS[2])]
