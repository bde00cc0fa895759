"""The `Storage` seam: what one peer must find again after a crash; and the real one, files in a folder."""

from __future__ import annotations

import os
import shutil
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

import anyio.to_thread

_LENGTH_BYTES = 4
_FRAME_HEADER_BYTES = _LENGTH_BYTES + 4


class DamagedStorage(Exception):
    """What was durable is no longer whole."""


@final
@dataclass(frozen=True, slots=True)
class Saved:
    """All that survived: entries in the order written, and the newest snapshot's files by name, if there is one."""

    log: list[bytes]
    journal: list[bytes]
    snapshot: dict[str, bytes] | None


class Storage(ABC):
    """Two append-only files and a snapshot. What an awaited call wrote survives any crash after it; a call cut short
    leaves a prefix of its entries, journal before log.
    """

    @abstractmethod
    async def load(self) -> Saved: ...

    @abstractmethod
    async def append(self, journal: Sequence[bytes], log: Sequence[bytes]) -> None:
        """Durably, the journal's entries before the log's."""

    @abstractmethod
    async def save_snapshot(self, files: Mapping[str, bytes], journal: Sequence[bytes]) -> None:
        """Atomically replaces the snapshot, then begins the journal anew with the given entries."""


@final
class FileStorage(Storage):
    """A folder with `log`, `journal` and `snapshot/`; one process at a time may use it (the caller sees to that)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, BinaryIO] = {}

    async def load(self) -> Saved:
        return await anyio.to_thread.run_sync(self._load)

    async def append(self, journal: Sequence[bytes], log: Sequence[bytes]) -> None:
        await anyio.to_thread.run_sync(self._append, journal, log)

    async def save_snapshot(self, files: Mapping[str, bytes], journal: Sequence[bytes]) -> None:
        await anyio.to_thread.run_sync(self._save_snapshot, files, journal)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _load(self) -> Saved:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.close()
        entries = {name: _read_frames(self.folder / name) for name in ("log", "journal")}
        self._files = {name: open(self.folder / name, "ab") for name in entries}  # noqa: SIM115
        _sync_folder(self.folder)
        current = self.folder / "snapshot"
        if not current.exists() and (self.folder / "snapshot.old").exists():
            (self.folder / "snapshot.old").rename(current)  # A crash came between the two renames of a save.
        snapshot = {f.name: f.read_bytes() for f in sorted(current.iterdir())} if current.exists() else None
        return Saved(entries["log"], entries["journal"], snapshot)

    def _append(self, journal: Sequence[bytes], log: Sequence[bytes]) -> None:
        for name, entries in (("journal", journal), ("log", log)):
            if entries:
                file = self._files[name]
                file.write(_frame(entries))
                file.flush()
                os.fsync(file.fileno())

    def _save_snapshot(self, files: Mapping[str, bytes], journal: Sequence[bytes]) -> None:
        current, new, old = (self.folder / name for name in ("snapshot", "snapshot.new", "snapshot.old"))
        for stale in (new, old):
            shutil.rmtree(stale, ignore_errors=True)
        new.mkdir()
        for name, data in files.items():
            _write_durably(new / name, data)
        _sync_folder(new)
        if current.exists():
            current.rename(old)
        new.rename(current)
        _sync_folder(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        draft = self.folder / "journal.new"
        _write_durably(draft, _frame(journal) if journal else b"")
        draft.rename(self.folder / "journal")
        _sync_folder(self.folder)
        self._files["journal"].close()
        self._files["journal"] = open(self.folder / "journal", "ab")  # noqa: SIM115


def _frame(entries: Sequence[bytes]) -> bytes:
    """The entries of one write, which are on disk together or not at all."""
    body = b"".join(len(entry).to_bytes(_LENGTH_BYTES, "big") + entry for entry in entries)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + zlib.crc32(body).to_bytes(4, "big") + body


def _read_frames(path: Path) -> list[bytes]:
    """The entries of a file; a torn last write (a crash in its middle) is cut off.

    Raises `DamagedStorage` for damage that is followed by a whole write: that one began when this one was on disk.
    """
    data = path.read_bytes() if path.exists() else b""
    entries: list[bytes] = []
    at = 0
    while at < len(data):
        body, end = _body_at(data, at)
        if body is None:
            if _body_at(data, end)[0] is not None:
                raise DamagedStorage(f"{path} is damaged at byte {at}; this peer must not vote from it: move it away")
            os.truncate(path, at)
            break
        place = 0
        while place < len(body):
            size = int.from_bytes(body[place : place + _LENGTH_BYTES], "big")
            place += _LENGTH_BYTES + size
            entries.append(body[place - size : place])
        at = end
    return entries


def _body_at(data: bytes, at: int) -> tuple[bytes | None, int]:
    """The body of the frame at `at`, None if it is not whole, and where the next frame would begin."""
    head = at + _FRAME_HEADER_BYTES
    end = head + int.from_bytes(data[at : at + _LENGTH_BYTES], "big")
    body = data[head:end]
    is_whole = head < end <= len(data) and zlib.crc32(body).to_bytes(4, "big") == data[at + _LENGTH_BYTES : head]
    return (body if is_whole else None), end


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
