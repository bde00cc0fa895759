"""The state itself, for those who join late or fell far behind: served in hashed chunks, by any peer that has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import msgpack
from anyio.abc import ByteStream

from averaging.record import Hash, Malformed, as_bytes, as_hash, as_integer, as_list, sha256, unpack_list
from network.framing import STREAM_ERRORS, FrameReader, send_frame
from network.seam import Network, PeerID, PeerUnreachable

PROTOCOL = "/peer/snapshot/1"
_MANIFEST_BYTES_MAX = 1024 * 1024
_NAME_BYTES_MAX = 64
_FILES_MAX = 8


@final
@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Limits of one transfer."""

    bytes_max: int
    chunk_bytes: int = 512 * 1024
    frame_seconds_max: float = 30.0
    """A donor that sends nothing for so long is given up."""
    served_max: int = 4
    """Transfers that a donor serves at a time; others are told that it has none, and ask elsewhere."""


@final
@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state after the record `head`, as named files (safetensors)."""

    head: Hash
    files: Mapping[str, bytes]


class SnapshotFailed(Exception):
    """This donor cannot or will not send a whole snapshot; another may."""


async def serve_snapshots(
    network: Network, run_id: str, newest: Callable[[], Snapshot | None], config: SnapshotConfig
) -> None:
    """Sends `newest()` to whoever opens the protocol."""

    serving = 0

    async def handler(peer: PeerID, stream: ByteStream) -> None:
        nonlocal serving
        snapshot = newest() if serving < config.served_max else None
        serving += 1
        try:
            await send(stream, snapshot)
        finally:
            serving -= 1

    async def send(stream: ByteStream, snapshot: Snapshot | None) -> None:
        files = [] if snapshot is None else [[n, len(d), sha256(d)] for n, d in sorted(snapshot.files.items())]
        head = b"" if snapshot is None else snapshot.head
        try:
            await send_frame(stream, msgpack.packb([head, files]), seconds_max=config.frame_seconds_max)
            for _, data in sorted(snapshot.files.items()) if snapshot is not None else []:
                for at in range(0, len(data), config.chunk_bytes):
                    chunk = data[at : at + config.chunk_bytes]
                    await send_frame(stream, chunk, seconds_max=config.frame_seconds_max)
            await stream.send_eof()
        except STREAM_ERRORS:
            return  # The asker went away.

    await network.serve(f"{PROTOCOL}/{run_id[:16]}", handler)


async def fetch_snapshot(
    network: Network,
    run_id: str,
    donor: PeerID,
    config: SnapshotConfig,
    is_wanted: Callable[[Hash], bool] = lambda head: True,
) -> Snapshot:
    """The donor's newest snapshot, each file checked against its announced hash; raises `SnapshotFailed`.

    `is_wanted` is asked about its head before the files are received.

    Whether it is the run's state is for the caller to check, by the fingerprint that a certified record attests.
    """
    try:
        stream = await network.open_stream(donor, f"{PROTOCOL}/{run_id[:16]}")
    except PeerUnreachable as error:
        raise SnapshotFailed(f"{donor} cannot be reached: {error}") from error
    try:
        reader = FrameReader(stream, max(_MANIFEST_BYTES_MAX, config.chunk_bytes))
        head, files = _parse_manifest(await reader.receive(config.frame_seconds_max), config)
        if not is_wanted(head):
            raise SnapshotFailed("it is of a round that nothing certifies here")
        return Snapshot(head, {name: await _receive_file(reader, *file, config) for name, file in files.items()})
    except STREAM_ERRORS as error:
        raise SnapshotFailed(f"{donor} broke off: {error}") from error
    except Malformed as error:
        raise SnapshotFailed(f"{donor} sent {error}") from error
    finally:
        await stream.aclose()


def _parse_manifest(data: bytes, config: SnapshotConfig) -> tuple[Hash, dict[str, tuple[int, Hash]]]:
    head, entries = unpack_list(data, "manifest", _MANIFEST_BYTES_MAX, 2)
    if head == b"":
        raise Malformed("manifest: it has no snapshot to give now")
    files: dict[str, tuple[int, Hash]] = {}
    for entry in as_list(entries, "manifest.files", _FILES_MAX):
        fields: list[Any] = as_list(entry, "manifest.file", 3, exact=True)
        name = fields[0]
        if not isinstance(name, str) or not 0 < len(name) <= _NAME_BYTES_MAX:
            raise Malformed(f"manifest: {name!r} is no file name")
        files[name] = as_integer(fields[1], "manifest.size", config.bytes_max), as_hash(fields[2], "manifest.hash")
    if sum(size for size, _ in files.values()) > config.bytes_max:
        raise Malformed(f"manifest: more than {config.bytes_max} bytes")
    return as_hash(head, "manifest.head"), files


async def _receive_file(reader: FrameReader, size: int, digest: Hash, config: SnapshotConfig) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = await reader.receive(config.frame_seconds_max)
        data += as_bytes(chunk, "chunk", min(config.chunk_bytes, size - len(data)))
        if not chunk:
            raise Malformed("chunk: empty")
    if sha256(bytes(data)) != digest:
        raise Malformed("file: its hash is not the announced one")
    return bytes(data)
