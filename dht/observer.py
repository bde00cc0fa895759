"""The light observer: reads a swarm's directory with py-libp2p alone, from a process of its own, and prints JSON.

    python -m dht.observer --initial-peers ADDR... [--run NAME]

It enters nobody's routing table, listens nowhere and keeps nothing. It asks the initial peers, then a few of the
members that they name: every member holds what it follows, so one that answers is enough. A node which is neither
near a key nor follows it knows other nodes only by id, and py-libp2p cannot dial an id: then give another address.

py-libp2p cannot be imported into a process with hivemind (both register the protobuf symbol `crypto.pb.KeyType`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
from libp2p import create_yamux_muxer_option, new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.network.config import RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from dht.codec import FIND_PROTOCOL, MESSAGE_BYTES_MAX, Found, InvalidAnswer, decode_found, encode_find, frame_length
from dht.facts import MemberFact, members_key, runs_key
from dht.record import InvalidRecord, Reason, key_id, open_record, parse_peer_id
from dht.runs import FoundRun, found_runs
from network.seam import PeerID

OK, NOBODY_REACHABLE, NO_RUN = 0, 3, 4
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class ObserverConfig:
    """How many peers are asked, and how long each may take."""

    dial_seconds_max: float = 10.0
    call_seconds_max: float = 10.0
    peer_seconds_max: float = 40.0
    """For all addresses and all questions of one peer."""
    addresses_max: int = 4
    """Of one peer, tried one after the other."""
    initial_peers_max: int = 16
    walk_peers_max: int = 2
    """Members that are asked beyond the initial peers."""
    runs_max: int = 4
    """Runs whose members are asked for, the most announced first."""


@dataclass(slots=True)
class Answers:
    """What the asked peers said, merged: for each subkey the signed record that lives longest."""

    records: dict[str, dict[str, tuple[bytes, float]]] = field(default_factory=dict)
    refused: dict[tuple[str, str, bytes], Reason] = field(default_factory=dict)
    """Why, by key, subkey and value: the same record from several peers counts once."""
    neighbours: set[PeerID] = field(default_factory=set)
    asked: list[PeerID] = field(default_factory=list)
    failed: dict[PeerID, str] = field(default_factory=dict)

    def add(self, key: str, found: Found, now: float) -> None:
        merged = self.records.setdefault(key, {})
        for subkey, (value, expires) in found.records.items():
            try:
                open_record(key, subkey, value, expires, now=now)
            except InvalidRecord as error:
                self.refused[key, subkey, value] = error.reason
                continue
            if subkey not in merged or merged[subkey][1] < expires:
                merged[subkey] = (value, expires)
        self.neighbours.update(found.neighbours)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dht.observer", description="What a swarm is doing, from outside.")
    parser.add_argument("--initial-peers", nargs="+", required=True, metavar="ADDR", help="ends in /p2p/<peer id>")
    parser.add_argument("--run", metavar="NAME", help="the name or id of the run; default: the most announced one")
    parser.add_argument("--dial-seconds", type=float, default=10.0, metavar="S", help="for each address; default: 10")
    parser.add_argument("--json", action="store_true", help="print JSON, the only form there is")
    options = parser.parse_args(arguments)
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    try:
        targets = _by_peer(options.initial_peers)
    except ValueError as error:
        parser.error(str(error))
    # py-libp2p runs on trio only.
    config = ObserverConfig(dial_seconds_max=options.dial_seconds)
    answers = anyio.run(observe, targets, options.run, config, time.time, backend="trio")
    for _, reason in sorted(answers.failed.items()):
        print(f"peer: {reason}", file=sys.stderr)
    if not answers.asked:
        print("peer: no peer answers; is one of them running, and can it be reached from here?", file=sys.stderr)
        return NOBODY_REACHABLE
    runs = found_runs(answers.records.get(runs_key(), {}), time.time())
    chosen = chosen_runs(runs, options.run)
    if not chosen:
        names = ", ".join(run.fact.name for run in runs) or "none"
        print(f"peer: there is no such run; those that are announced: {names}", file=sys.stderr)
        return NO_RUN
    print(json.dumps(described(chosen[0], runs, answers, time.time())))
    return OK


def chosen_runs(runs: Sequence[FoundRun], name: str | None) -> list[FoundRun]:
    """Those of this name or id, the most announced first; without a name all."""
    return [run for run in runs if name is None or name in (run.fact.name, run.fact.run_id)]


def described(run: FoundRun, runs: Sequence[FoundRun], answers: Answers, now: float) -> dict[str, Any]:
    """One JSON object; every member in it signed what is said about it."""
    members = read_members(run.fact.run_id, answers, now)
    refused = Counter(answers.refused.values())
    present = {peer: known for peer, known in members.items() if not known[0].left}
    losses = [fact.loss for fact, _ in present.values() if fact.loss is not None]
    return {
        "run_id": run.fact.run_id,
        "name": run.fact.name,
        "creator": run.fact.creator,
        "announcers": len(run.announcers),
        "round": max((fact.round for fact, _ in present.values()), default=None),
        "loss": sum(losses) / len(losses) if losses else None,
        "members": [
            {
                "peer_id": peer,
                "name": fact.name,
                "version": fact.version,
                "round": fact.round,
                "tokens": fact.tokens,
                "loss": fact.loss,
                "head": fact.head.hex(),
                "trains": fact.trains,
                "reachable": fact.reachable,
                "offers": list(fact.offers),
                "expires": expires,
                "expires_in_seconds": round(expires - now, 1),
            }
            for peer, (fact, expires) in sorted(present.items())
        ],
        "refused_records": sum(refused.values()),
        "refused_reasons": dict(refused),
        "other_runs": [
            {"run_id": other.fact.run_id, "name": other.fact.name, "announcers": len(other.announcers)}
            for other in runs
            if other != run
        ],
        "asked": sorted(answers.asked),
        "unreachable": dict(sorted(answers.failed.items())),
    }


def read_members(run_id: str, answers: Answers, now: float) -> dict[PeerID, tuple[MemberFact, float]]:
    """What members say about themselves, and until when they are to be believed."""
    key = members_key(run_id)
    members: dict[PeerID, tuple[MemberFact, float]] = {}
    for subkey, (value, expires) in answers.records.get(key, {}).items():
        try:
            members[PeerID(subkey)] = (MemberFact.decode(open_record(key, subkey, value, expires, now=now)), expires)
        except InvalidRecord as error:
            answers.refused[key, subkey, value] = error.reason
    return members


async def observe(
    targets: Mapping[PeerID, Sequence[str]], name: str | None, config: ObserverConfig, wall_time: Callable[[], float]
) -> Answers:
    """Ask the initial peers, then some members that they named."""
    answers = Answers()
    initial = dict(list(targets.items())[: config.initial_peers_max])
    await _ask_all(initial, name, answers, config, wall_time)
    chosen = chosen_runs(found_runs(answers.records.get(runs_key(), {}), wall_time()), name)
    if chosen:
        members = read_members(chosen[0].fact.run_id, answers, wall_time())
        further = [
            (peer not in answers.neighbours, peer, fact.addresses)
            for peer, (fact, _) in members.items()
            if fact.reachable and fact.addresses and not fact.left and peer not in targets
        ]
        walk = {peer: addresses for _, peer, addresses in sorted(further)[: config.walk_peers_max]}
        await _ask_all(walk, name, answers, config, wall_time)
    return answers


async def _ask_all(
    targets: Mapping[PeerID, Sequence[str]],
    name: str | None,
    answers: Answers,
    config: ObserverConfig,
    wall_time: Callable[[], float],
) -> None:
    async def ask(peer: PeerID, addresses: Sequence[str]) -> None:
        for address in addresses[: config.addresses_max]:
            try:
                with anyio.fail_after(config.peer_seconds_max):
                    await _ask(peer, address, name, answers, config, wall_time)
            except Exception as error:  # py-libp2p raises many kinds, in groups too; none may end the other questions.
                answers.failed[peer] = f"{address}: {_reason(error)}"
            else:
                answers.failed.pop(peer, None)
                answers.asked.append(peer)
                return

    async with anyio.create_task_group() as tasks:
        for peer, addresses in targets.items():
            tasks.start_soon(ask, peer, addresses)


async def _ask(
    peer: PeerID,
    address: str,
    name: str | None,
    answers: Answers,
    config: ObserverConfig,
    wall_time: Callable[[], float],
) -> None:
    """Which runs there are, and who takes part in those that matter."""
    # A host for each address: py-libp2p tries one address of a peer, and if that fails none for a minute.
    host = _host()
    node = ID.from_base58(peer)
    async with host.run(listen_addrs=[]):
        with anyio.fail_after(config.dial_seconds_max):
            await host.connect(PeerInfo(node, [Multiaddr(address)]))
        found = await _find(host, node, runs_key(), config)
        answers.add(runs_key(), found, wall_time())
        runs = chosen_runs(found_runs(found.records, wall_time()), name)
        for run_id in list(dict.fromkeys(run.fact.run_id for run in runs))[: config.runs_max]:
            found = await _find(host, node, members_key(run_id), config)
            answers.add(members_key(run_id), found, wall_time())


def _host() -> Any:
    keys = create_new_key_pair()
    # Never the default security options: they offer plaintext too, over which anybody can pose as any peer.
    noise = NoiseTransport(keys, noise_privkey=create_new_x25519_key_pair().private_key)
    host = new_host(
        key_pair=keys,
        sec_opt={NOISE_PROTOCOL: noise},
        muxer_opt=create_yamux_muxer_option(),
        listen_addrs=[],
    )
    host.get_network().retry_config = RetryConfig(max_retries=0)
    return host


async def _find(host: Any, node: Any, key: str, config: ObserverConfig) -> Found:
    call_id = uuid.uuid4().bytes
    with anyio.fail_after(config.call_seconds_max):
        stream = await host.new_stream(node, [FIND_PROTOCOL])
        try:
            # Without closing our side: p2pd takes the end of the stream for a cancelled call.
            await stream.write(encode_find(call_id, node.to_bytes(), key_id(key)))
            return decode_found(call_id, await _read_message(stream))
        finally:
            with anyio.move_on_after(1, shield=True):
                await stream.close()


async def _read_message(stream: Any) -> bytes:
    received = bytearray()
    while len(received) <= MESSAGE_BYTES_MAX + _READ_BYTES:
        if frame := frame_length(bytes(received[:16])):
            start, length = frame
            if len(received) >= start + length:
                return bytes(received[start : start + length])
        chunk = await stream.read(_READ_BYTES)
        if not chunk:
            break
        received += chunk
    raise InvalidAnswer("the stream ended within an answer")


def _by_peer(addresses: Sequence[str]) -> dict[PeerID, list[str]]:
    targets: dict[PeerID, list[str]] = {}
    for address in addresses:
        peer = address.rpartition("/p2p/")[2]
        try:
            parse_peer_id(peer)
            Multiaddr(address)
        except (InvalidRecord, MultiaddrError, ValueError) as error:
            raise ValueError(f"{address!r} is no multiaddress that ends in /p2p/<peer id>") from error
        targets.setdefault(PeerID(peer), []).append(address)
    return targets


def _reason(error: BaseException) -> str:
    """The first cause in nested groups and chains, in one line."""
    while inner := getattr(error, "exceptions", None):
        error = inner[0]
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, SwarmException):
        return "nobody answers there under that name"
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main())
