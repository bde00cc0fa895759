"""One meeting of a few peers, as a star: one organises it, collects what all say, and decides who took part.

    organiser -> member   INVITE                          opens the stream
    member -> organiser   LATER ..., ACCEPT, PAYLOAD      LATER: kept until the member is ready
    organiser -> member   PAYLOAD (own), then PAYLOAD of the others, PREPARE
    member -> organiser   HELD                            all is here; only the organiser decides now
    organiser -> member   DONE who, or ABORT

The meeting takes place at the instant at which the organiser decides it (`Organised._decide`): between itself and those
who hold everything. It ends in one way for all of them unless somebody crashes or is cut off just then:

- A member that goes before HELD is left out; the others meet without it, and it keeps its replica and its work.
- An organiser that goes before it decides has not met; its members ask for the outcome (`ASK`), in vain, and have not
  met either: each keeps its replica and its work.
- A member whose link breaks after HELD asks until the organiser answers, or until a wait as long as a whole exchange is
  over; then it takes it that it has not met. If it is wrong, the others have moved without it.
- A peer that crashes after the decision comes back at its last snapshot, as if it had not met. An organiser's snapshot
  names the meetings that are in it, so it goes on telling the truth about them.

What an error costs: let S be those who the organiser said had met, T those of S that did not apply it. The moves within
S add up to zero, so in the end the mean of all N replicas is shifted by (k / N) |sum over T of (mean of S - replica)|,
k = mixing / (1 - momentum): for a pair at most k / (2 N) times the distance between the two. The work of T is in the
others' replicas and will be said again, at most once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol, final

import anyio
from anyio.abc import TaskGroup

from averaging.contribution import Contribution
from averaging.gossip_channel import Channel
from averaging.gossip_messages import Abort, Accept, Done, Held, Invite, Later, Payload, Prepare
from averaging.record import Hash
from network.seam import PeerID, PeerUnreachable

log = logging.getLogger(__name__)


@final
@dataclass(frozen=True, slots=True)
class Met:
    """Who met, by what they said (in peer-id order), and the round at which all of them are now."""

    meeting: Hash
    round: int
    contributions: tuple[Contribution, ...]


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """What one peer brings to a meeting, and how it talks."""

    mine: Contribution
    """Signed for this meeting."""
    round: int
    group_size: int
    members_min: int
    """Peers that a meeting needs, at least 2."""
    exchange_seconds: float
    answer_seconds: float
    """Who has said nothing to an invitation for so long is not there."""
    round_leap_max: int
    judge: Callable[[bytes, Hash, PeerID | None], Contribution | None]
    """The contribution in a stranger's bytes, if it is good for this meeting and of this owner (None: of anybody)."""

    @property
    def meeting(self) -> Hash:
        return self.mine.prev

    def round_after(self, round_: int) -> int:
        """A round said by others, within what is believed: never back, never far ahead."""
        return max(self.round + 1, min(round_, self.round + self.round_leap_max))


class Signal:
    """Wakes all who wait; whoever looks at a condition and waits at once misses nothing."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        event, self._event = self._event, anyio.Event()
        event.set()

    async def wait(self, seconds: float | None = None) -> None:
        with anyio.move_on_after(seconds):
            await self._event.wait()


# A member's side.


@final
@dataclass(frozen=True, slots=True)
class InDoubt:
    """HELD was said and no answer came: `outcome` tells what follows from one that comes another way."""

    held: dict[PeerID, Contribution]


@final
@dataclass(frozen=True, slots=True)
class Broken:
    """It did not take place for this peer: after the organiser had begun to say something, or not even that."""

    had_begun: bool
    was_late: bool


async def take_part(channel: Channel, terms: Terms, organiser: PeerID, invite: Invite) -> Met | InDoubt | Broken:
    """Accepts an invitation and follows the organiser."""
    channel.send(Accept(terms.round))
    channel.send(Payload(terms.mine.encoded))
    held = {terms.mine.owner: terms.mine}
    # The organiser may wait for others first, then it collects, then it sends.
    seconds = 2 * terms.exchange_seconds + (invite.wait_milliseconds / 1000 if terms.group_size > 2 else 0.0)
    latest = anyio.current_time() + seconds
    has_said_held = False
    while True:
        message = await channel.receive(max(0.0, latest - anyio.current_time()))
        if isinstance(message, Payload) and not has_said_held and len(held) < terms.group_size:
            contribution = terms.judge(message.encoded, terms.meeting, None)
            if contribution is not None and contribution.owner not in held:
                held[contribution.owner] = contribution
                continue
        elif isinstance(message, Prepare) and not has_said_held:
            if set(message.members) <= held.keys() and terms.mine.owner in message.members:
                channel.send(Held())
                has_said_held = True
                latest = anyio.current_time() + 2 * terms.exchange_seconds
                continue
        elif isinstance(message, Done) and has_said_held:
            met = met_by(message, terms, organiser, held)
            if met is not None:
                return met
        elif message is None and has_said_held:
            return InDoubt(held)
        return Broken(had_begun=len(held) > 1, was_late=anyio.current_time() >= latest)


def met_by(done: Done, terms: Terms, organiser: PeerID, held: dict[PeerID, Contribution]) -> Met | None:
    """What the organiser's word means here; None if it does not name this peer, itself, or somebody unheard of."""
    members = set(done.members)
    if not {terms.mine.owner, organiser} <= members or not members <= held.keys():
        return None
    return Met(terms.meeting, terms.round_after(done.round), tuple(held[peer] for peer in done.members))


# The organiser's side.


class Host(Protocol):
    """What a meeting needs of the peer that organises it."""

    def open_meeting_channel(self, peer: PeerID) -> AbstractAsyncContextManager[Channel]:
        """Raises `PeerUnreachable`."""

    def claim(self, organised: object) -> bool:
        """Somebody accepts: whether this peer is still free for `organised`, and from now on for nothing else."""

    def is_claimed_elsewhere(self, organised: object) -> bool:
        """Whether this peer has accepted an invitation itself meanwhile."""

    def saw_answer(self, seconds: float) -> None:
        """An invitation was answered after so long."""

    def saw_miss(self) -> None:
        """A partner let a deadline pass."""

    def decide(self, meeting: Hash, outcome: Done | None) -> None:
        """From now on this is what became of the meeting, whoever asks."""


@final
@dataclass(frozen=True, slots=True)
class Invitations:
    """Whom to invite: `first` at once, those of `spare` as others are not ready; all may come until `until`.

    With a `grace`, no longer than so many seconds after the first has come.
    """

    first: Sequence[PeerID]
    spare: Iterator[PeerID]
    until: float
    grace: float | None


@final
@dataclass(slots=True)
class _Party:
    """One invited peer."""

    talk: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    holding: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Its wait for HELD: ended when all is decided."""
    asked_at: float = field(default_factory=anyio.current_time)
    channel: Channel | None = None
    trains: bool = False
    """It has said so; it may still come."""
    accepted: bool = False
    round: int = 0
    contribution: Contribution | None = None
    held: bool = False
    gone: bool = False


@final
class Organised:
    """One meeting that this peer organises; `run` it once."""

    def __init__(self, host: Host, terms: Terms, invite: Invite, signal: Signal) -> None:
        """`signal` is notified whenever the host is claimed elsewhere."""
        self._host = host
        self._terms = terms
        self._invite = invite
        self._signal = signal
        self._parties: dict[PeerID, _Party] = {}
        self._is_closed = False
        self._outcome: Done | None = None
        self._decided = anyio.Event()
        self.begun_at: float | None = None
        """When somebody accepted: if `run` gives nothing afterwards, a meeting has broken."""
        self.was_answered = False
        """Somebody has said something, be it no."""

    @property
    def meeting(self) -> Hash:
        return self._terms.meeting

    @property
    def invited(self) -> set[PeerID]:
        return set(self._parties)

    async def run(self, invitations: Invitations) -> Met | None:
        """None if nobody came in time, all who came went again, or this peer was claimed elsewhere."""
        async with anyio.create_task_group() as tasks:
            for peer in invitations.first:
                self._start(tasks, peer)
            await self._wait_for_guests(tasks, invitations)
            self._is_closed = True
            if self._are_enough(self._accepted()):
                present = await self._collect()
                await self._spread(present)
                self._decide(present)
            else:
                tasks.cancel_scope.cancel()
        if self._outcome is None:
            return None
        terms = self._terms
        said = {p: c for p, party in self._parties.items() if (c := party.contribution) is not None}
        return met_by(self._outcome, terms, terms.mine.owner, {terms.mine.owner: terms.mine, **said})

    def _start(self, tasks: TaskGroup, peer: PeerID) -> None:
        party = self._parties[peer] = _Party()
        tasks.start_soon(self._talk, peer, party)

    async def _wait_for_guests(self, tasks: TaskGroup, invitations: Invitations) -> None:
        until, room = invitations.until, self._terms.group_size - 1
        while anyio.current_time() < until and not self._host.is_claimed_elsewhere(self):
            accepted = self._accepted()
            waiting = [party for party in self._parties.values() if self._may_come(party)]
            silent = [party for party in waiting if not party.trains]
            for _ in range(max(0, len(invitations.first) - len(silent) - len(accepted))):
                peer = next(invitations.spare, None)
                if peer is not None:
                    self._start(tasks, peer)
                    waiting.append(self._parties[peer])
            if len(accepted) >= room or not waiting:
                return
            if invitations.grace is not None and self._are_enough(accepted):
                until = min(until, anyio.current_time() + invitations.grace)
            wake_at = min([until, *(party.asked_at + self._terms.answer_seconds for party in silent)])
            await self._signal.wait(max(0.0, wake_at - anyio.current_time()))

    def _may_come(self, party: _Party) -> bool:
        is_silent = anyio.current_time() >= party.asked_at + self._terms.answer_seconds
        return not party.gone and not party.accepted and (party.trains or not is_silent)

    def _are_enough(self, guests: Sized) -> bool:
        return 1 + len(guests) >= self._terms.members_min

    def _accepted(self) -> list[_Party]:
        return [party for party in self._parties.values() if party.accepted and not party.gone]

    async def _collect(self) -> dict[PeerID, _Party]:
        """Those who said what they have to say, in time."""
        for party in self._parties.values():
            if not party.accepted:
                party.talk.cancel()
        await self._wait_until(lambda: all(party.contribution is not None for party in self._accepted()))
        return {p: party for p, party in self._parties.items() if party.contribution is not None and not party.gone}

    async def _spread(self, present: dict[PeerID, _Party]) -> None:
        """Hands everybody what the others say, and waits until they hold it."""
        members = tuple(sorted([*present, self._terms.mine.owner]))
        for peer, party in present.items():
            assert party.channel is not None
            for other, said in present.items():
                if other != peer and said.contribution is not None:
                    party.channel.send(Payload(said.contribution.encoded))
            if len(members) > 1:
                party.channel.send(Prepare(members))
        await self._wait_until(lambda: all(party.held or party.gone for party in present.values()))

    def _decide(self, present: dict[PeerID, _Party]) -> None:
        """The instant at which the meeting takes place. A link that broke after HELD makes no difference."""
        held = {peer: party.round for peer, party in present.items() if party.held}
        if self._are_enough(held):
            round_ = self._terms.round_after(1 + max(self._terms.round, *held.values()))
            self._outcome = Done(round_, tuple(sorted([*held, self._terms.mine.owner])))
        self._host.decide(self._terms.meeting, self._outcome)
        self._decided.set()
        for party in self._parties.values():
            party.holding.cancel()
            if not party.accepted or party.contribution is None:
                party.talk.cancel()

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        latest = anyio.current_time() + self._terms.exchange_seconds
        while not is_reached():
            left = latest - anyio.current_time()
            if left <= 0:
                self._host.saw_miss()
                return
            await self._signal.wait(left)

    async def _talk(self, peer: PeerID, party: _Party) -> None:
        """All that is said with one invited peer."""
        try:
            with party.talk:
                async with self._host.open_meeting_channel(peer) as channel:
                    party.channel = channel
                    await self._converse(peer, party, channel)
        except PeerUnreachable as error:
            log.debug("cannot invite %s: %s", peer, error)
        finally:
            party.gone = True
            self._signal.notify()

    async def _converse(self, peer: PeerID, party: _Party, channel: Channel) -> None:
        if not await self._wait_accepted(party, channel):
            return
        channel.send(Payload(self._terms.mine.encoded))
        message = await channel.receive(2 * self._terms.exchange_seconds)
        if isinstance(message, Payload):
            party.contribution = self._terms.judge(message.encoded, self._terms.meeting, peer)
        self._signal.notify()
        if party.contribution is None:
            channel.send(Abort())
            return
        with party.holding:
            party.held = isinstance(await channel.receive(None), Held)
            self._signal.notify()
            if not party.held:
                return
            await self._decided.wait()
        named = self._outcome is not None and peer in self._outcome.members
        channel.send(self._outcome if self._outcome is not None and named else Abort())

    async def _wait_accepted(self, party: _Party, channel: Channel) -> bool:
        channel.send(self._invite)
        message = await channel.receive(None)  # The meeting's own deadline ends it.
        if message is not None:
            self.was_answered = True
            self._host.saw_answer(anyio.current_time() - party.asked_at)
        if isinstance(message, Later):
            party.trains = True
            self._signal.notify()
            message = await channel.receive(None)
        if not isinstance(message, Accept):
            return False
        if self._is_closed or len(self._accepted()) >= self._terms.group_size - 1 or not self._host.claim(self):
            channel.send(Abort())
            return False
        party.accepted, party.round = True, message.round
        if self.begun_at is None:
            self.begun_at = anyio.current_time()
        self._signal.notify()
        return True
