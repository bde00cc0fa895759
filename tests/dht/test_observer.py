"""The light observer, in its own process, against real DHT nodes on loopback."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from dht.entry_point import follow_swarm
from dht.facts import MemberFact, RunFact, SpecFact, members_key
from dht.hivemind_directory import open_directory
from dht.membership import Announcement, open_membership
from dht.record import expiry, seal
from dht.validator import SignedRecordValidator
from network.identity import Identity, load_or_create

# Looked up, not imported: hivemind is in this process, and libp2p can only be imported into another one.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libp2p") is None,
    reason="libp2p is not installed beside hivemind (the `observer` extra), and the observer needs it",
)

ROOT = Path(__file__).resolve().parents[2]
CREATOR = Identity(b"c" * 32)
SPEC = SpecFact.by(CREATOR, b"the whole specification")
RUN = RunFact(SPEC.run_id, "tiny", CREATOR.peer_id)


async def observe(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, what it printed, its complaints)."""
    command = [sys.executable, "-m", "dht.observer", *arguments, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    call = functools.partial(
        subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    done = await anyio.to_thread.run_sync(call)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


class Loopback:
    """An entry point that trains nothing, and members."""

    def __init__(self, stack: AsyncExitStack, folder: Path, open_p2p: Any) -> None:
        self.stack, self.folder, self.open_p2p = stack, folder, open_p2p
        self.entry: list[str] = []
        self.addresses: dict[str, tuple[str, ...]] = {}

    async def join(self, name: str) -> tuple[Any, Any, Identity]:
        p2p = await self.open_p2p(self.stack, self.folder / name, self.entry)
        opened = open_directory(p2p, self.entry, validator=SignedRecordValidator(time.time))
        directory = await self.stack.enter_async_context(opened)
        self.entry = self.entry or [str(address) for address in await p2p.get_visible_maddrs()]
        return p2p, directory, load_or_create(self.folder / name)

    async def train(self, name: str, round: int, loss: float | None) -> Identity:
        p2p, directory, identity = await self.join(name)
        addresses = tuple(str(address) for address in await p2p.get_visible_maddrs())
        self.addresses[name] = addresses
        fact = MemberFact("1.0", name, addresses, 1, b"\x0a", round, 100, loss, reachable=True, trains=True)
        membership = await self.stack.enter_async_context(
            open_membership(
                directory,
                identity,
                Announcement(RUN, SPEC, lambda: fact),
                wall_time=time.time,
                rng=random.Random(name),
            )
        )
        while not membership.num_heartbeats:
            await anyio.lowlevel.checkpoint()
        return identity


def run(folder: Path, open_p2p: Any, test: Callable[[Loopback], Awaitable[None]]) -> None:
    async def start() -> None:
        with anyio.fail_after(120):
            async with AsyncExitStack() as stack:
                await test(Loopback(stack, folder, open_p2p))

    anyio.run(start)


def test_it_reports_a_run_of_which_the_asked_peer_is_no_member(tmp_path: Path, open_p2p: Any) -> None:
    async def test(loopback: Loopback) -> None:
        _, at_entry, _ = await loopback.join("entry")
        alice = await loopback.train("alice", round=7, loss=2.0)
        bob = await loopback.train("bob", round=8, loss=3.0)
        # One round of what the entry point does for ever.
        with anyio.move_on_after(1):
            await follow_swarm(at_entry, time.time, random.Random(1))
        code, swarm, complaints = await observe("--initial-peers", *loopback.entry)
        assert (code, complaints) == (0, "")
        assert (swarm["run_id"], swarm["name"], swarm["round"], swarm["loss"]) == (RUN.run_id, "tiny", 8, 2.5)
        members = {member["peer_id"]: member for member in swarm["members"]}
        assert set(members) == {alice.peer_id, bob.peer_id}
        shown = members[alice.peer_id]
        assert (shown["name"], shown["round"], shown["tokens"], shown["head"]) == ("alice", 7, 100, "0a")
        assert 0 < shown["expires_in_seconds"] <= 105
        assert swarm["refused_records"] == 0
        # It has entered nobody's routing table.
        assert at_entry.num_neighbours == 2
        code, swarm, complaints = await observe("--initial-peers", *loopback.entry, "--run", "another")
        assert (code, swarm) == (4, {})
        assert "tiny" in complaints

    run(tmp_path, open_p2p, test)


def test_forged_records_are_left_out_and_counted(tmp_path: Path, open_p2p: Any) -> None:
    async def test(loopback: Loopback) -> None:
        _, at_entry, me = await loopback.join("entry")
        alice = await loopback.train("alice", round=7, loss=None)
        key, expires = members_key(RUN.run_id), expiry(time.time(), 600)
        for subkey, signer in ((alice.peer_id, me), (Identity(b"x" * 32).peer_id, me)):
            forged = seal(signer, key, signer.peer_id, b"forged", expires)
            # A lying node: its own storage takes anything.
            await at_entry.get(key)
            at_entry._keep(key, {subkey: (forged, expires)})
        with anyio.move_on_after(1):
            await follow_swarm(at_entry, time.time, random.Random(1))
        known = [*loopback.entry, *loopback.addresses["alice"]]
        code, swarm, _ = await observe("--initial-peers", *known, "--run", RUN.run_id)
        assert code == 0
        assert [member["peer_id"] for member in swarm["members"]] == [alice.peer_id]
        assert (swarm["refused_records"], swarm["refused_reasons"]) == (2, {"signature": 2})

    run(tmp_path, open_p2p, test)


def test_peers_that_nobody_reaches_and_impostors_are_named(tmp_path: Path, open_p2p: Any) -> None:
    async def test(loopback: Loopback) -> None:
        p2p, _, frozen = await loopback.join("frozen")
        here, nobody, impostor = loopback.entry[0], Identity(b"n" * 32).peer_id, Identity(b"i" * 32).peer_id
        wrong = [f"/ip4/127.0.0.1/tcp/1/p2p/{nobody}", here.rpartition("/")[0] + "/" + impostor]
        os.kill(p2p._child.pid, signal.SIGSTOP)
        code, swarm, complaints = await observe("--dial-seconds", "1", "--initial-peers", here, wrong[0])
        os.kill(p2p._child.pid, signal.SIGCONT)
        assert (code, swarm) == (3, {})
        assert frozen.peer_id in complaints
        assert nobody in complaints
        await loopback.train("alice", round=7, loss=None)
        code, swarm, complaints = await observe("--initial-peers", *wrong, here)
        assert (code, len(swarm["members"])) == (0, 1)
        assert set(swarm["unreachable"]) == {nobody, impostor}

    run(tmp_path, open_p2p, test)


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/1/p2p/12D3Koo"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    async def test() -> None:
        code, _, complaints = await observe("--initial-peers", address)
        assert code == 2
        assert address in complaints

    anyio.run(test)
