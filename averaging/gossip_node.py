"""Meets others for one peer: answers invitations, invites, and waits no longer than a meeting is worth.

A peer is *ready* from `meet` until it returns. Ready peers find each other in two stages. First the group that
`gossip.groups_of` gives: its first member invites the others, who may still be training and then come later. Each
waits for that as long as half of its own training. Then whoever is left meets anybody: it accepts any invitation that
it has kept, and invites others in an order drawn for the round. In the end it steps alone.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import final

import anyio
from anyio.abc import ByteStream

from averaging.gossip import GossipConfig, GossipTiming, candidates, group_of, is_prior
from averaging.gossip_channel import Channel, open_channel
from averaging.gossip_meeting import Broken, InDoubt, Invitations, Met, Organised, Signal, Terms, met_by, take_part
from averaging.gossip_messages import Abort, Ask, Done, GossipMessage, Invite, Later, Refuse
from averaging.gossip_voice import Said, Voice
from averaging.record import Hash
from network.identity import Signer
from network.seam import Network, PeerID, PeerUnreachable

PROTOCOL = "/peer/gossip/1"
PARTNERS_KEPT = 16


@final
@dataclass(slots=True)
class _Ready:
    """One call of `meet`."""

    said: Said
    group: tuple[PeerID, ...]
    takes_anybody: bool = False
    claimed_by: object | None = None
    """The meeting that this peer is in; it may be in one at a time."""
    organised: Organised | None = None
    met: Met | None = None
    failures: int = 0
    avoided: set[PeerID] = field(default_factory=set)
    """Their meetings with this peer broke in this round."""


@final
@dataclass(slots=True)
class _Kept:
    """An invitation that waits for this peer."""

    invite: Invite
    chosen_by: _Ready | None = None
    chosen: anyio.Event = field(default_factory=anyio.Event)


@final
class GossipNode:
    """`run` serves; `meet` is called for one round after the other."""

    def __init__(
        self,
        network: Network,
        signer: Signer,
        config: GossipConfig,
        rng: random.Random,
        *,
        run_id: str,
        members: Callable[[], Sequence[PeerID]],
        check: Callable[[bytes], None],
        outcomes: Mapping[Hash, Done] | None = None,
    ) -> None:
        """`members` gives those who take part just now; `outcomes` are those of meetings in the restored replica."""
        self.timing = GossipTiming()
        self.bytes_sent = 0
        self.packet_bytes_sent = 0
        self.outcomes: OrderedDict[Hash, Done | None] = OrderedDict(outcomes or {})
        """Of meetings that this peer organised, oldest first."""
        self._voice = Voice(signer, config, rng, run_id=run_id, check=check)
        self._network = network
        self._config = config
        self._rng = rng
        self._run_id = run_id
        self._members = members
        self._protocol = f"{PROTOCOL}/{run_id[:16]}"
        self._kept: dict[PeerID, _Kept] = {}
        self._ready: _Ready | None = None
        self._signal = Signal()
        self._latest = math.inf
        self._partners: deque[PeerID] = deque(maxlen=PARTNERS_KEPT)
        self._undecided: set[Hash] = set()
        self._passed: dict[PeerID, int] = {}
        """Rounds in which those invited this peer, and did not wait for it."""
        self._is_over = False

    @property
    def linked(self) -> list[PeerID]:
        """Those met lately."""
        return sorted(set(self._partners))

    @property
    def refusals(self) -> list[tuple[PeerID | None, str]]:
        """Contributions that were no good, and why: the newest."""
        return list(self._voice.refusals)

    async def run(self) -> None:
        """Answers invitations until cancelled."""
        await self._network.serve(self._protocol, self._serve)
        await anyio.sleep_forever()

    def hurry(self, seconds: float) -> None:
        """From now on `meet` looks for others so long at most: the peer wants to leave."""
        self._latest = anyio.current_time() + seconds
        self._signal.notify()

    def rest(self) -> None:
        """This peer will not meet again: it refuses what it is invited to, and still tells outcomes."""
        self._is_over = True
        for kept in self._kept.values():
            kept.chosen.set()

    async def meet(self, said: Said, trained_seconds: float) -> Met:
        """Meets a few others and returns what all of them said, this peer included; alone if there is nobody (with
        `min_peers` above 1 it goes on looking instead).

        `said.weight` in tokens, `said.base` the fingerprint of the replica, `said.round` the rounds that it has behind
        it, `trained_seconds` how long its inner steps took. Takes a few times `GossipTiming.patience` at most, and
        `exchange_seconds` for each step of a meeting.
        """
        config = self._config
        self.timing = self.timing.has_trained(trained_seconds)
        group = group_of(self._network.peer_id, self._members(), said.round, self._run_id, config.group_size)
        self._ready = ready = _Ready(said, group)
        try:
            while True:
                ready.failures, ready.avoided = 0, set()
                met = await self._seek(ready)
                if met is not None:
                    self._partners += [c.owner for c in met.contributions if c.owner != self._network.peer_id]
                    return met
                if config.min_peers <= 1 or self._is_late():
                    mine = self._voice.sign(said, self._voice.draw_invite(said, 0.0), self._network.peer_id)
                    return Met(mine.prev, said.round + 1, (mine,))
        finally:
            self._ready = None

    # Looking for others.

    async def _seek(self, ready: _Ready) -> Met | None:
        """Both stages once; a meeting that breaks leads to the second, with new patience."""
        me, config = self._network.peer_id, self._config
        is_passed = self._passed.get(ready.group[0]) == ready.said.round
        if len(ready.group) > 1 and not ready.takes_anybody and not is_passed:
            is_organiser = ready.group[0] == me
            invited = ready.group[1:] if is_organiser else ()
            await self._stage(ready, invited, iter(()), grace=None)
        while ready.met is None and ready.failures <= config.failures_max and not self._is_late():
            ready.takes_anybody = True
            failures = ready.failures
            if failures:
                # Those whose meeting broke at the same moment must not all do the same again.
                await self._signal.wait(self._rng.random() * self.timing.patience(config) / 4)
            order, count = self._others(ready), config.invited_at_once
            grace = 2 * self.timing.answers.mean if config.group_size > 2 else 0.0
            await self._stage(ready, order[:count], iter(order[count:]), grace=grace)
            if ready.failures == failures:
                break
        return ready.met

    def _others(self, ready: _Ready) -> list[PeerID]:
        """Whom to invite besides the group. Those met lately come last: peers that were free at the same time once are
        so again, and would meet nobody else.
        """
        members = [peer for peer in self._members() if peer not in ready.avoided]
        lately = set(list(self._partners)[-(len(members) // 2) :]) if len(members) > 1 else set()
        order: list[PeerID] = []
        for part in ([p for p in members if p not in lately], [p for p in members if p in lately]):
            count = self._config.invitations_max - len(order)
            order += candidates(self._network.peer_id, part, ready.said.round, self._run_id, count)
        return order

    async def _stage(
        self, ready: _Ready, invited: Sequence[PeerID], spare: Iterable[PeerID], *, grace: float | None
    ) -> None:
        """Until this peer has met, a meeting has broken, or its patience is over."""
        until, failures = anyio.current_time() + self.timing.patience(self._config), ready.failures
        spare = iter(spare)
        self._choose_kept()
        while ready.met is None and ready.failures == failures:
            now = anyio.current_time()
            if ready.claimed_by is not None:
                await self._signal.wait()  # The meeting has its own deadlines.
            elif now >= min(until, self._latest):
                return
            elif invited:
                await self._organise(ready, Invitations(invited, spare, min(until, self._latest), grace))
                if ready.claimed_by is None:  # Else this peer was invited meanwhile; it invites again if that breaks.
                    invited = ()
            else:
                await self._signal.wait(min(until, self._latest) - now)

    async def _organise(self, ready: _Ready, invitations: Invitations) -> None:
        invite = self._voice.draw_invite(ready.said, invitations.until - anyio.current_time())
        organised = Organised(self, self._terms(ready, invite, self._network.peer_id), invite, self._signal)
        meeting = organised.meeting
        ready.organised = organised
        self._undecided.add(meeting)
        begun = anyio.current_time()
        try:
            met = await organised.run(invitations)
        finally:
            self._undecided.discard(meeting)
            ready.organised = None
            if ready.claimed_by is organised:
                ready.claimed_by = None
        if met is not None:
            ready.met = met
            self._met(begun if organised.begun_at is None else organised.begun_at)
        elif organised.begun_at is not None:
            ready.failures += 1
            ready.avoided |= organised.invited
        elif not organised.was_answered and not self.is_claimed_elsewhere(organised):
            self.saw_miss()
        if not self.is_claimed_elsewhere(organised):
            self._choose_kept()

    def _met(self, begun: float) -> None:
        self.timing = self.timing.exchanged(anyio.current_time() - begun)

    def _is_late(self) -> bool:
        return anyio.current_time() >= self._latest

    def _terms(self, ready: _Ready, invite: Invite, organiser: PeerID) -> Terms:
        return self._voice.terms(ready.said, invite, organiser, self.timing)

    # What a meeting that this peer organises needs of it (`gossip_meeting.Host`).

    @asynccontextmanager
    async def open_meeting_channel(self, peer: PeerID) -> AsyncIterator[Channel]:
        async with self._open(await self._network.open_stream(peer, self._protocol)) as channel:
            yield channel

    def claim(self, organised: object) -> bool:
        ready = self._ready
        if ready is None or ready.met is not None or ready.claimed_by not in (None, organised):
            return False
        ready.claimed_by = organised
        return True

    def is_claimed_elsewhere(self, organised: object) -> bool:
        return self._ready is None or self._ready.claimed_by not in (None, organised)

    def saw_answer(self, seconds: float) -> None:
        self.timing = self.timing.answered(seconds)

    def saw_miss(self) -> None:
        self.timing = self.timing.missed()

    def decide(self, meeting: Hash, outcome: Done | None) -> None:
        self.outcomes[meeting] = outcome
        while len(self.outcomes) > self._config.outcomes_max:
            self.outcomes.popitem(last=False)

    # Being invited and asked.

    def _open(self, stream: ByteStream) -> AbstractAsyncContextManager[Channel]:
        return open_channel(stream, self._voice.frame_bytes_max, self._config.seconds_max, self._count)

    def _count(self, size: int, is_payload: bool) -> None:
        self.bytes_sent += size
        self.packet_bytes_sent += size if is_payload else 0

    async def _serve(self, peer: PeerID, stream: ByteStream) -> None:
        async with self._open(stream) as channel:
            message = await channel.receive(self._config.seconds_max)
            if isinstance(message, Ask):
                channel.send(self._outcome_of(message.meeting, peer))
            elif isinstance(message, Invite):
                if self._is_over or len(self._kept) >= self._config.kept_max or peer in self._kept:
                    channel.send(Refuse())
                else:
                    await self._be_invited(peer, message, channel)

    def _outcome_of(self, meeting: Hash, peer: PeerID) -> GossipMessage:
        outcome = self.outcomes.get(meeting)
        if outcome is not None and peer in outcome.members:
            return outcome
        return Later() if meeting in self._undecided else Abort()

    async def _be_invited(self, peer: PeerID, invite: Invite, channel: Channel) -> None:
        self._kept[peer] = kept = _Kept(invite)
        try:
            self._choose_kept()
            if not kept.chosen.is_set():
                channel.send(Later())
                await _wait_chosen(kept, channel)
        finally:
            del self._kept[peer]
        ready = kept.chosen_by
        if ready is None or ready is not self._ready or ready.claimed_by is not kept:
            self._passed[peer] = invite.round
            while len(self._passed) > self._config.outcomes_max:
                del self._passed[next(iter(self._passed))]
            return  # Withdrawn, or this peer is no longer there.
        try:
            await self._be_member(peer, invite, channel, ready)
        finally:
            ready.claimed_by = None
            self._choose_kept()
            self._signal.notify()

    async def _be_member(self, peer: PeerID, invite: Invite, channel: Channel, ready: _Ready) -> None:
        begun, terms = anyio.current_time(), self._terms(ready, invite, peer)
        result = await take_part(channel, terms, peer, invite)
        if isinstance(result, Broken) and not result.had_begun:
            ready.avoided.add(peer)  # It has found others. Nothing is lost.
            return
        ready.met = result if isinstance(result, Met) else None
        if isinstance(result, InDoubt):
            ready.met = await self._resolve(peer, terms, result)
        elif isinstance(result, Broken) and result.was_late:
            self.saw_miss()
        if ready.met is None:
            ready.failures += 1
            ready.avoided.add(peer)
        elif self._config.group_size == 2:  # In larger groups others may have kept the organiser waiting.
            self._met(begun)

    async def _resolve(self, peer: PeerID, terms: Terms, doubt: InDoubt) -> Met | None:
        """Asks the organiser what became of the meeting, as long as it may take it to come back."""
        with anyio.move_on_after(terms.exchange_seconds):
            while True:
                answer = await self._ask(peer, terms.mine.prev)
                if isinstance(answer, Done):
                    return met_by(answer, terms, peer, doubt.held)
                if isinstance(answer, Abort):
                    return None
                await anyio.sleep(max(self._config.seconds_min, self.timing.answers.mean))
        self.saw_miss()
        return None

    async def _ask(self, peer: PeerID, meeting: Hash) -> GossipMessage | None:
        try:
            async with self.open_meeting_channel(peer) as channel:
                channel.send(Ask(meeting))
                return await channel.receive(self.timing.exchange_seconds(self._config))
        except PeerUnreachable:
            return None

    def _choose_kept(self) -> None:
        """If this peer is free, the best of the invitations that it may accept now is accepted."""
        ready = self._ready
        if ready is None or ready.claimed_by is not None or ready.met is not None:
            return
        me = self._network.peer_id
        invited = ready.organised.invited if ready.organised is not None else set()
        fitting = [
            peer
            for peer, kept in self._kept.items()
            if not kept.chosen.is_set()
            and (ready.takes_anybody or peer in ready.group)
            and peer not in ready.avoided
            # It will accept mine.
            and not (peer in invited and is_prior(me, peer, self._run_id))
        ]
        if not fitting:
            return
        best = (
            ready.group[0]
            if ready.group[0] in fitting
            else candidates(me, fitting, ready.said.round, self._run_id, 1)[0]
        )
        kept = self._kept[best]
        kept.chosen_by, ready.claimed_by = ready, kept
        kept.chosen.set()
        self._signal.notify()


async def _wait_chosen(kept: _Kept, channel: Channel) -> None:
    """Until the invitation is chosen or its stream ends: who invites says nothing in between."""
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            await channel.receive(None)
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        await kept.chosen.wait()
        tasks.cancel_scope.cancel()
