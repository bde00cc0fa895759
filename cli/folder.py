"""Which folder a peer keeps its state in, held by one process at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

LOCK_FILE = "lock"
PEERS_MAX = 100
"""So many peers of one kind may share the default folder's parent before the user has to name folders."""


def home(environment: os._Environ[str] = os.environ) -> Path:
    return Path(environment.get("PEER_HOME") or Path.home() / ".peer")


@contextmanager
def claimed(folder: Path | None, kind: str) -> Iterator[Path]:
    """The folder to use, locked until the end: `folder`, or else the first free of `KIND`, `KIND-2`, ... under `home`.

    So a second peer on the machine needs no option, and one that is started again is the one that it was. Raises
    `ValueError` when another process holds it. The lock goes with the process, however it dies.
    """
    chosen, lock = _claim(folder, kind)
    try:
        yield chosen
    finally:
        lock.close()


def _claim(folder: Path | None, kind: str) -> tuple[Path, IO[str]]:
    if folder is not None:
        lock = _lock(folder)
        if lock is None:
            raise ValueError(
                f"--folder {folder}: another process of this machine is this peer; stop it or take another"
            )
        return folder, lock
    for number in range(1, PEERS_MAX + 1):
        candidate = home() / (kind if number == 1 else f"{kind}-{number}")
        lock = _lock(candidate)
        if lock is not None:
            return candidate, lock
    raise ValueError(f"{PEERS_MAX} peers run from {home()} already; name another with --folder")


def _lock(folder: Path) -> IO[str] | None:
    """The open lock file; None if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK_FILE, "a")  # noqa: SIM115  (the caller closes it)
    except OSError as error:
        raise ValueError(f"--folder {folder}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
