"""Runs the round protocol for one peer: engine, links and storage, in one task that decides.

Everything that happens goes through one queue; what was decided is made durable before anybody hears of it.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import anyio

from averaging import journal
from averaging.alarm import Alarm
from averaging.chain import Chain
from averaging.config import EngineConfig
from averaging.contribution import Contribution
from averaging.engine import Engine
from averaging.following import Moved
from averaging.links import Links, LinksConfig
from averaging.messages import LOG_BYTES_MAX, Message, Offer, Share, encode_message, parse_message
from averaging.outbox import Actions, Commit, Fork, Reduction
from averaging.owners import parse_parts
from averaging.record import Hash, Malformed, Record, sha256
from averaging.rounds import RECENT_ROUNDS
from averaging.storage import Storage
from network.identity import Signer
from network.seam import Network, PeerID

log = logging.getLogger(__name__)

PROTOCOL = "/peer/round/1"
HEAD_FILE = "head"
"""The file of a snapshot that names the record after which it was taken."""
BRIDGE_FILE = "bridge"
"""The file of a snapshot on a chain that the log did not have when it was taken: what leads there."""
SPARE_LINKS = 4
"""Where owners reduce, to so many whom the log does not name."""
_FRAME_OVERHEAD_BYTES = 2 * LOG_BYTES_MAX


@final
@dataclass(frozen=True, slots=True)
class NodeConfig:
    """Limits of the shell around the engine."""

    engine: EngineConfig
    inbox_messages_max: int = 4096
    """More unread messages than this are dropped: the protocol survives losses."""
    commits_waiting_max: int = 4096
    lazy_seconds_max: float = 1.0
    """What need not be durable at once is so after this time: a peer that only follows keeps what it followed."""


@final
class Node:
    """`offer`, `wait_news`, `take_commits` and `anchored` are what the training loop needs."""

    def __init__(
        self,
        network: Network,
        signer: Signer,
        storage: Storage,
        restored: journal.Restored,
        config: NodeConfig,
        rng: random.Random,
        *,
        run_id: str,
        nonce: int,
        check: Callable[[bytes], None],
    ) -> None:
        now = anyio.current_time()
        self.engine = Engine(signer, config.engine, restored, check=check, nonce=nonce, now=now)
        self.packet_bytes_sent = 0
        self.num_steps = 0
        """How often it woke."""
        self.refusals: deque[tuple[PeerID, str]] = deque(maxlen=100)
        self._config = config
        self._storage = storage
        self._inbox: deque[Callable[[float], None]] = deque()
        self._wake = anyio.Event()
        self._alarm = Alarm(self._rouse)
        self._news = anyio.Event()
        self._commits: deque[Commit | Fork] = deque()
        self._reductions: list[Reduction] = []
        self._wants_snapshot = False
        self._diverged = False
        self._journal: list[bytes] = []
        self._log: list[bytes] = []
        self._has_forked = False
        """The log may be written again only after the state of the other chain: together they are one change."""
        self._bridge_from: int | None = None
        """After this round the log on disk may lack what leads to the next snapshot."""
        self._writing = anyio.Lock()
        self._flushed_at = now
        self._named_at: Hash | None = None
        self._recently_named: frozenset[PeerID] = frozenset()
        self.links = Links(
            network,
            f"{PROTOCOL}/{run_id[:16]}",
            LinksConfig(
                frame_bytes_max=config.engine.payload_bytes_max + _FRAME_OVERHEAD_BYTES,
                links_max=2 * config.engine.max_peers,
            ),
            rng,
            on_message=self._on_message,
            on_up=lambda peer: self._put(lambda now: self.engine.connected(peer, now)),
            on_down=lambda peer: self._put(lambda now: self.engine.disconnected(peer)),
            is_needed=self._is_needed,
        )

    async def run(self) -> None:
        """Takes part until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._alarm.run)
            tasks.start_soon(self.links.run)
            while True:
                await self._step()

    # For the training loop.

    @property
    def head(self) -> Record:
        return self.engine.head

    @property
    def knows_heads(self) -> bool:
        """Whether there are links, and all at their other ends have said where they stand."""
        links = self.engine.links.values()
        return bool(links) and all(link.head is not None for link in links)

    @property
    def is_behind(self) -> bool:
        """Whether others are known to have committed rounds that this peer has not."""
        return self.engine.is_behind(anyio.current_time())

    @property
    def is_following(self) -> bool:
        """Whether verified rounds are about to be committed here."""
        return self.engine.is_following(anyio.current_time())

    async def offer(self, payload: bytes, weight: int, willing: bool) -> Contribution | None:
        """R1, on the head; None if the state after the head is not anchored yet (rounds came in between)."""
        if self.engine.instance.base is None:
            return None
        contribution = self.engine.offer(payload, weight, willing, anyio.current_time())
        self._wake.set()
        return contribution

    def meet(self, peer: PeerID) -> None:
        """Someone who takes part: a link to it is kept up. Where owners reduce only to those whom the log names, and a
        few more: nobody could keep one to all of a large group.
        """
        if self._is_needed(peer) or len(set(self.links.known) - self._named()) < SPARE_LINKS:
            self.links.know(peer)

    def _is_needed(self, peer: PeerID) -> bool:
        """Whether a link is kept up whatever others there are."""
        named = self._named()
        return not self._config.engine.parts or peer in named or self.engine.me in named

    def _named(self) -> frozenset[PeerID]:
        """By the last rounds."""
        if self._named_at != self.head.hash:
            records = self.engine.chain.records[-RECENT_ROUNDS:]
            self._named_at, self._recently_named = self.head.hash, frozenset().union(*(r.peers for r in records))
        return self._recently_named

    def _close_spare_links(self) -> None:
        """Whom the log named links with everybody; when it does so no more, most of these links are of no use."""
        if self._is_needed(self.engine.me) or self.engine.is_behind(anyio.current_time()):
            return  # Who is behind does not know whom the newest records name.
        spare = sorted(set(self.links.known) - self._named(), key=lambda peer: sha256(_pair(self.engine.me, peer)))
        for peer in spare[2 * SPARE_LINKS :]:
            self.links.close(peer)

    def share(self, payload: bytes, weight: int, willing: bool) -> bool:
        """As `offer`, where owners reduce; `payload` holds all parts."""
        if self.engine.instance.base is None:
            return False
        packets = parse_parts(payload)
        self.engine.share([packets[part] for part in sorted(packets)], weight, willing, anyio.current_time())
        self._wake.set()
        return True

    def take_reductions(self) -> list[Reduction]:
        """What this peer is to merge and to offer, as an owner of parts."""
        taken, self._reductions = self._reductions, []
        return taken

    def anchored(self, head: Hash, base: bytes) -> None:
        """The state after `head` has the fingerprint `base`; from now on `offer` works, if nothing followed `head`."""
        self.engine.anchored(head, base, anyio.current_time())
        self._wake.set()

    def leave(self) -> None:
        self._put(self.engine.leave)

    def adopt(self, head: Hash) -> Moved | None:
        """The state at `head` was fetched as a snapshot: how that moved the log; None if nothing attests that state."""
        moved = self.engine.adopt(head, anyio.current_time())
        if moved is not None:
            self._has_forked |= bool(moved.left)
            first = moved.joined[0].round if moved.joined else self.record_of(head).round + 1
            self._bridge(first - 1)
        self._wake.set()
        return moved

    def record_of(self, head: Hash) -> Record:
        return self.engine.chain.records[self.engine.chain.round_of(head)]

    def child_of(self, head: Hash) -> Record | None:
        """The record that attests the state at `head`, where this peer could go on from it."""
        return self.engine.catch_up.child_of(head, self.engine.chain)

    def records_between(self, after: Hash, until: Hash) -> list[Record]:
        """The log after the record `after`, up to and with `until`."""
        chain = self.engine.chain
        return chain.records[chain.round_of(after) + 1 : chain.round_of(until) + 1]

    def commits_between(self, after: Hash, until: Hash) -> list[Commit] | None:
        """The rounds after `after`, up to and with `until`; None if the contributions of some are no longer here."""
        return commits_of(self.engine.chain, self.records_between(after, until))

    def may_go(self, goal: int | None) -> bool:
        """Whether all others are leaving too, or, before the goal, can go on without this peer."""
        links = self.engine.links.values()
        if all(link.leaving for link in links):
            return True
        at_goal = goal is not None and self.head.round >= goal
        return not at_goal and self.engine.me not in self.head.voters

    def snapshot_failed(self) -> None:
        """No donor had a snapshot that could be taken."""
        self._put(self.engine.snapshot_failed)

    def forget_before(self, number: int) -> None:
        """A snapshot that others can take stands in for the contributions of the rounds before `number`."""
        self.engine.chain.forget_before(number)

    async def wait_news(self) -> None:
        """Returns when there are commits to take, shares to merge, or a snapshot is wanted; at once if so already."""
        while not (self._commits or self._wants_snapshot or self._diverged or self._reductions):
            self._news = anyio.Event()
            await self._news.wait()

    def take_commits(self) -> list[Commit | Fork]:
        """The committed rounds since the last call, oldest first; a `Fork` where the chain was left for another."""
        commits = list(self._commits)
        self._commits.clear()
        return commits

    def take_wants_snapshot(self) -> bool:
        wanted, self._wants_snapshot = self._wants_snapshot, False
        return wanted and self.engine.catch_up.wants_snapshot(self.engine.chain)

    def take_diverged(self) -> bool:
        diverged, self._diverged = self._diverged, False
        return diverged

    async def save_snapshot(self, record: Record, files: dict[str, bytes]) -> None:
        """Makes the state after `record` durable, and begins the journal anew. Does nothing if the log has left
        `record` in between: what follows the `Fork` will be saved.
        """
        async with self._writing:
            await self._flush()
            if record.hash not in self.engine.chain:
                return
            files = {**files, HEAD_FILE: record.hash}
            if self._bridge_from is not None:
                files[BRIDGE_FILE] = journal.encode_bridge(self.engine.chain, self._bridge_from)
            # Before anything is awaited: the log may fork again while this is written.
            self._has_forked, self._bridge_from = False, None
            await self._storage.save_snapshot(files, self.engine.rounds.journal())
            await self._flush()

    # The one task that decides.

    def _put(self, event: Callable[[float], None]) -> None:
        self._inbox.append(event)
        self._wake.set()

    def _on_message(self, peer: PeerID, frame: bytes) -> None:
        if len(self._inbox) >= self._config.inbox_messages_max:
            log.warning("inbox full: a message of %s was dropped", peer)
            return
        try:
            message = parse_message(frame)
        except Malformed as error:
            self._refuse(peer, str(error))
            return
        if self._inbox or not self.engine.is_old_news(peer, message, anyio.current_time()):
            self._put(lambda now: self.engine.receive(peer, message, now))

    async def _step(self) -> None:
        if not self._inbox:
            self._alarm.set(self.engine.next_wake(anyio.current_time()))
            await self._wake.wait()
        self.num_steps += 1
        # Only now: what the training loop did while the last step was being written is to be performed at once.
        self._wake = anyio.Event()
        now = anyio.current_time()
        while self._inbox:
            self._inbox.popleft()(now)
        if self.engine.next_wake(now) <= now:
            self.engine.tick(now)
        await self._perform(self.engine.drain())

    def _rouse(self) -> None:
        self._wake.set()

    async def _perform(self, actions: Actions) -> None:
        for fork in (c for c in actions.commits if isinstance(c, Fork)):
            self._has_forked = True
            self._bridge(fork.ancestor.round)
        # Whoever writes first writes all of it: a record must not reach the disk before its contributions.
        self._journal += [*actions.lazy, *actions.entries]
        self._log += actions.log
        if actions.entries:
            async with self._writing:
                await self._flush()
        self._send(actions.sends)
        for refusal in actions.refusals:
            self._refuse(refusal.peer, refusal.reason)
        if actions.commits:
            self._commits += actions.commits
            for peer in sorted(self.head.peers):
                self.meet(peer)  # The log itself names whom to talk to.
            self._close_spare_links()
            assert len(self._commits) <= self._config.commits_waiting_max
        self._reductions += actions.reductions
        self._wants_snapshot |= actions.wants_snapshot
        self._diverged |= actions.diverged
        if self._commits or self._wants_snapshot or self._diverged or self._reductions:
            self._news.set()

    async def _flush(self) -> None:
        entries, committed = self._journal, ([] if self._has_forked else self._log)
        self._journal, self._log = [], (self._log if self._has_forked else [])
        if entries or committed:
            await self._storage.append(entries, committed)

    def _bridge(self, number: int) -> None:
        self._bridge_from = number if self._bridge_from is None else min(number, self._bridge_from)

    def _send(self, sends: list[tuple[PeerID, Message]]) -> None:
        encoded: dict[int, bytes] = {}
        for peer, message in sends:
            frame = encoded.get(id(message))
            if frame is None:
                frame = encoded[id(message)] = encode_message(message)
            if isinstance(message, (Offer, Share)):
                self.packet_bytes_sent += len(frame)
            self.links.send(peer, frame)

    def _refuse(self, peer: PeerID, reason: str) -> None:
        self.refusals.append((peer, reason))
        log.warning("refused what %s sent: %s", peer, reason)


def _pair(one: PeerID, other: PeerID) -> bytes:
    """The same for both, so that both think the same link more useful than another."""
    return min(one, other).encode() + max(one, other).encode()


def commits_of(chain: Chain, records: Sequence[Record]) -> list[Commit] | None:
    """Rounds of the log with their contributions; None if some are no longer here."""
    commits = []
    for record in records:
        contributions = chain.contributions_of(record)
        if contributions is None:
            return None
        commits.append(Commit(record, tuple(contributions)))
    return commits
