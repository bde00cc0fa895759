"""Memory and processes of a peer, and what it leaves behind; read from Linux's /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def processes_below(process_id: int) -> list[int]:
    """All living descendants."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may hold anything; after it: state, parent.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(path.parent.name))
    found, ahead = [], [process_id]
    while ahead:
        below = sorted(children.get(ahead.pop(), []))
        found += below
        ahead += below
    return found


def name_of(process_id: int) -> str:
    with suppress(OSError):
        return (PROC / str(process_id) / "comm").read_text().strip()
    return ""


def resident_bytes(process_id: int) -> int:
    """Resident memory, shared libraries included; 0 if the process has ended."""
    with suppress(OSError):
        for line in (PROC / str(process_id) / "status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def processes_of(mark: str) -> list[int]:
    """All living processes in whose environment `mark` stands: whoever inherited it, even if its parent is gone."""
    found = []
    for path in PROC.glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return sorted(found)


def shared_memory() -> set[str]:
    """Names of the shared-memory files of this machine."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
