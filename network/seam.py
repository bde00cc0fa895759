"""The `Network` seam: who I am, open a byte stream to a peer, serve a protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import NewType

from anyio.abc import ByteStream

PeerID = NewType("PeerID", str)
"""A libp2p peer id in base58 text: the public key of an Ed25519 identity, so it verifies signatures by itself."""

Handler = Callable[[PeerID, ByteStream], Awaitable[None]]
"""Called with the authenticated id of the caller and a stream; the stream is closed when it returns."""


class PeerUnreachable(Exception):
    """The stream could not be opened: no route, no such protocol there, or the deadline passed."""


class Network(ABC):
    """Streams are ordered and authenticated, but a peer's death may look like a normal end: use `framing` on top.

    Streams raise anyio's `EndOfStream`, `BrokenResourceError` and `ClosedResourceError`, nothing else.
    """

    @property
    @abstractmethod
    def peer_id(self) -> PeerID: ...

    @abstractmethod
    async def open_stream(self, peer: PeerID, protocol: str) -> ByteStream:
        """Raises `PeerUnreachable`, within the network's own dial limit.

        A stream to a peer that has just gone may open nevertheless; it breaks when it is used.
        """

    @abstractmethod
    async def serve(self, protocol: str, handler: Handler) -> None:
        """From now on, hand streams that others open with `protocol` to `handler`, each in a task of its own.

        What the handler raises is logged and ends that stream only.
        """

    @abstractmethod
    def introduce(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """A hint where `peer` may be dialled (multiaddresses); wrong hints do no harm."""

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Where others may dial this peer, as multiaddresses ending in `/p2p/<peer id>`."""
