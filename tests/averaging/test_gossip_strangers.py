"""Meetings with partners that break off, lie or break the rules: who is believed, and who is left."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import final

import anyio
import pytest
from anyio.abc import ByteStream

from averaging.gossip import NONCE_BYTES, is_prior, meeting_id
from averaging.gossip_messages import (
    Accept,
    Ask,
    Done,
    GossipMessage,
    Held,
    Invite,
    Later,
    Payload,
    Prepare,
    encode_gossip,
    parse_gossip,
)
from averaging.gossip_voice import Said, Voice
from network.framing import FrameReader, send_frame
from network.seam import PeerID
from simulator.gossip_toy import ToyReplica, ToyRules
from simulator.virtual_time import run_virtual
from tests.averaging.gossip_town import LONGEST, PLACE, RUN, Peer, Town


@final
class Stranger:
    """A peer that speaks the protocol by hand."""

    def __init__(self, town: Town, number: int) -> None:
        signer = town.signers[number]
        self.name = signer.peer_id
        self.voice = Voice(signer, town.config, random.Random(9), run_id=RUN, check=lambda payload: None)
        self.replica = ToyReplica(self.name, [7.0], ToyRules())
        self.said = Said(self.replica.pack(0), 10, bytes(16), 0)

    async def say(self, stream: ByteStream, message: GossipMessage) -> None:
        await send_frame(stream, encode_gossip(message), seconds_max=10)


def invited_by_stranger(
    town: Town, talk: Callable[[Stranger, ByteStream, FrameReader, Invite], Awaitable[None]]
) -> Peer:
    """Peer 0 is invited by a stranger that then does as `talk` says; returns peer 0 after its round."""
    stranger = Stranger(town, 1)

    async def main() -> None:
        async def body(peer: Peer) -> None:
            await peer.meet()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(town.run, body, [0])
            async with town.world.open_network(stranger.name) as network:
                await anyio.sleep(0.01)
                stream = await network.open_stream(town.names[0], PLACE)
                invite = stranger.voice.draw_invite(stranger.said, 1.0)
                await stranger.say(stream, invite)
                reader = FrameReader(stream, 100_000)
                message = parse_gossip(await reader.receive(10))
                if isinstance(message, Later):
                    message = parse_gossip(await reader.receive(10))
                assert isinstance(message, Accept)
                assert isinstance(parse_gossip(await reader.receive(10)), Payload)
                await talk(stranger, stream, reader, invite)
                await anyio.sleep(LONGEST)

    run_virtual(main)
    return town.peers[0]


def test_a_member_in_doubt_asks_and_believes_the_organiser() -> None:
    for met in (True, False):
        town = Town(2)

        async def talk(
            stranger: Stranger,
            stream: ByteStream,
            reader: FrameReader,
            invite: Invite,
            met: bool = met,
            town: Town = town,
        ) -> None:
            members = tuple(sorted(town.names))
            meeting = meeting_id(RUN, stranger.name, 0, invite.nonce)
            mine = stranger.voice.sign(stranger.said, invite, stranger.name)

            async def answer(peer: PeerID, asked: ByteStream) -> None:
                message = parse_gossip(await FrameReader(asked, 1000).receive(10))
                if message == Ask(meeting):
                    await stranger.say(asked, Done(1, members) if met else Later())

            network = town.world.find(stranger.name)
            assert network is not None
            await network.serve(PLACE, answer)
            await stranger.say(stream, Payload(mine.encoded))
            await stranger.say(stream, Prepare(members))
            assert parse_gossip(await reader.receive(10)) == Held()
            await stream.aclose()

        peer = invited_by_stranger(town, talk)
        assert peer.replica.x == ([3.5] if met else [0.0])
        assert len(peer.met) == 1


@pytest.mark.parametrize(
    "fault", ["other meeting", "bad payload", "heavy", "unheld member", "done before held", "garbage"]
)
def test_a_stranger_that_breaks_the_rules_is_left(fault: str) -> None:
    town = Town(3)

    async def talk(stranger: Stranger, stream: ByteStream, reader: FrameReader, invite: Invite) -> None:
        said, members = stranger.said, tuple(sorted(town.names[:2]))
        if fault == "other meeting":
            invite = Invite(bytes(NONCE_BYTES), 0, 0)
        elif fault == "bad payload":
            said = Said(b"nonsense", 10, bytes(16), 0)
        elif fault == "heavy":
            said = Said(said.payload, 10**6, bytes(16), 0)
        elif fault == "unheld member":
            members = tuple(sorted(town.names))
        if fault == "garbage":
            await send_frame(stream, b"\xc1", seconds_max=1)
            return
        await stranger.say(stream, Payload(stranger.voice.sign(said, invite, stranger.name).encoded))
        if fault != "done before held":
            await stranger.say(stream, Prepare(members))
        await stranger.say(stream, Done(1, members))

    peer = invited_by_stranger(town, talk)
    assert peer.replica.x == [0.0] and len(peer.met[0].contributions) == 1
    assert len(peer.node.refusals) == (fault in ("other meeting", "bad payload", "heavy"))


def test_a_round_that_a_partner_claims_is_believed_only_so_far() -> None:
    town = Town(2)

    async def talk(stranger: Stranger, stream: ByteStream, reader: FrameReader, invite: Invite) -> None:
        members = tuple(sorted(town.names))
        await stranger.say(stream, Payload(stranger.voice.sign(stranger.said, invite, stranger.name).encoded))
        await stranger.say(stream, Prepare(members))
        assert parse_gossip(await reader.receive(10)) == Held()
        await stranger.say(stream, Done(10**12, members))

    peer = invited_by_stranger(town, talk)
    assert peer.round == town.config.round_leap_max


def test_nobody_else_is_told_how_a_meeting_ended() -> None:
    town = Town(3)
    answers: list[GossipMessage] = []

    async def body(peer: Peer) -> None:
        met = await peer.meet()
        if peer.node.outcomes:
            network = town.world.find(town.names[peer.number])
            assert network is not None
            async with town.world.open_network(town.names[2]) as other:
                stream = await other.open_stream(town.names[peer.number], PLACE)
                await send_frame(stream, encode_gossip(Ask(met.meeting)), seconds_max=1)
                answers.append(parse_gossip(await FrameReader(stream, 1000).receive(10)))

    run_virtual(lambda: town.run(body, [0, 1]))
    assert len(answers) == 1 and not isinstance(answers[0], Done)


def test_of_two_that_invite_each_other_the_prior_one_organises() -> None:
    """Each takes itself for the first of the group, since each sees the other in no list of its own."""
    town = Town(2)
    town.view = lambda number: []  # type: ignore[method-assign]

    async def body(peer: Peer) -> None:
        town.view = lambda number: town.names  # type: ignore[method-assign]
        await peer.meet()

    run_virtual(lambda: town.run(body))
    organisers = [peer.number for peer in town.peers if peer.node.outcomes]
    assert len(organisers) == 1 and all(len(peer.met[0].contributions) == 2 for peer in town.peers)
    assert is_prior(town.names[0], town.names[1], RUN) != is_prior(town.names[1], town.names[0], RUN)
