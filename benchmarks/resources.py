"""Memory and processes of a peer, read from Linux's /proc."""

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
