"""The tasks behind an open network: their group, and the root of every stream handler."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteStream, TaskGroup

from network.framing import STREAM_ERRORS
from network.seam import Handler, PeerID

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_background() -> AsyncIterator[TaskGroup]:
    """A task group that is cancelled when the body ends.

    What the body raises passes as it is; only what a background task raises comes as an exception group.
    """
    raised: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # Raised again below, outside the group, which would wrap it.
            raised = error
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised


async def run_handler(handler: Handler, peer: PeerID, stream: ByteStream) -> None:
    """Run `handler` and close `stream`; what it raises is logged and goes no further."""
    try:
        await handler(peer, stream)
    except STREAM_ERRORS as error:
        logger.debug("a stream from %s failed: %r", peer, error)
    except Exception:
        logger.exception("the handler of a stream from %s failed", peer)
    finally:
        await stream.aclose()
