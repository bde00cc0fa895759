"""The control protocol of p2pd: varint-delimited protobuf messages on its unix socket, then raw bytes.

hivemind's own client speaks it too, but keeps the socket of a cancelled or refused dial open; here each socket is
closed by whoever opened it, and anyio's socket is the stream, without another task and buffer between.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream, UNIXSocketStream
from hivemind.p2p import PeerID as LibraryPeerID
from hivemind.proto.p2pd_pb2 import (
    ConnectRequest,
    Request,
    Response,
    StreamHandlerRequest,
    StreamInfo,
    StreamOpenRequest,
)
from hivemind.utils.multiaddr import Multiaddr

from network.seam import PeerID

MESSAGE_BYTES_MAX = 1 << 20
_VARINT_BYTES_MAX = 4


class DaemonError(Exception):
    """The daemon refused a request."""


class DaemonGone(DaemonError):
    """The daemon does not answer: it has died, or is about to."""


async def open_stream(daemon: Path, peer: PeerID, protocol: str) -> UnixStream:
    """Raises `DaemonError`; a deadline is the caller's to set."""
    target = LibraryPeerID.from_base58(peer).to_bytes()
    request = Request(type=Request.STREAM_OPEN, streamOpen=StreamOpenRequest(peer=target, proto=[protocol]))
    stream = await _connect(daemon)
    opened = False
    try:
        await _exchange(stream, request)
        opened = True
    finally:
        if not opened:
            await stream.aclose()
    return stream


async def connect(daemon: Path, peer: PeerID, addresses: Sequence[str]) -> None:
    """Connect to `peer` at one of `addresses`, with or without its id at the end.

    Raises `DaemonError`, and `ValueError` for what is no address.
    """
    target = LibraryPeerID.from_base58(peer).to_bytes()
    encoded = [Multiaddr(address.removesuffix(f"/p2p/{peer}")).to_bytes() for address in addresses]
    await _request(daemon, Request(type=Request.CONNECT, connect=ConnectRequest(peer=target, addrs=encoded)))


async def register(daemon: Path, protocol: str, listener: Path) -> None:
    """Have the daemon connect to the unix socket `listener` for each stream that others open with `protocol`."""
    handler = StreamHandlerRequest(addr=Multiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False)
    await _request(daemon, Request(type=Request.STREAM_HANDLER, streamHandler=handler))


async def identify(daemon: Path) -> tuple[PeerID, list[str]]:
    """The daemon's peer id and the addresses it believes to have."""
    answer = await _request(daemon, Request(type=Request.IDENTIFY))
    peer = LibraryPeerID(answer.identify.id).to_base58()
    return PeerID(peer), [str(Multiaddr(address)) for address in answer.identify.addrs]


async def accept(stream: UnixStream) -> tuple[PeerID, str]:
    """Who opened a stream that the daemon hands over, and with which protocol."""
    info = StreamInfo()
    info.ParseFromString(await _receive_message(stream))
    return PeerID(LibraryPeerID(info.peer).to_base58()), str(info.proto)


@final
class UnixStream(ByteStream):
    """A unix socket; closing it never waits, and wakes who waits on it.

    It has no half-close: the daemon would end both directions.
    """

    def __init__(self, stream: SocketStream | UNIXSocketStream) -> None:
        self._stream = stream
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        try:
            return await self._stream.receive(max_bytes)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            if self._closed:
                raise anyio.ClosedResourceError from None
            raise

    async def send(self, item: bytes) -> None:
        try:
            await self._stream.send(item)
        except anyio.BrokenResourceError:
            if self._closed:
                raise anyio.ClosedResourceError from None
            raise

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            # Wakes a task that waits in receive or send, while its socket still is a socket.
            with suppress(OSError):
                self._stream.extra(SocketAttribute.raw_socket).shutdown(socket.SHUT_RDWR)
            await anyio.lowlevel.checkpoint()
            await self._stream.aclose()


async def _request(daemon: Path, request: Any) -> Any:
    stream = await _connect(daemon)
    try:
        return await _exchange(stream, request)
    finally:
        await stream.aclose()


async def _connect(daemon: Path) -> UnixStream:
    try:
        return UnixStream(await anyio.connect_unix(str(daemon)))
    except OSError as error:
        raise DaemonGone(f"the daemon does not answer: {error}") from error


async def _exchange(stream: UnixStream, request: Any) -> Any:
    """Send `request` and return the daemon's answer to it."""
    message = request.SerializeToString()
    answer = Response()
    try:
        await stream.send(_encode_varint(len(message)) + message)
        answer.ParseFromString(await _receive_message(stream))
    except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
        raise DaemonGone("the daemon closed the connection") from error
    if answer.type == Response.ERROR:
        raise DaemonError(answer.error.msg)
    return answer


async def _receive_message(stream: ByteStream) -> bytes:
    """One message, and not a byte of what follows it."""
    num_bytes = 0
    for place in range(_VARINT_BYTES_MAX):
        byte = (await stream.receive(1))[0]
        num_bytes |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    if num_bytes > MESSAGE_BYTES_MAX:
        raise DaemonError(f"a message of {num_bytes} bytes from the daemon")
    message = b""
    while len(message) < num_bytes:
        message += await stream.receive(num_bytes - len(message))
    return message


def _encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
