"""Taking part in a run, as the others see it: a heartbeat that says where I am and learns who else is there."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import final

import anyio

from dht.directory import Directory
from dht.facts import MemberFact, RunFact, SpecFact, members_key, runs_key, spec_key
from dht.record import InvalidRecord, expiry, just_after, open_record, seal
from network.identity import Signer
from network.seam import PeerID

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MembershipConfig:
    """How often a peer speaks, and for how long it is believed."""

    heartbeat_seconds: float = 30.0
    fact_seconds: float = 1.0
    """For each member a heartbeat takes so long at least: else what a look brings would grow with the swarm."""
    jitter: float = 0.2
    """Heartbeats come up to this fraction earlier: else the peers of a restarted swarm would speak at once for ever."""
    announce_seconds_min: float = 2.0
    """`announce_now` makes no heartbeat come sooner than this after the last one."""
    member_seconds: float = 105.0
    """A silent member is forgotten after this: three missed heartbeats and a slow one; later where these are longer."""
    run_seconds: float = 1800.0
    """The life of the run and spec facts, renewed at half of it."""
    announcers: int = 8
    """So many members announce the run and hold its specification: more would only fill the key."""
    members_max: int = 4096
    leave_seconds_max: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter {self.jitter} is not in 0..1")
        if not 0 < self.announce_seconds_min <= self.heartbeat_seconds < self.member_seconds:
            raise ValueError(
                "announce_seconds_min, heartbeat_seconds and member_seconds must ascend:"
                f" {self.announce_seconds_min}, {self.heartbeat_seconds}, {self.member_seconds}"
            )
        if self.announcers < 1:
            raise ValueError(f"announcers is {self.announcers}; a run that nobody announces cannot be found")


@dataclass(frozen=True, slots=True)
class Announcement:
    """The run that this peer takes part in, and what it says of itself, asked anew at each heartbeat."""

    run: RunFact
    spec: SpecFact
    member: Callable[[], MemberFact]

    def __post_init__(self) -> None:
        assert self.run.run_id == self.spec.run_id


@dataclass(frozen=True, slots=True)
class _Known:
    fact: MemberFact
    expires: float


@asynccontextmanager
async def open_membership(
    directory: Directory,
    signer: Signer,
    announcement: Announcement,
    *,
    wall_time: Callable[[], float],
    rng: random.Random,
    config: MembershipConfig | None = None,
    on_member: Callable[[PeerID, MemberFact], None] = lambda peer, fact: None,
) -> AsyncIterator[Membership]:
    """Take part: the first heartbeat comes at once, the last word on leaving the context, within its limit.

    `on_member` is called for every new member and whenever one has restarted or moved.
    """
    membership = Membership(
        directory, signer, announcement, wall_time, rng, config=config or MembershipConfig(), on_member=on_member
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(membership._beat_for_ever)
        try:
            yield membership
        finally:
            tasks.cancel_scope.cancel()
            await membership._leave()


@final
class Membership:
    """Made by `open_membership`."""

    def __init__(
        self,
        directory: Directory,
        signer: Signer,
        announcement: Announcement,
        wall_time: Callable[[], float],
        rng: random.Random,
        *,
        config: MembershipConfig,
        on_member: Callable[[PeerID, MemberFact], None],
    ) -> None:
        self._directory = directory
        self._signer = signer
        self._announcement = announcement
        self._wall_time = wall_time
        self._rng = rng
        self._config = config
        self._on_member = on_member
        self._known: dict[PeerID, _Known] = {}
        self._wake = anyio.Event()
        self._changed = anyio.Event()
        self._spoken_until = 0.0
        self._latest_expires = 0.0
        self._renew_at = 0.0
        self.has_twin = False
        """Another process speaks under our peer id: two peers with one key ruin each other."""
        self.num_heartbeats = 0
        self.num_refused = 0
        """Records that were not to be believed."""

    @property
    def members(self) -> dict[PeerID, MemberFact]:
        """The others who take part, in peer-id order, as of the last heartbeat, less those whose word has expired."""
        now = self._wall_time()
        known = sorted(self._known.items())
        return {peer: one.fact for peer, one in known if one.expires >= now and not one.fact.left}

    @property
    def _pause(self) -> float:
        """Between two heartbeats; short enough for the facts that outlive a member to be renewed in time."""
        config = self._config
        return max(config.heartbeat_seconds, min(config.fact_seconds * len(self._known), config.run_seconds / 4))

    @property
    def _member_seconds(self) -> float:
        return self._config.member_seconds * self._pause / self._config.heartbeat_seconds

    def announce_now(self) -> None:
        """Have the next heartbeat soon, because something worth telling happened."""
        self._wake.set()

    async def wait_changed(self) -> None:
        """Until a heartbeat finds other members, or other words of theirs, than the one before."""
        await self._changed.wait()

    async def _beat_for_ever(self) -> None:
        while True:
            await self._beat()
            await anyio.sleep(self._config.announce_seconds_min)
            pause = self._pause * (1 - self._config.jitter * self._rng.random())
            with anyio.move_on_after(max(0.0, pause - self._config.announce_seconds_min)):
                await self._wake.wait()
            self._wake = anyio.Event()

    async def _beat(self) -> None:
        fact = self._announcement.member()
        # Look before speaking: a twin's word is seen only as long as ours has not replaced it.
        await self._look(fact.nonce)
        await self._speak(fact, expiry(self._wall_time(), self._member_seconds))
        if self._wall_time() >= self._renew_at:
            await self._renew()
        self.num_heartbeats += 1

    async def _look(self, nonce: int) -> None:
        key = members_key(self._announcement.run.run_id)
        found: dict[PeerID, _Known] = {}
        for subkey, (value, expires) in sorted((await self._directory.get(key)).items()):
            try:
                payload = open_record(key, subkey, value, expires, now=self._wall_time(), verify=self._signer.verify)
                found[PeerID(subkey)] = _Known(MemberFact.decode(payload), expires)
            except InvalidRecord as error:
                self.num_refused += 1
                logger.debug("a member fact of %s is refused: %s", subkey, error)
        mine = found.pop(self._signer.peer_id, None)
        if mine is not None:
            self._look_for_twin(mine, nonce)
            self._latest_expires = max(self._latest_expires, mine.expires)
        self._learn(found)

    def _look_for_twin(self, mine: _Known, nonce: int) -> None:
        # Before our first word, a fact of ours is that of the process before us.
        is_newer = 0.0 < self._spoken_until < mine.expires
        if is_newer and mine.fact.nonce != nonce and not self.has_twin:
            self.has_twin = True
            logger.error("another process takes part under our peer id %s", self._signer.peer_id)

    def _learn(self, found: Mapping[PeerID, _Known]) -> None:
        """An answer may lack some who are there, so those we know stay until their word expires."""
        now = self._wall_time()
        known = {peer: old for peer, old in self._known.items() if old.expires >= now}
        new = {peer: one for peer, one in found.items() if peer not in known or one.expires > known[peer].expires}
        merged = {**known, **new}
        for peer in list(merged)[self._config.members_max :]:
            del merged[peer]
        before, self._known = self._known, merged
        for peer, one in new.items():
            old = before.get(peer)
            if peer in merged and not one.fact.left and (old is None or _is_elsewhere(old.fact, one.fact)):
                self._on_member(peer, one.fact)
        if {peer: one.fact for peer, one in merged.items()} != {peer: one.fact for peer, one in before.items()}:
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    async def _speak(self, fact: MemberFact, expires: float) -> None:
        # Where the clock was set back, only a later expiry than the last one replaces it. Noted before the call:
        # a store that is cancelled may still arrive, and the last word must replace that one too.
        self._latest_expires = max(expires, just_after(self._latest_expires))
        expires = self._latest_expires
        if await self._store(members_key(self._announcement.run.run_id), fact.encode(), expires):
            self._spoken_until = expires
        else:
            logger.info("no peer keeps our member fact; the next heartbeat tries again")

    async def _renew(self) -> None:
        """The facts that outlive their first announcer; who else announces them is looked up with the same rhythm."""
        now, run = self._wall_time(), self._announcement.run
        fresh = now + self._config.run_seconds / 2
        records = await self._directory.get(runs_key())
        others = 0
        for subkey, (value, expires) in records.items():
            if subkey != self._signer.peer_id and expires > fresh and self._is_ours(subkey, value, expires):
                others += 1
        kept = True
        if others < self._config.announcers:
            expires = expiry(now, self._config.run_seconds)
            # The specification first: who finds the run can then read it.
            kept = await self._store(spec_key(run.run_id), self._announcement.spec.encode(), expires)
            kept = await self._store(runs_key(), run.encode(), expires) and kept
        # Earlier by chance, so that announcers whose turn came together do not renew together for ever.
        if kept:
            self._renew_at = now + self._config.run_seconds / 2 * (1 - self._config.jitter * self._rng.random())

    def _is_ours(self, subkey: str, value: bytes, expires: float) -> bool:
        try:
            payload = open_record(runs_key(), subkey, value, expires, now=self._wall_time(), verify=self._signer.verify)
            fact = RunFact.decode(payload)
        except InvalidRecord:
            return False
        return fact.run_id == self._announcement.run.run_id

    async def _leave(self) -> None:
        """The last word replaces the one before it and expires with it."""
        if self._latest_expires == 0.0:
            return
        with anyio.move_on_after(self._config.leave_seconds_max, shield=True):
            await self._speak(replace(self._announcement.member(), left=True), just_after(self._latest_expires))

    async def _store(self, key: str, payload: bytes, expires: float) -> bool:
        me = self._signer.peer_id
        return await self._directory.store(key, me, seal(self._signer, key, me, payload, expires), expires)


def _is_elsewhere(old: MemberFact, new: MemberFact) -> bool:
    return old.left or old.nonce != new.nonce or old.addresses != new.addresses
