"""The composition root: the one file that names concrete parts, puts a real peer together and runs it."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import final

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from averaging.storage import FileStorage
from dht.facts import RunFact, SpecFact
from dht.hivemind_directory import HivemindDirectory
from dht.membership import MembershipConfig
from dht.record import InvalidRecord
from dht.runs import FoundRun, SpecNotFound, fetch_spec, find_runs
from network.identity import load_or_create
from network.seam import PeerID
from network.traffic import TrafficMeter
from peer.build import Built, build, chosen_hardware
from peer.console import Console, Sent
from peer.errors import RunNotFound
from peer.gossip_member import GossipMember, run_gossip_member
from peer.lines import emit, say_or_emit
from peer.loop import LoopConfig
from peer.member import Member, MemberConfig, Parts, run_member
from peer.options import IDENTITY_FILE, PeerOptions, check_address
from peer.spec import RunSpec, load_spec, spec_of
from peer.worker import ThreadWorker
from peer.world import World, open_world, peer_of, print_join_line, run_to_the_end, watch_signals

log = logging.getLogger(__name__)

PEERS_FILE = "peers.json"
RUN_FILE = "run"
REMEMBERED_PEERS_MAX = 50
REMEMBER_SECONDS = 3.0
FIND_SECONDS_MAX = 60.0
"""For the run's facts to appear in the directory of a swarm that has just begun."""
KNOWN_SECONDS_MAX = 5.0
"""The same, for a peer that has the facts of its run on disk."""


def run_peer(options: PeerOptions) -> None:
    """See `peer.options`. Returns at the goal; raises `KeyboardInterrupt` after a clean leave."""
    run_to_the_end(_Peer(options).run)


@final
class _Peer:
    """One training peer, from its options to its end."""

    def __init__(self, options: PeerOptions) -> None:
        self._options = options
        self._identity = load_or_create(options.folder / IDENTITY_FILE)
        self._member: Member | GossipMember | None = None
        self._remembered = remembered_peers(options.folder)
        self._interrupted = False

    async def run(self) -> None:
        options = self._options
        entries = options.initial_peers or self._remembered
        if options.spec_file is None and not entries:
            raise ValueError(
                "no peer of the swarm is known yet: name one with --initial-peers (a running peer prints the line)"
            )
        # A peer that knows its run may be the first one back: it then waits for others to find it.
        knows_run = _remembered_spec(options.folder / RUN_FILE) is not None and not options.initial_peers
        alone_is_fine = options.spec_file is not None or knows_run
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch_signals, self._leave)
            async with open_world(options, entries, alone_is_fine=alone_is_fine) as world:
                spec, fact = await self._specification(world)
                print_join_line(options.json_events, await world.network.addresses(), spec.run.name)
                built = await anyio.to_thread.run_sync(self._build, spec)
                say_or_emit(options.json_events, built.inner)
                await self._take_part(world, spec, fact, built, tasks)
            tasks.cancel_scope.cancel()
        if self._interrupted:
            raise KeyboardInterrupt

    def _leave(self) -> None:
        self._interrupted = True
        if self._member is None:
            raise KeyboardInterrupt
        say_or_emit(self._options.json_events, "leaving")
        self._member.loop.leave()

    def _build(self, spec: RunSpec) -> Built:
        options = self._options
        hardware = chosen_hardware(options.device, options.precision, options.micro_batch)
        return build(spec, self._identity.peer_id, data=options.data, hardware=hardware)

    async def _specification(self, world: World) -> tuple[RunSpec, SpecFact]:
        """From the file that starts the run, from the swarm, or, where nobody answers, from the peer's own folder."""
        options = self._options
        if options.spec_file is not None:
            spec = load_spec(options.spec_file, self._identity.peer_id)
            return spec, spec.announced_by(self._identity)
        kept = options.folder / RUN_FILE
        try:
            seconds_max = KNOWN_SECONDS_MAX if _remembered_spec(kept) is not None else FIND_SECONDS_MAX
            found = await _find_run(world.directory, options.run, seconds_max)
            fact = await fetch_spec(world.directory, found.fact.run_id, time.time)
        except (RunNotFound, SpecNotFound) as error:
            remembered = _remembered_spec(kept)
            if remembered is None or (options.run not in (None, spec_of(remembered).run.name, remembered.run_id)):
                raise RunNotFound(str(error)) from error
            fact = remembered
            say_or_emit(options.json_events, f"{error}; going on with the run of {options.folder}")
        draft = kept.with_suffix(".new")
        draft.write_bytes(fact.run_id.encode() + b"\n" + fact.encode())
        draft.replace(kept)
        return spec_of(fact), fact

    async def _take_part(self, world: World, spec: RunSpec, fact: SpecFact, built: Built, tasks: TaskGroup) -> None:
        options, network = self._options, world.network
        meter = TrafficMeter(network.process_id)
        storage = FileStorage(options.folder / "runs" / spec.run_id[:16])

        console = Console(
            as_json=options.json_events,
            parameters=built.parameters,
            inner_steps=built.method.round_steps,
            sent=lambda: self._sent(meter),
            shared="anchor" if built.method.mode == "consensus" else "replica",
            clock=anyio.current_time,
        )

        async def follow_daemon() -> None:
            meter.follow(network.process_id)

        network.on_restart(follow_daemon)
        parts = Parts(
            network=network,
            directory=world.directory,
            signer=self._identity,
            storage=storage,
            learner=built.learner,
            worker=ThreadWorker(),
            rng=random.Random(os.urandom(16)),
            wall_time=time.time,
        )
        config = MemberConfig(
            run=RunFact(spec.run_id, spec.run.name, PeerID(spec.creator)),
            spec=fact,
            engine=built.engine,
            loop=_loop_config(spec, options),
            snapshots=built.snapshots,
            membership=MembershipConfig(),
            name=options.name,
        )

        def started(member: Member | GossipMember) -> None:
            self._member = member
            for address in self._remembered:
                network.introduce(peer_of(address), [address])
                member.know(peer_of(address))
            tasks.start_soon(meter.keep_sampling)
            tasks.start_soon(_remember, member, options.folder)
            if options.json_events:
                emit(_ready(world, spec, built))

        try:
            if built.method.mode == "gossip":
                await run_gossip_member(parts, config, built.gossip, console.show, started)
            else:
                await run_member(parts, config, console.show, started)
        finally:
            storage.close()

    def _sent(self, meter: TrafficMeter) -> Sent:
        """So far, as the system counts it or, where it does not, the peer itself."""
        member = self._member
        if member is None:
            return Sent(meter.total.bytes_sent if meter.available else 0, 0, 0)
        total = meter.total.bytes_sent if meter.available else member.bytes_sent
        return Sent(total, member.node.packet_bytes_sent, len(member.linked))


def _loop_config(spec: RunSpec, options: PeerOptions) -> LoopConfig:
    config = LoopConfig(rounds_goal=spec.run.rounds, rounds_max=options.rounds_max)
    longest = config.linger_seconds_max + options.linger_seconds
    return replace(config, linger_seconds_min=options.linger_seconds, linger_seconds_max=longest)


def _ready(world: World, spec: RunSpec, built: Built) -> dict[str, object]:
    return {
        "event": "Ready",
        "peer_id": world.network.peer_id,
        "run": spec.run.name,
        "run_id": spec.run_id,
        "parameters": built.parameters,
        "inner_steps": built.method.round_steps,
        "daemon": world.network.process_id,
    }


async def _find_run(directory: HivemindDirectory, wanted: str | None, seconds_max: float) -> FoundRun:
    """The run to join; waits for a swarm that has just begun. Raises `RunNotFound`."""
    with anyio.move_on_after(seconds_max):
        while True:
            runs = await find_runs(directory, time.time)
            matching = [r for r in runs if wanted in (None, r.fact.name, r.fact.run_id)]
            if len(matching) == 1:
                return matching[0]
            if len(matching) > 1:
                names = ", ".join(f"{r.fact.name} ({r.fact.run_id[:12]}, {len(r.announcers)} peers)" for r in matching)
                raise RunNotFound(f"the swarm trains several such runs: {names}; choose one with --run ID")
            if runs and wanted is not None:
                names = ", ".join(sorted({r.fact.name for r in runs}))
                raise RunNotFound(f"the swarm trains no run {wanted!r}; there is {names}")
            await anyio.sleep(1.0)
    raise RunNotFound("the swarm answers, but nobody trains a run in it; is the peer that started it still there?")


def _remembered_spec(path: Path) -> SpecFact | None:
    try:
        run_id, _, data = path.read_bytes().partition(b"\n")
        return SpecFact.decode(data, run_id.decode())
    except (OSError, InvalidRecord, UnicodeDecodeError):
        return None


async def _remember(member: Member | GossipMember, folder: Path) -> None:
    """Keeps addresses of other members, so that a restart needs no entry point."""
    while True:
        await anyio.sleep(REMEMBER_SECONDS)
        if member.membership is not None and member.membership.members:
            facts = list(member.membership.members.values())[:REMEMBERED_PEERS_MAX]
            draft = folder / f"{PEERS_FILE}.new"
            draft.write_text(json.dumps([list(fact.addresses) for fact in facts if fact.addresses]))
            draft.replace(folder / PEERS_FILE)


def remembered_peers(folder: Path) -> tuple[str, ...]:
    """Addresses of peers met before, one each; empty if there are none."""
    file = folder / PEERS_FILE
    try:
        peers = json.loads(file.read_text())
        told = [str(addresses[0]) for addresses in peers if addresses]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be used, so nobody met before is known: %s", file, error)
        return ()
    found = []
    for address in told:
        try:
            check_address(address)
        except ValueError as error:  # Whoever announced it chose the text: the others are known all the same.
            log.warning("%s: %s", file, error)
        else:
            found.append(address)
    return tuple(found)
