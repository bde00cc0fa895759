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

_FRAME_HEADER_BYTES = 8


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
                file.write(b"".join(_frame(entry) for entry in entries))
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
        _write_durably(draft, b"".join(_frame(entry) for entry in journal))
        draft.rename(self.folder / "journal")
        _sync_folder(self.folder)
        self._files["journal"].close()
        self._files["journal"] = open(self.folder / "journal", "ab")  # noqa: SIM115


def _frame(entry: bytes) -> bytes:
    return len(entry).to_bytes(4, "big") + zlib.crc32(entry).to_bytes(4, "big") + entry


def _read_frames(path: Path) -> list[bytes]:
    """The whole entries of a file; a torn tail (a crash while writing) is cut off."""
    data = path.read_bytes() if path.exists() else b""
    entries, at = [], 0
    while at + _FRAME_HEADER_BYTES <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        entry = data[at + _FRAME_HEADER_BYTES : at + _FRAME_HEADER_BYTES + size]
        if len(entry) < size or zlib.crc32(entry).to_bytes(4, "big") != data[at + 4 : at + 8]:
            break
        entries.append(entry)
        at += _FRAME_HEADER_BYTES + size
    if at < len(data):
        os.truncate(path, at)
    return entries


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
