"""Engines alone on a seeded queue of events: delays, losses, broken links, crashes and restarts, without any task.

A peer's state is the list of digests it merged, hashed: enough to tell whether two peers committed the same.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgpack

from averaging import journal
from averaging.chain import Left
from averaging.config import EngineConfig
from averaging.engine import Engine
from averaging.messages import encode_message, parse_message
from averaging.outbox import Actions, Commit, Fork, Reduction
from averaging.owners import encode_parts, parse_parts
from averaging.record import NORMAL, RECOVERY, Record, genesis, sha256
from simulator.toy import ToySigner
from tests.averaging.chaos import Chaos, ToyPeer

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
        self.committed: dict[bytes, Record] = {}
        """The one normal record after each."""
        self.newest = 0
        self.states: dict[bytes, bytes] = {self.first.hash: bytes(16)}
        self.recovered: set[bytes] = set()
        self.heals = 0
        self.trace = hashlib.sha256()
        self.messages = 0
        self.crashes = 0
        self.jumps = 0
        self.config = EngineConfig(
            payload_bytes_max=1000,
            weight_max=1000,
            snapshot_bytes=10**9,
            start_peers=chaos.start_peers,
            parts=chaos.parts,
            voters_max=chaos.voters_max,
        )
        self.units = self.unknown = self.heard = 0
        self.merged: dict[bytes, frozenset[int]] = {self.first.hash: frozenset()}
        """Where owners reduce: the units that the chain up to each record holds."""
        for peer in self.peers:
            self.start(peer)
        if chaos.partitions:
            self.at(self.rng.expovariate(chaos.partitions), self.part)

    # The world.

    def at(self, delay: float, what: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + delay, self.count, what))

    def run(self, rounds: int, seconds: float) -> None:
        while self.events and self.now < seconds and self.newest < rounds:
            self.now, _, what = heapq.heappop(self.events)
            what()

    def start(self, peer: ToyPeer) -> None:
        restored = journal.restore(self.first, peer.log, peer.journal, peer.signer, 1000)
        peer.engine = Engine(
            peer.signer, self.config, restored, check=lambda payload: None, nonce=peer.life, now=self.now
        )
        peer.state, peer.round, peer.at = bytes(16), 0, self.first.hash
        for record in restored.chain.records[1:]:
            self.apply(peer, record)
        peer.offered_on, peer.computing, peer.jumping, peer.said = b"", False, False, {}
        peer.engine.anchored(peer.engine.head.hash, peer.state, self.now)
        for other in self.peers:
            if other is not peer and other.engine is not None and other.side == peer.side:
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
                if (one.life, other.life) == lives and one.engine and other.engine and one.side == other.side:
                    self.connect(one, other)

            if not self.is_quiet:
                self.at(self.rng.expovariate(self.chaos.breaks), cut)

    @property
    def is_quiet(self) -> bool:
        return self.now >= self.chaos.quiet_after

    def part(self) -> None:
        """The peers fall into two sides, or are one again."""
        parted = len({peer.side for peer in self.peers}) > 1
        sides = {id(p): 0 if parted or self.is_quiet else self.rng.randint(0, 1) for p in self.peers}
        pairs = [(a, b) for i, a in enumerate(self.peers) for b in self.peers[:i] if a.engine and b.engine]
        for one, other in pairs:
            before, after = one.side == other.side, sides[id(one)] == sides[id(other)]
            if before and not after:
                for a, b in ((one, other), (other, one)):
                    if a.engine is not None:
                        a.engine.disconnected(b.signer.peer_id)
                        self.after(a)
        old = {id(p): p.side for p in self.peers}
        for peer in self.peers:
            peer.side = sides[id(peer)]
        for one, other in pairs:
            if old[id(one)] != old[id(other)] and one.side == other.side and one.engine and other.engine:
                self.connect(one, other)
        self.trace.update(repr([peer.side for peer in self.peers]).encode())
        if not self.is_quiet:
            mean = self.chaos.partition_seconds if not parted else 1 / self.chaos.partitions
            self.at(min(self.rng.expovariate(1 / mean), max(0.0, self.chaos.quiet_after - self.now)), self.part)

    def crash(self, peer: ToyPeer) -> None:
        if self.is_quiet:
            return
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
        if self.rng.random() < self.chaos.deaths and sum(not p.is_dead for p in self.peers) > 2:
            peer.is_dead = True
        else:
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
            if self.chaos.parts:
                self.share(peer)
            else:
                peer.engine.offer(payload, 10, willing, self.now)
            self.after(peer)

        self.at(self.chaos.compute * peer.speed * self.rng.uniform(0.8, 1.3), self.guard(peer, done))

    def share(self, peer: ToyPeer) -> None:
        """One unit a part, each made once."""
        assert peer.engine is not None
        peer.units = {part: self.units + part for part in range(self.chaos.parts)}
        self.units += self.chaos.parts
        peer.engine.share([msgpack.packb([unit]) for unit in peer.units.values()], 10, True, self.now)

    def reduce(self, peer: ToyPeer, reduction: Reduction) -> None:
        """What an owner makes of the shares: all their units."""
        assert peer.engine is not None
        if peer.engine.head == reduction.head and reduction.shares:
            merged: dict[int, list[int]] = {}
            for share in reduction.shares:
                for part, packet in parse_parts(share.payload).items():
                    merged.setdefault(part, []).extend(msgpack.unpackb(packet))
            payload = encode_parts({part: msgpack.packb(units) for part, units in merged.items()})
            peer.engine.offer(payload, sum(s.weight for s in reduction.shares), True, self.now)
            self.after(peer)

    def check_parts(self, peer: ToyPeer, commit: Commit) -> None:
        """No unit is merged twice in a chain, and who shared knows exactly what of it was merged."""
        units = [u for c in commit.contributions for p in parse_parts(c.payload).values() for u in msgpack.unpackb(p)]
        before = self.merged[commit.record.prev]
        assert len(units) == len(set(units)) and not before & set(units), "units are merged twice"
        self.merged[commit.record.hash] = before | set(units)
        if commit.shared is not None:
            heard, unknown = commit.shared
            for part, unit in peer.units.items():
                assert part in unknown or (part in heard) == (unit in units), "a share's fate is misjudged"
            self.unknown += len(unknown)
            self.heard += len(heard)

    def check_left(self, peer: ToyPeer, left: Sequence[Left]) -> None:
        """Whoever leaves a chain gets back what it had said there."""
        for gone in left:
            said = peer.said.pop(gone.record.hash, None)
            assert said is None or (gone.mine is not None and gone.mine.digest == said), (
                "what was said is not given back"
            )

    def converge(self, seconds: float) -> None:
        """So long after the end of all faults everybody who lives is on one chain, at most three rounds apart."""
        self.run(10**9, max(self.now, self.chaos.quiet_after) + seconds)
        heads = [peer.engine.head for peer in self.peers if peer.engine is not None]
        last = min(heads, key=lambda record: record.round)
        assert max(record.round for record in heads) - last.round <= 3, [record.round for record in heads]
        assert all(last.hash in p.engine.chain for p in self.peers if p.engine is not None), "two chains remain"

    def apply(self, peer: ToyPeer, record: Record) -> None:
        assert record.prev == peer.at
        self.learn(record)
        if record.members:
            peer.state = hashlib.sha256(peer.state + b"".join(m.digest for m in record.members)).digest()[:16]
        peer.round, peer.at = record.round, record.hash
        assert self.states.setdefault(record.hash, peer.state) == peer.state

    def learn(self, record: Record) -> None:
        """Somebody holds `record` as committed: no other normal one may follow the same."""
        if record.kind == NORMAL:
            known = self.committed.setdefault(record.prev, record)
            assert known.hash == record.hash, f"round {record.round}: two different records were committed"
            self.newest = max(self.newest, record.round)
        self.recovered |= {record.hash} if record.kind == RECOVERY else set()

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
            if self.chaos.torn and not self.is_quiet and self.rng.random() < self.chaos.torn:
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
        for event in actions.commits:
            if isinstance(event, Fork):
                self.heals += 1
                self.check_left(peer, event.left)
                peer.at, peer.round = event.ancestor.hash, event.ancestor.round
                peer.state = self.states[peer.at]
                continue
            self.trace.update(event.record.hash)
            mine = event.record.member(peer.signer.peer_id)
            if mine is not None:
                peer.said[event.record.hash] = mine.digest
            if self.chaos.parts:
                self.check_parts(peer, event)
            self.apply(peer, event.record)
        for reduction in actions.reductions:
            self.at(0.01, self.guard(peer, partial(self.reduce, peer, reduction)))
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
        peer.journal = engine.rounds.journal()

    def jump(self, peer: ToyPeer) -> None:
        """Takes the state of another peer, if the gap certifies it."""
        peer.jumping = False
        engine = peer.engine
        assert engine is not None
        chains = [p.engine.chain for p in self.peers if p is not peer and p.engine is not None]
        # As in a real peer: what others can take is old enough to be certified, and all after it can be replayed.
        heads = [chain.records[chain.oldest - 1] for chain in chains]
        head = next((h for h in heads if engine.catch_up.child_of(h.hash, engine.chain) is not None), None)
        if head is None:
            engine.catch_up.snapshot_failed()
        elif (moved := engine.adopt(head.hash, self.now)) is not None:
            self.jumps += 1
            self.heals += bool(moved.left)
            self.check_left(peer, moved.left)
            for record in moved.joined:
                self.learn(record)
            peer.round, peer.state, peer.at = head.round, self.states[head.hash], head.hash
            engine.anchored(head.hash, peer.state, self.now)
            self.compute(peer)
        self.after(peer)

    def send(self, source: ToyPeer, target: ToyPeer, data: bytes) -> None:
        self.messages += 1
        lives = source.life, target.life
        if self.rng.random() < self.chaos.loss:
            return

        def deliver() -> None:
            if (source.life, target.life) == lives and target.engine is not None and source.side == target.side:
                target.engine.receive(source.signer.peer_id, _parsed(data), self.now)
                self.after(target)

        self.at(self.chaos.delay + self.rng.random() * self.chaos.jitter, deliver)

    def report(self) -> dict[str, Any]:
        sizes = [len(r.members) for r in self.committed.values()]
        return {
            "now": round(self.now, 2),
            "rounds": self.newest,
            "recoveries": len(self.recovered),
            "heals": self.heals,
            "heard": self.heard,
            "unknown": self.unknown,
            "members": sum(sizes) / max(1, len(sizes)),
            "messages": self.messages,
            "crashes": self.crashes,
            "jumps": self.jumps,
        }
