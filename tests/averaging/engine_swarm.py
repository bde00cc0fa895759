"""Engines alone on a seeded queue of events: delays, losses, broken links, crashes and restarts, without any task.

A peer's state is the list of digests it merged, hashed: enough to tell whether two peers committed the same.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from averaging import journal
from averaging.config import EngineConfig
from averaging.engine import Engine
from averaging.messages import encode_message, parse_message
from averaging.outbox import Actions
from averaging.record import Record, genesis, sha256
from simulator.toy import ToySigner


@dataclass
class Chaos:
    """How hard the world is; probabilities are per message or per second."""

    delay: float = 0.02
    jitter: float = 0.05
    loss: float = 0.0
    breaks: float = 0.0
    crashes: float = 0.0
    blackouts: float = 0.0
    """The share of commits right after which all peers crash at the same instant: before the log is written."""
    torn: float = 0.0
    """The share of durable writes in whose middle the peer crashes."""
    down_seconds: float = 2.0
    compute: float = 0.5
    start_peers: int = 1
    compact_rounds: int = 32
    """Every so many rounds the journal is begun anew; half as many rounds can still be replayed by others."""


@dataclass
class ToyPeer:
    signer: ToySigner
    engine: Engine | None = None
    journal: list[bytes] = field(default_factory=list)
    log: list[bytes] = field(default_factory=list)
    lazy: list[bytes] = field(default_factory=list)
    lazy_log: list[bytes] = field(default_factory=list)
    life: int = 0
    state: bytes = b""
    round: int = 0
    computing: bool = False
    offered_on: bytes = b""
    speed: float = 1.0
    tick_at: float = float("inf")
    jumping: bool = False


# What is sent to all is parsed once: messages are values.
_parsed = lru_cache(maxsize=256)(parse_message)


class EngineSwarm:
    def __init__(self, seed: int, num_peers: int, chaos: Chaos) -> None:
        self.rng = random.Random(seed)
        self.chaos = chaos
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.peers = [ToyPeer(ToySigner(i), speed=self.rng.uniform(0.7, 1.4)) for i in range(num_peers)]
        self.by_id = {p.signer.peer_id: p for p in self.peers}
        self.first = genesis(sha256(b"run"), self.peers[0].signer.peer_id, bytes(16))
        self.committed: dict[int, Record] = {}
        self.states: dict[int, bytes] = {0: bytes(16)}
        self.trace = hashlib.sha256()
        self.messages = 0
        self.crashes = 0
        self.jumps = 0
        self.config = EngineConfig(
            payload_bytes_max=1000,
            weight_max=1000,
            snapshot_bytes=10**9,
            start_peers=chaos.start_peers,
        )
        for peer in self.peers:
            self.start(peer)

    # The world.

    def at(self, delay: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, what))

    def run(self, rounds: int, seconds: float) -> None:
        while self.events and self.now < seconds and max(self.committed, default=0) < rounds:
            self.now, _, what = heapq.heappop(self.events)
            what()

    def start(self, peer: ToyPeer) -> None:
        restored = journal.restore(self.first, peer.log, peer.journal, peer.signer, 1000)
        peer.engine = Engine(
            peer.signer, self.config, restored, check=lambda payload: None, nonce=peer.life, now=self.now
        )
        peer.state, peer.round = bytes(16), 0
        for record in restored.chain.records[1:]:
            self.apply(peer, record)
        peer.offered_on, peer.computing, peer.jumping = b"", False, False
        peer.engine.anchored(peer.engine.head.hash, peer.state, self.now)
        for other in self.peers:
            if other is not peer and other.engine is not None:
                self.connect(peer, other)
        self.compute(peer)
        self.after(peer)
        if self.chaos.crashes:
            self.at(self.rng.expovariate(self.chaos.crashes), self.guard(peer, lambda: self.crash(peer)))

    def connect(self, one: ToyPeer, other: ToyPeer) -> None:
        lives = one.life, other.life
        for a, b in ((one, other), (other, one)):
            if a.engine is not None:
                a.engine.connected(b.signer.peer_id, self.now)
                self.after(a)
        if self.chaos.breaks:

            def cut() -> None:
                if (one.life, other.life) == lives and one.engine and other.engine:
                    one.engine.disconnected(other.signer.peer_id)
                    other.engine.disconnected(one.signer.peer_id)
                    self.after(one)
                    self.after(other)
                    self.at(self.rng.uniform(0.1, 3), again)

            def again() -> None:
                if (one.life, other.life) == lives and one.engine and other.engine:
                    self.connect(one, other)

            self.at(self.rng.expovariate(self.chaos.breaks), cut)

    def crash(self, peer: ToyPeer) -> None:
        self.crashes += 1
        self.trace.update(b"crash %d" % self.peers.index(peer))
        peer.engine = None
        peer.life += 1
        peer.lazy, peer.lazy_log = [], []
        peer.tick_at = float("inf")
        for other in self.peers:
            if other.engine is not None:
                other.engine.disconnected(peer.signer.peer_id)
                self.after(other)
        self.at(self.rng.uniform(0, 2 * self.chaos.down_seconds), lambda: self.start(peer))

    def black_out(self) -> None:
        for peer in self.peers:
            if peer.engine is not None:
                self.crash(peer)

    def guard(self, peer: ToyPeer, what: Callable[[], None]) -> Callable[[], None]:
        """Runs `what` only if `peer` has not crashed in between."""
        life = peer.life
        return lambda: what() if peer.life == life and peer.engine is not None else None

    # A peer's own doing.

    def compute(self, peer: ToyPeer) -> None:
        if peer.computing or peer.engine is None:
            return
        peer.computing = True
        head = peer.engine.head.hash
        if peer.offered_on == head:
            peer.computing = False
            return

        def done() -> None:
            assert peer.engine is not None
            peer.computing = False
            payload = self.rng.randbytes(8)
            willing = bool(peer.engine.head.member(peer.signer.peer_id))
            # The offer itself may bring the next commit.
            peer.offered_on = peer.engine.head.hash
            peer.engine.offer(payload, 10, willing, self.now)
            self.after(peer)

        self.at(self.chaos.compute * peer.speed * self.rng.uniform(0.8, 1.3), self.guard(peer, done))

    def apply(self, peer: ToyPeer, record: Record) -> None:
        assert record.round == peer.round + 1
        known = self.committed.setdefault(record.round, record)
        assert known.hash == record.hash, f"round {record.round}: two different records were committed"
        peer.state = hashlib.sha256(peer.state + b"".join(m.digest for m in record.members)).digest()[:16]
        peer.round = record.round
        assert self.states.setdefault(record.round, peer.state) == peer.state

    def after(self, peer: ToyPeer) -> None:
        """Performs what the engine wants, with a crash possible between any two steps."""
        if peer.engine is None:
            return
        actions = peer.engine.drain()
        self.perform(peer, actions)
        self.set_timer(peer)

    def set_timer(self, peer: ToyPeer) -> None:
        """One timer a peer is enough: a timer that fires too early sets the next."""
        if peer.engine is not None:
            wake = max(self.now, peer.engine.next_wake(self.now)) + 1e-6
            if wake < peer.tick_at:
                peer.tick_at = wake
                self.at(wake - self.now, self.guard(peer, lambda: self.tick(peer, wake)))

    def tick(self, peer: ToyPeer, wake: float) -> None:
        assert peer.engine is not None
        if wake != peer.tick_at:
            return  # An earlier one has taken its place.
        peer.tick_at = float("inf")
        if peer.engine.next_wake(self.now) <= self.now:
            peer.engine.tick(self.now)
            self.after(peer)
        else:
            self.set_timer(peer)

    def perform(self, peer: ToyPeer, actions: Actions) -> None:
        peer.lazy += actions.lazy
        peer.lazy_log += actions.log
        if actions.entries:
            entries = [*peer.lazy, *actions.entries]
            if self.chaos.torn and self.rng.random() < self.chaos.torn:
                kept = self.rng.randint(0, len(entries) + len(peer.lazy_log))
                peer.journal += entries[:kept]
                peer.log += peer.lazy_log[: max(0, kept - len(entries))]
                self.crash(peer)
                return
            peer.journal += entries
            peer.log += peer.lazy_log
            peer.lazy, peer.lazy_log = [], []
        encoded: dict[int, bytes] = {}
        for target, message in actions.sends:
            data = encoded.get(id(message)) or encoded.setdefault(id(message), encode_message(message))
            self.send(peer, self.by_id[target], data)
        for commit in actions.commits:
            self.trace.update(commit.record.hash)
            self.apply(peer, commit.record)
        if actions.commits and self.chaos.blackouts and self.rng.random() < self.chaos.blackouts:
            self.black_out()
        if actions.commits and peer.engine is not None:
            peer.engine.anchored(peer.engine.head.hash, peer.state, self.now)
            if peer.round % self.chaos.compact_rounds == 0:
                self.compact(peer)
            self.compute(peer)
            self.after(peer)
        if actions.wants_snapshot and peer.engine is not None and not peer.jumping:
            peer.jumping = True
            self.at(self.rng.uniform(0.05, 0.3), self.guard(peer, lambda: self.jump(peer)))

    def compact(self, peer: ToyPeer) -> None:
        """As after a snapshot: what is older than it is no longer kept."""
        engine = peer.engine
        assert engine is not None
        engine.chain.forget_before(peer.round - self.chaos.compact_rounds // 2)
        peer.log += peer.lazy_log
        peer.lazy, peer.lazy_log = [], []
        held = list(engine.instance.held.values())
        peer.journal = journal.compacted(engine.chain, engine.instance.vote, held, engine.restored)

    def jump(self, peer: ToyPeer) -> None:
        """Takes the state of another peer, if the gap certifies it."""
        peer.jumping = False
        engine = peer.engine
        assert engine is not None
        chains = [p.engine.chain for p in self.peers if p is not peer and p.engine is not None]
        # As in a real peer: what others can take is old enough to be certified, and all after it can be replayed.
        heads = [chain.records[chain.oldest - 1] for chain in chains]
        head = next((h for h in heads if engine.catch_up.child_of(h.hash) is not None), None)
        if head is None:
            engine.catch_up.snapshot_failed()
        elif engine.adopt(head.hash, self.now):
            self.jumps += 1
            for record in engine.chain.records[peer.round + 1 :]:
                known = self.committed.setdefault(record.round, record)
                assert known.hash == record.hash, f"round {record.round}: two different records were committed"
            peer.round, peer.state = head.round, self.states[head.round]
            engine.anchored(head.hash, peer.state, self.now)
            self.compute(peer)
        self.after(peer)

    def send(self, source: ToyPeer, target: ToyPeer, data: bytes) -> None:
        self.messages += 1
        lives = source.life, target.life
        if self.rng.random() < self.chaos.loss:
            return

        def deliver() -> None:
            if (source.life, target.life) == lives and target.engine is not None:
                target.engine.receive(source.signer.peer_id, _parsed(data), self.now)
                self.after(target)

        self.at(self.chaos.delay + self.rng.random() * self.chaos.jitter, deliver)

    def report(self) -> dict[str, Any]:
        sizes = [len(r.members) for r in self.committed.values()]
        return {
            "now": round(self.now, 2),
            "rounds": max(self.committed, default=0),
            "members": sum(sizes) / max(1, len(sizes)),
            "messages": self.messages,
            "crashes": self.crashes,
            "jumps": self.jumps,
        }
