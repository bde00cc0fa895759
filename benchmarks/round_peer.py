"""One process of `round_overhead`: a peer with a daemon of its own, or one of hivemind's averagers.

Reads JSON lines: `{"addresses": {...}}` once, then `{"at": T, "bytes": N}` for a round that begins at the monotonic
time T, the same clock for all processes of a machine. Answers every line with one line; ends with its input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import anyio
import anyio.to_thread

from averaging import journal
from averaging.config import EngineConfig
from averaging.contribution import Contribution
from averaging.node import Node, NodeConfig
from averaging.outbox import Commit
from averaging.record import FINGERPRINT_BYTES, Hash, genesis
from averaging.storage import FileStorage
from benchmarks.children import answer
from network.daemon import HivemindNetwork, open_network
from network.identity import Identity, load_or_create
from network.seam import PeerID
from peer.learner import Learner, Own, Trained
from peer.options import IDENTITY_FILE
from peer.worker import ThreadWorker

RUN_ID = "be" * 32
PAYLOAD_BYTES_MAX = 8 << 20
START_PEERS = 4
ROUND_SECONDS_MAX = 60.0


@final
class HashLearner(Learner):
    """Offers random bytes; the state is a hash of all that was committed. So what is measured is the round alone."""

    def __init__(self) -> None:
        self._state = bytes(FINGERPRINT_BYTES)
        self.payload_bytes = 0

    def train(self, round_index: int, should_stop: Callable[[], bool], steps: int | None = None) -> Trained:
        return Trained(1, 0.0)

    def pack(self, round_index: int) -> bytes:
        return os.urandom(self.payload_bytes)

    def apply(self, number: int, contributions: Sequence[Contribution], own: Own) -> None:
        digest = hashlib.blake2b(self._state, digest_size=FINGERPRINT_BYTES)
        for contribution in contributions:
            digest.update(contribution.payload)
        self._state = digest.digest()

    def move(self, left: Sequence[bytes], joined: Sequence[bytes] | None) -> None:
        pass

    def fingerprint(self) -> bytes:
        return self._state

    def validation_loss(self) -> float:
        return 0.0

    def check(self, payload: bytes) -> None:
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise ValueError("too long")

    def dump(self, *, shared_only: bool = False) -> dict[str, bytes]:
        return {"state": self._state}

    def load(self, files: Mapping[str, bytes], *, own: bool) -> bytes:
        self._state = files["state"]
        return self._state

    def fingerprint_of(self, files: Mapping[str, bytes]) -> bytes:
        return files["state"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["hash", "torch", "averager"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("creator", help="the peer id of the run's creator")
    options = parser.parse_args()
    if options.kind == "averager":
        from benchmarks.averager import run_averager

        run_averager(START_PEERS, ROUND_SECONDS_MAX / 2)
        return
    anyio.run(run_peer, options, backend="asyncio", backend_options={"use_uvloop": True})


async def run_peer(options: argparse.Namespace) -> None:
    """Ours: the node and the learner as `peer.member` puts them together, without a directory."""
    identity = load_or_create(options.folder / IDENTITY_FILE)
    learner = HashLearner() if options.kind == "hash" else torch_learner(identity)
    storage = FileStorage(options.folder / "run")
    await storage.load()
    first = genesis(Hash(bytes.fromhex(RUN_ID)), PeerID(options.creator), learner.fingerprint())
    engine = EngineConfig(PAYLOAD_BYTES_MAX, weight_max=1 << 40, snapshot_bytes=1 << 40, start_peers=START_PEERS)
    async with (
        open_network(options.folder / IDENTITY_FILE, "/ip4/127.0.0.1/tcp/0") as network,
        anyio.create_task_group() as tasks,
    ):
        node = Node(
            network,
            identity,
            storage,
            journal.restore(first, [], [], identity, PAYLOAD_BYTES_MAX),
            NodeConfig(engine),
            random.Random(os.urandom(8)),
            run_id=RUN_ID,
            nonce=1,
            check=learner.check,
        )
        tasks.start_soon(node.run)
        await _Rounds(network, node, learner).run()
        tasks.cancel_scope.cancel()
    storage.close()


def torch_learner(identity: Identity) -> Learner:
    """The real one: gpt-mini, 1.05 million float32 parameters, with the `distro` chain."""
    from peer.build import build
    from peer.spec import make_spec

    spec = make_spec(identity.peer_id, name="benchmark", model="gpt-mini", preset="distro", settings={"batch": 1})
    return build(spec, identity.peer_id).learner


@final
class _Rounds:
    def __init__(self, network: HivemindNetwork, node: Node, learner: Learner) -> None:
        self._network = network
        self._node = node
        self._learner = learner
        self._worker = ThreadWorker()

    async def run(self) -> None:
        answer({"peer": self._network.peer_id, "addresses": await self._network.addresses()})
        base = await self._worker.run(self._learner.fingerprint)
        self._node.anchored(self._node.head.hash, base)
        while True:
            line = await anyio.to_thread.run_sync(sys.stdin.readline)
            if not line:
                return
            message = json.loads(line)
            if "addresses" in message:
                await self._meet(message["addresses"])
            else:
                answer(await self._round(message["at"], message["bytes"]))

    async def _meet(self, addresses: Mapping[str, Sequence[str]]) -> None:
        others = [PeerID(peer) for peer in addresses if peer != self._network.peer_id]
        for peer in others:
            self._network.introduce(peer, addresses[peer])
            self._node.links.know(peer)
        with anyio.fail_after(ROUND_SECONDS_MAX):
            while len(self._node.links.linked) < len(others):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        answer({"linked": len(others)})

    async def _round(self, begin: float, payload_bytes: int) -> dict[str, object]:
        """When the payload was ready (at `begin` or later), the round decided, and the next anchor known."""
        learner, node, worker = self._learner, self._node, self._worker
        if isinstance(learner, HashLearner):
            learner.payload_bytes = payload_bytes
        number = node.head.round
        await worker.run(learner.train, number, lambda: False)
        payload = await worker.run(learner.pack, number)
        await anyio.sleep(max(0.0, begin - time.monotonic()))
        with anyio.fail_after(ROUND_SECONDS_MAX):
            ready = time.monotonic()
            offered = await node.offer(payload, 1, True)
            assert offered is not None
            await node.wait_news()
            commit = node.take_commits()[0]
            assert isinstance(commit, Commit)
            decided = time.monotonic()
            await worker.run(learner.apply, commit.record.round, commit.contributions, Own.SAID)
            base = await worker.run(learner.fingerprint)
            done = time.monotonic()
        node.anchored(commit.record.hash, base)
        return {
            "ready": ready,
            "decided": decided,
            "done": done,
            "members": len(commit.record.members),
            "bytes": len(payload),
            "fingerprint": base.hex(),
        }


if __name__ == "__main__":
    main()
