"""What the network daemon really sent and received by TCP, asked of Linux's socket diagnostics."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, final

import anyio

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_INET_DIAG_INFO = 2
_ALL_STATES = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2: family, protocol, extensions, states, any socket
_INODE_OFFSET = 68  # in inet_diag_msg
_MESSAGE_BYTES = 72
_ATTRIBUTE = struct.Struct("=HH")  # length, type
# In tcp_info, in bytes. tcpi_bytes_sent (since Linux 4.19) counts what is sent again as well.
_BYTES_RECEIVED_OFFSET = 128
_BYTES_SENT_OFFSET = 200
_DATAGRAM_BYTES_MAX = 1 << 18
_ANSWER_SECONDS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes since the meter was made, and before it for connections that were open then."""

    bytes_sent: int = 0
    bytes_received: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes_sent + other.bytes_sent, self.bytes_received + other.bytes_received)


@final
class TrafficMeter:
    """Counts the TCP payload of one process's connections: ours, its encryption, multiplexing and peer discovery.

    Repeated segments count again; TCP, IP and link headers do not (about 3 % more); loopback counts like any other.
    A closed connection keeps its last sample, so what it sent after that is missing: sample every second. Works as any
    user, on Linux from 4.19; elsewhere `available` is False and all counts stay 0.
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._ended = Traffic()
        self._open: dict[int, Traffic] = {}
        self.available = True
        self.sample()

    def follow(self, process_id: int) -> None:
        """Count on with another process, such as the daemon after a restart."""
        self._process_id = process_id

    def sample(self) -> Traffic:
        """The counts now; a few milliseconds."""
        now: dict[int, Traffic] = {}
        try:
            inodes = _socket_inodes(self._process_id)
            if inodes:
                now = {inode: traffic for inode, traffic in _tcp_sockets() if inode in inodes}
        except ProcessLookupError:
            pass  # It has ended, and all its connections with it.
        except OSError:
            self.available = False
            return self.total
        for inode, last in self._open.items():
            if inode not in now:
                self._ended += last
        self._open = now
        return self.total

    @property
    def total(self) -> Traffic:
        """The counts at the last sample."""
        return sum(self._open.values(), self._ended)

    async def keep_sampling(self, every_seconds: float = 1.0) -> NoReturn:
        while True:
            self.sample()
            await anyio.sleep(every_seconds)


def _socket_inodes(process_id: int) -> set[int]:
    """The inodes of the sockets that a process has open; raises `ProcessLookupError` if there is no such process."""
    folder = f"/proc/{process_id}/fd"
    inodes = set()
    try:
        names = os.listdir(folder)
    except FileNotFoundError as error:
        if os.path.exists("/proc/self/fd"):
            raise ProcessLookupError(process_id) from error
        raise
    for name in names:
        with suppress(FileNotFoundError):  # Closed since the listing.
            target = os.readlink(f"{folder}/{name}")
            if target.startswith("socket:["):
                inodes.add(int(target[len("socket:[") : -1]))
    return inodes


def _tcp_sockets() -> Iterator[tuple[int, Traffic]]:
    """Inode and counts of every TCP socket of this network namespace."""
    family = getattr(socket, "AF_NETLINK", None)
    if family is None:
        raise OSError("this system has no netlink")
    with socket.socket(family, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as diagnostics:
        diagnostics.settimeout(_ANSWER_SECONDS_MAX)
        for address_family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(address_family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _ALL_STATES)
            header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
            diagnostics.sendall(header + body)
            more = True
            while more:
                datagram = diagnostics.recv(_DATAGRAM_BYTES_MAX)
                more = False
                for kind, message in _messages(datagram):
                    more = kind != _NLMSG_DONE
                    if kind == _NLMSG_ERROR:
                        raise OSError("the kernel refuses socket diagnostics")
                    if kind == _SOCK_DIAG_BY_FAMILY:
                        yield _parse(message)


def _messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place + _HEADER.size <= len(datagram):
        length, kind, *_ = _HEADER.unpack_from(datagram, place)
        yield kind, datagram[place + _HEADER.size : place + length]
        place += max(_HEADER.size, length + 3 & ~3)


def _parse(message: bytes) -> tuple[int, Traffic]:
    (inode,) = struct.unpack_from("=I", message, _INODE_OFFSET)
    place = _MESSAGE_BYTES
    while place + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, place)
        info = message[place + _ATTRIBUTE.size : place + length]
        if kind == _INET_DIAG_INFO and len(info) >= _BYTES_SENT_OFFSET + 8:
            (received,) = struct.unpack_from("=Q", info, _BYTES_RECEIVED_OFFSET)
            (sent,) = struct.unpack_from("=Q", info, _BYTES_SENT_OFFSET)
            return inode, Traffic(sent, received)
        place += max(_ATTRIBUTE.size, length + 3 & ~3)
    return inode, Traffic()
