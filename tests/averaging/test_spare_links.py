"""Where owners reduce, whom the log names keeps links to all, and the others close those that neither end needs."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from averaging import journal
from averaging.config import EngineConfig
from averaging.contribution import sign_contribution
from averaging.links import Links, LinksConfig
from averaging.messages import Accepted, Head, Message, Offer, Propose, encode_message
from averaging.node import PROTOCOL, SPARE_LINKS, Node, NodeConfig, _pair
from averaging.owners import encode_parts
from averaging.record import Ballot, acceptance_message, genesis, sha256
from averaging.rounds import RECENT_ROUNDS
from network.seam import Network, PeerID
from network.simulated import World
from simulator.storage import SimulatedStorage
from simulator.toy import ToySigner
from simulator.virtual_time import run_virtual
from tests.averaging.strategies import BASE, child_of

RUN = sha256(b"run")
SIGNERS = {signer.peer_id: signer for signer in map(ToySigner, range(40))}
ME, LEAD, *OTHERS = SIGNERS
FIRST = genesis(RUN, LEAD, BASE)
CONFIG = EngineConfig(payload_bytes_max=1000, weight_max=1000, snapshot_bytes=10**9, parts=4)
KEPT = 2 * SPARE_LINKS


class Town:
    """One node; and many peers that link with it if told so, and need no link. LEAD makes the records."""

    def __init__(self, network: Network, config: EngineConfig) -> None:
        restored, rng = journal.restore(FIRST, [], [], SIGNERS[ME], 1000), random.Random(0)
        self.node = Node(
            network,
            SIGNERS[ME],
            SimulatedStorage(rng),
            restored,
            NodeConfig(config),
            rng,
            run_id=RUN.hex(),
            nonce=1,
            check=lambda payload: None,
        )
        self.others: dict[PeerID, Links] = {}
        self.ups: list[PeerID] = []
        """At whom a link with the node came up, in this order; and where one ended."""
        self.downs: list[PeerID] = []
        self.head = FIRST

    def settle(self, network: Network) -> Links:
        peer = network.peer_id
        self.others[peer] = Links(
            network,
            f"{PROTOCOL}/{RUN.hex()[:16]}",
            LinksConfig(frame_bytes_max=1 << 20),
            random.Random(peer),
            on_message=lambda source, frame: None,
            on_up=lambda source: self.ups.append(peer),
            on_down=lambda source: self.downs.append(peer),
            is_needed=lambda source: False,
        )
        return self.others[peer]

    async def link(self, peers: Iterable[PeerID]) -> None:
        """They dial the node."""
        for peer in peers:
            self.others[peer].know(ME)
        await anyio.sleep(1)

    async def meet_all(self) -> None:
        """The directory names everybody, again and again."""
        for _ in range(20):
            for peer in self.others:
                self.node.meet(peer)
            await anyio.sleep(30)

    async def commit(
        self,
        members: Collection[PeerID] = (LEAD,),
        voters: Collection[PeerID] = (LEAD,),
        owners: Collection[PeerID] = (),
    ) -> None:
        """The next round, which all voters of the head accept."""
        head, payload = self.head, encode_parts({0: b"x"})
        offers = [sign_contribution(SIGNERS[m], head.hash, 10, BASE, True, payload) for m in members]
        record = replace(child_of(head, offers, LEAD), voters=tuple(sorted(voters)), owners=tuple(sorted(owners)))
        ballot = Ballot(0, LEAD)
        vote = acceptance_message(head.hash, ballot, record.hash)
        for offer in offers:
            self.say(LEAD, Offer(offer.encoded))
        self.say(LEAD, Propose(ballot, record, False, SIGNERS[LEAD].sign(vote)))
        for voter in head.voters:
            if voter not in (LEAD, ME):
                self.say(voter, Accepted(head.hash, ballot, record.hash, SIGNERS[voter].sign(vote)))
        await anyio.sleep(1)
        assert self.node.head == record
        self.head = record

    def say(self, peer: PeerID, message: Message) -> None:
        self.others[peer].send(ME, encode_message(message))

    @property
    def linked(self) -> set[PeerID]:
        """With the node, as both ends see it."""
        linked = set(self.node.links.linked)
        assert linked == {peer for peer, links in self.others.items() if links.linked}
        return linked


@asynccontextmanager
async def open_town(config: EngineConfig) -> AsyncIterator[Town]:
    world = World(0)
    async with AsyncExitStack() as stack:
        network, *networks = [await stack.enter_async_context(world.open_network(peer)) for peer in SIGNERS]
        town = Town(network, config)
        async with anyio.create_task_group() as tasks:
            for links in map(town.settle, networks):
                tasks.start_soon(links.run)
            tasks.start_soon(town.node.run)
            await anyio.sleep(0.1)
            yield town
            tasks.cancel_scope.cancel()


def run(test: Callable[[Town], Awaitable[None]], config: EngineConfig = CONFIG) -> None:
    async def start() -> None:
        async with open_town(config) as town:
            await test(town)

    run_virtual(start)


def test_when_others_are_named_a_peer_keeps_them_and_a_few_more() -> None:
    async def test(town: Town) -> None:
        await town.link([LEAD, *OTHERS])
        assert town.linked == {LEAD, *OTHERS}
        await town.commit()
        assert LEAD in town.linked and len(town.linked) == 1 + KEPT
        assert set(town.downs) == {*OTHERS} - town.linked, "the others hear that the link is gone"
        assert set(town.node.links.known) == town.linked

    run(test)


def test_a_closed_link_is_not_made_again_before_its_peer_is_named() -> None:
    async def test(town: Town) -> None:
        await town.link([LEAD, *OTHERS])
        await town.commit()
        few, closed = town.linked, sorted(set(OTHERS) - town.linked)
        town.ups.clear()
        await town.meet_all()
        await town.commit()
        assert town.linked == few and not town.ups
        member, voter, owner = closed[:3]
        await town.commit(members=(LEAD, member), voters=(LEAD, voter), owners=(LEAD, owner))
        assert town.linked == {*few, member, voter, owner}
        assert sorted(town.ups) == sorted((member, voter, owner)), "each is dialled once"
        for _ in range(RECENT_ROUNDS - 1):
            await town.commit()
            assert {member, voter, owner} <= town.linked, "it may still be owed an answer"
        await town.commit()
        assert town.linked == few
        await town.meet_all()
        assert town.linked == few and len(town.ups) == 3

    run(test)


@pytest.mark.parametrize("role", ["member", "voter", "owner"])
def test_whom_the_log_names_closes_no_link(role: str) -> None:
    named = {"members": (LEAD,), "voters": (LEAD,), "owners": ()} | {f"{role}s": (LEAD, ME)}

    async def test(town: Town) -> None:
        await town.link([LEAD, *OTHERS])
        await town.commit(**named)
        for _ in range(RECENT_ROUNDS - 1):
            await town.commit()
        assert town.linked == {LEAD, *OTHERS} and not town.downs
        await town.commit()
        assert len(town.linked) == 1 + KEPT, "now others are named"

    run(test)


def test_whom_the_log_names_dials_everybody_and_again_when_a_link_breaks() -> None:
    async def test(town: Town) -> None:
        await town.link([LEAD])
        await town.commit(owners=(LEAD, ME))
        await town.meet_all()
        assert town.linked == {LEAD, *OTHERS}
        town.ups.clear()
        for peer in OTHERS:
            town.others[peer].close(ME)
        await anyio.sleep(1)
        assert town.linked == {LEAD, *OTHERS} and sorted(town.ups) == sorted(OTHERS)

    run(test)


def test_who_is_behind_closes_no_link() -> None:
    """It does not know whom the newest records name, and asks those who do."""

    async def test(town: Town) -> None:
        await town.link([LEAD, *OTHERS])
        town.say(OTHERS[0], Head(sha256(b"far ahead"), 50, 10**6, 1, False))
        await anyio.sleep(0.2)
        assert town.node.is_behind
        await town.commit()
        assert town.node.is_behind and town.linked == {LEAD, *OTHERS}

    run(test)


def test_where_everybody_gets_everything_no_link_is_spare() -> None:
    async def test(town: Town) -> None:
        await town.link([LEAD, *OTHERS])
        await town.commit()
        assert town.linked == {LEAD, *OTHERS} and not town.downs

    run(test, replace(CONFIG, parts=0))


def test_of_many_members_a_few_are_dialled_and_again_when_these_go() -> None:
    async def test(town: Town) -> None:
        await town.meet_all()
        assert LEAD in town.linked and len(town.linked) == 1 + SPARE_LINKS
        gone = min(town.linked - {LEAD})
        town.others[gone].close(ME)
        await anyio.sleep(20)
        assert len(town.linked) == SPARE_LINKS, "it is not needed"
        await town.meet_all()
        assert LEAD in town.linked and len(town.linked) == 1 + SPARE_LINKS

    run(test)


def test_a_peer_whose_link_was_closed_may_dial_and_is_bounded_again() -> None:
    async def test(town: Town) -> None:
        await town.link([LEAD, *OTHERS])
        for _ in range(3):
            await town.commit()
            few = town.linked
            assert len(few) == 1 + KEPT
            await town.link(sorted(set(OTHERS) - few))
            assert town.linked == {LEAD, *OTHERS}
        await town.commit()
        assert town.linked == few, "always the same"

    run(test)


def test_both_ends_think_the_same_of_a_link() -> None:
    """Else each would close what the other keeps."""
    assert _pair(ME, LEAD) == _pair(LEAD, ME)
    assert len({_pair(ME, other) for other in OTHERS}) == len(OTHERS)
