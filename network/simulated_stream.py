"""One end of a simulated stream, the port through which a peer's streams share its bandwidth, and the tap on them."""

from __future__ import annotations

import asyncio
import enum
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import anyio
from anyio.abc import ByteStream

from network.framing import PromptStream
from network.seam import PeerID


class Tap(ABC):
    """Sees all that is sent in a world, one `send` at a time, and decides how it fares."""

    @abstractmethod
    def fate(self, source: PeerID, target: PeerID, protocol: str, data: bytes) -> Sequence[float]:
        """How many seconds later than usual each copy of `data` arrives: (0.0,) is once, in time."""

    @abstractmethod
    def sent(self, source: PeerID, target: PeerID, protocol: str, data: bytes) -> None:
        """`data` is on its way; whoever crashes now has sent it."""


@dataclass(eq=False)
class Port:
    """A peer's side of the world."""

    peer: PeerID
    rng: random.Random
    uplink_bytes_per_second: float
    downlink_bytes_per_second: float
    stream_bytes_max: int
    count_sent: Callable[[PeerID, int], None]
    count_received: Callable[[PeerID, int], None]
    tap: Tap | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    uplink_free: float = 0.0
    """The loop time at which all that was sent will have left."""
    downlink_free: float = 0.0
    streams: dict[SimulatedStream, None] = field(default_factory=dict)
    """The open ones, oldest first (a set would have no order to rely on)."""


class _Signal(enum.Enum):
    END = "no more data comes"
    GONE = "no more data comes, and nobody reads"
    BREAK = "the stream is broken"


@final
class SimulatedStream(ByteStream, PromptStream):
    """Data on the way to this end waits in `_travelling`, in order; each item has a timer that takes the oldest."""

    other: SimulatedStream

    def __init__(self, port: Port, delay_seconds: float, jitter_seconds: float, protocol: str = "") -> None:
        self.protocol = protocol
        self._port = port
        self._delay_seconds = delay_seconds
        self._jitter_seconds = jitter_seconds
        self._window = port.stream_bytes_max
        self._travelling: deque[tuple[float, bytes | _Signal]] = deque()  # With the times at which they leave.
        self._landing: deque[bytes | _Signal] = deque()
        self._arrived: deque[bytes] = deque()
        self._last_arrival = 0.0
        self._cut_since: float | None = None
        self._num_overdue = 0
        self._closed = False
        self._end_sent = False
        self._ended = False
        self._broken = False
        self._nobody_reads = False
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        port.streams[self] = None

    @property
    def peer(self) -> PeerID:
        return self._port.peer

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._arrived:
            self._check_usable()
            if self._ended:
                raise anyio.EndOfStream
            if self._receiver is not None:
                raise anyio.BusyResourceError("receiving from")
            self._receiver = self._port.loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None
        if self._closed:
            raise anyio.ClosedResourceError
        chunk = self._arrived.popleft()
        if len(chunk) > max_bytes:
            self._arrived.appendleft(chunk[max_bytes:])
            chunk = chunk[:max_bytes]
        self.other._open_window(len(chunk))
        return chunk

    def send_at_once(self, item: bytes) -> bool:
        if self._sender is not None or len(item) > self._window:
            return False
        self._check_sendable()
        self._window -= len(item)
        self._hand_over(item)
        return True

    async def send(self, item: bytes) -> None:
        if self._sender is not None:
            raise anyio.BusyResourceError("sending to")
        self._check_sendable()
        start = 0
        while start < len(item):
            if self._window <= 0:
                self._sender = self._port.loop.create_future()
                try:
                    await self._sender
                finally:
                    self._sender = None
                self._check_sendable()
                continue
            end = min(len(item), start + self._window)
            self._window -= end - start
            self._hand_over(bytes(item if start == 0 and end == len(item) else item[start:end]))
            start = end

    async def send_eof(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._end_sent and not self._broken:
            self._end_sent = True
            self._post(_Signal.END)

    async def aclose(self) -> None:
        self.close()
        await anyio.lowlevel.checkpoint()

    def close(self) -> None:
        """What was sent arrives; then the other end reads an end, and its sends break."""
        if not self._closed:
            if not self._broken:
                self._post(_Signal.GONE)
            self._closed = True
            self._drop()

    def crash(self) -> None:
        """Break this end now; the other one gets what had left the uplink, then an end or a break, by chance."""
        now = self._port.loop.time()
        travelling = self.other._travelling
        while travelling and travelling[-1][0] > now:
            travelling.pop()
        if not self._broken and not self._closed:
            self._post(_Signal.GONE if self._port.rng.random() < 0.5 else _Signal.BREAK)
        self._break()

    def break_both(self) -> None:
        self._break()
        self.other._break()

    def set_cut(self, is_cut: bool) -> None:
        """Hold back what arrives at this end, or go on."""
        loop = self._port.loop
        if is_cut and self._cut_since is None:
            self._cut_since = loop.time()
        elif not is_cut:
            self._cut_since = None
            for _ in range(self._num_overdue):
                loop.call_later(self._delay_seconds, self._arrive)
            self._num_overdue = 0

    def is_stalled(self, seconds: float) -> bool:
        return self._cut_since is not None and self._port.loop.time() >= self._cut_since + seconds

    def _hand_over(self, item: bytes) -> None:
        tap, port = self._port.tap, self._port
        if tap is None:
            self._post(item)
            return
        target = self.other.peer
        for seconds in tap.fate(port.peer, target, self.protocol, item):
            self._post(item, seconds)
        tap.sent(port.peer, target, self.protocol, item)

    def _post(self, item: bytes | _Signal, late_seconds: float = 0.0) -> None:
        """Send `item` on its way: through the uplink, after all that waits there, then along the link."""
        port = self._port
        leaves = now = port.loop.time()
        if isinstance(item, bytes):
            leaves = port.uplink_free = max(now, port.uplink_free) + len(item) / port.uplink_bytes_per_second
            port.count_sent(port.peer, len(item))
        arrival = leaves + self._delay_seconds + late_seconds
        if self._jitter_seconds:
            arrival += self._jitter_seconds * port.rng.random()
        other = self.other
        arrival = other._last_arrival = max(arrival, other._last_arrival)
        other._travelling.append((leaves, item))
        port.loop.call_at(arrival, other._arrive)

    def _arrive(self) -> None:
        if self._cut_since is not None:
            self._num_overdue += 1
            return
        if not self._travelling:  # A crash took it back.
            return
        _, item = self._travelling.popleft()
        port = self._port
        if port.downlink_bytes_per_second == float("inf"):
            self._take(item)
            return
        now = port.loop.time()
        free = max(now, port.downlink_free)
        if isinstance(item, bytes):
            free = port.downlink_free = free + len(item) / port.downlink_bytes_per_second
        self._landing.append(item)
        port.loop.call_at(free, self._land)

    def _land(self) -> None:
        self._take(self._landing.popleft())

    def _take(self, item: bytes | _Signal) -> None:
        if self._closed or self._broken:
            return
        if isinstance(item, bytes):
            self._port.count_received(self._port.peer, len(item))
            self._arrived.append(item)
        elif item is _Signal.BREAK:
            self._break()
        else:
            self._ended = True
            if item is _Signal.GONE:
                self._nobody_reads = True
                _wake(self._sender)
        _wake(self._receiver)

    def _open_window(self, num_bytes: int) -> None:
        self._window += num_bytes
        _wake(self._sender)

    def _break(self) -> None:
        self._broken = True
        self._drop()

    def _drop(self) -> None:
        self._arrived.clear()
        self._port.streams.pop(self, None)
        _wake(self._receiver)
        _wake(self._sender)

    def _check_usable(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if self._broken:
            raise anyio.BrokenResourceError

    def _check_sendable(self) -> None:
        self._check_usable()
        if self._end_sent:
            raise anyio.ClosedResourceError
        if self._nobody_reads:
            raise anyio.BrokenResourceError


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
