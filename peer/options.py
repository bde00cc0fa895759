"""What a caller decides about one peer: the options of `peer.run.run_peer` and `peer.bootstrap.run_bootstrap`.

Both functions return when their work is done, raise `KeyboardInterrupt` after a clean leave on SIGINT or SIGTERM, and
else raise what `peer.errors` names, or `ValueError` for an option that cannot be.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from dht.record import InvalidRecord, parse_peer_id

PORT_MAX = 65535
IDENTITY_FILE = "identity.key"
"""In a peer's folder: who loses it loses the peer id, and with it the name and the credit that others know."""
DEVICES = ("auto", "cpu", "cuda", "mps")
"""What may stand before an optional `:index`; `auto` takes an accelerator if there is one."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """One training peer. With `spec_file` it starts a run (or resumes it, if `folder` holds it); without, it joins one.

    A joiner without `initial_peers` goes to the peers that it remembers in `folder`.
    """

    folder: Path
    """Identity, log, snapshots, remembered peers; the caller holds its lock."""
    spec_file: Path | None = None
    run: str | None = None
    """The name or the id of the run to join; None is fine where the swarm trains exactly one."""
    initial_peers: tuple[str, ...] = ()
    """Multiaddresses ending in `/p2p/<peer id>`; any one that answers is enough."""
    host: str = "0.0.0.0"
    """The IP address to listen on."""
    port: int = 0
    """The TCP port to listen on; 0 lets the system choose."""
    announce: tuple[str, ...] = ()
    """Places to announce instead of those found, such as that of a router with a forwarded port: /ip4/.../tcp/..."""
    data: tuple[Path, ...] = ()
    """Files and folders of text to train on instead of the run's own default."""
    device: str = "auto"
    precision: str = "auto"
    """Of the products in training: fp32, bf16, or auto, which is bf16 on a CUDA device that has it."""
    micro_batch: int = 0
    """So many sequences go through the model at once, where memory is short; 0: the whole batch."""
    name: str = ""
    """What others see beside the peer id."""
    rounds_max: int | None = None
    """Leave after taking part in this many committed rounds; None stays until the run's own goal."""
    linger_seconds: float = 0.0
    """Stay at least so long after the run's goal, for peers that are down just then."""
    json_events: bool = False
    """Print one JSON object a line on stdout instead of text."""

    def __post_init__(self) -> None:
        _check_listening(self.port, self.initial_peers, self.announce)
        _check_rounds("rounds_max", self.rounds_max)
        if self.micro_batch < 0:
            raise ValueError(f"micro_batch {self.micro_batch} is less than 0")
        if self.device.partition(":")[0] not in DEVICES:
            raise ValueError(
                f"device {self.device!r} is unknown; choose one of {', '.join(DEVICES)}, or cuda:1 and so on"
            )


@dataclass(frozen=True, slots=True)
class BootstrapOptions:
    """One entry point: it introduces peers to each other and trains nothing."""

    folder: Path
    host: str = "0.0.0.0"
    port: int = 0
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    """Other entry points of the same swarm, if any."""
    json_events: bool = False

    def __post_init__(self) -> None:
        _check_listening(self.port, self.initial_peers, self.announce)


def _check_listening(port: int, initial_peers: tuple[str, ...], announce: tuple[str, ...]) -> None:
    if not 0 <= port <= PORT_MAX:
        raise ValueError(f"port {port} is not in 0..{PORT_MAX}")
    for address in initial_peers:
        check_address(address)
    for place in announce:
        check_place(place)


def check_address(address: str) -> None:
    """Raises `ValueError` unless `address` has the form `/ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...`."""
    example = "an address looks like /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo... (a running peer prints its own)"
    if "," in address:
        raise ValueError(f"address {address!r}: several have spaces between them, no commas; {example}")
    parts = address.split("/")
    if parts[0] != "" or len(parts) < 3 or not all(parts[1:]):
        raise ValueError(f"address {address!r} is not a multiaddress; {example}")
    if parts[-2] != "p2p":
        raise ValueError(
            f"address {address!r} does not end in /p2p/<peer id>, so nobody could be recognised there; {example}"
        )
    try:
        parse_peer_id(parts[-1])
    except InvalidRecord as error:
        raise ValueError(f"address {address!r} ends in no peer id ({error}); {example}") from error
    if not _is_host(*parts[1:3]):
        raise ValueError(f"address {address!r} does not begin with a host; {example}")


def _is_host(kind: str, host: str) -> bool:
    if kind not in ("ip4", "ip6"):
        return kind in ("dns", "dns4", "dns6")
    try:
        return ipaddress.ip_address(host).version == int(kind[2:])
    except ValueError:
        return False


def check_place(place: str) -> None:
    """Raises `ValueError` unless `place` has the form `/ip4/203.0.113.7/tcp/31337`; a peer id behind it is fine."""
    parts = place.split("/")
    if parts[0] != "" or "tcp" not in parts[1:] or not all(parts[1:]):
        raise ValueError(f"address {place!r} is not a place to be reached; it looks like /ip4/203.0.113.7/tcp/31337")


def _check_rounds(field: str, rounds: int | None) -> None:
    if rounds is not None and rounds < 1:
        raise ValueError(f"{field} {rounds} is less than 1")
