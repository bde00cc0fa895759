"""The `Storage` contract: what was written is found again after any crash, in order, and a snapshot is whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from averaging.storage import DamagedStorage, FileStorage, Saved, Storage
from simulator.storage import SimulatedStorage

Reopen = Callable[[], Storage]


@pytest.fixture(params=["files", "simulated"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Gives the same disk to the next process."""
    simulated = SimulatedStorage(random.Random(0), write_seconds=0.0)
    opened: list[FileStorage] = []

    def open_again() -> Storage:
        if request.param == "simulated":
            return simulated
        for storage in opened:
            storage.close()
        opened.append(FileStorage(tmp_path / "peer"))
        return opened[-1]

    def close_all() -> None:
        for storage in opened:
            storage.close()

    request.addfinalizer(close_all)
    return open_again


def test_a_new_disk_is_empty(reopen: Reopen) -> None:
    assert anyio.run(reopen().load) == Saved([], [], None)


def test_what_was_appended_is_found_in_order(reopen: Reopen) -> None:
    async def write() -> None:
        storage = reopen()
        await storage.load()
        await storage.append([b"vote 1", b""], [])
        await storage.append([], [b"record 1"])
        await storage.append([b"vote 2"], [b"record 2", b"record 3"])
        await storage.append([], [])

    async def read() -> Saved:
        return await reopen().load()

    anyio.run(write)
    expected = Saved([b"record 1", b"record 2", b"record 3"], [b"vote 1", b"", b"vote 2"], None)
    assert anyio.run(read) == expected
    assert anyio.run(read) == expected, "reading changes nothing"


def test_a_snapshot_replaces_the_one_before_and_begins_the_journal_anew(reopen: Reopen) -> None:
    async def write() -> None:
        storage = reopen()
        await storage.load()
        await storage.append([b"old"], [b"record 1"])
        await storage.save_snapshot({"anchor": b"1", "gone": b"x"}, [b"kept"])
        await storage.append([b"new"], [b"record 2"])

    async def again() -> Saved:
        storage = reopen()
        before = await storage.load()
        await storage.save_snapshot({"anchor": b"2", "other": bytes(1000)}, [])
        await storage.append([b"newest"], [])
        return before

    async def read() -> Saved:
        return await reopen().load()

    anyio.run(write)
    assert anyio.run(again) == Saved([b"record 1", b"record 2"], [b"kept", b"new"], {"anchor": b"1", "gone": b"x"})
    assert anyio.run(read) == Saved([b"record 1", b"record 2"], [b"newest"], {"anchor": b"2", "other": bytes(1000)})


# Files: crashes at every byte, and between any two steps of a snapshot.

ENTRIES = [b"first", b"", b"third entry", bytes(40)]


def write(folder: Path, entries: list[bytes], snapshot: dict[str, bytes] | None = None) -> None:
    async def main() -> None:
        storage = FileStorage(folder)
        await storage.load()
        await storage.append(entries, entries)
        if snapshot is not None:
            await storage.save_snapshot(snapshot, entries)
        storage.close()

    anyio.run(main)


def load(folder: Path) -> Saved:
    async def main() -> Saved:
        storage = FileStorage(folder)
        saved = await storage.load()
        storage.close()
        return saved

    return anyio.run(main)


@pytest.mark.parametrize("name", ["log", "journal"])
def test_a_write_torn_at_any_byte_is_there_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    write(tmp_path / "whole", ENTRIES)
    data = (tmp_path / "whole" / name).read_bytes()
    folder = tmp_path / "torn"
    seen = set()
    for size in range(len(data) + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / name).write_bytes(data[:size])
        saved = load(folder)
        entries = saved.log if name == "log" else saved.journal
        assert entries == ENTRIES[: len(entries)]
        seen.add(len(entries))
        if size % 7 == 0:
            write(folder, [b"more"])
            saved = load(folder)
            assert (saved.log if name == "log" else saved.journal) == [*entries, b"more"]
    assert seen == {0, len(ENTRIES)}


def test_damage_before_a_later_write_is_told_and_not_taken_for_a_torn_end(tmp_path: Path) -> None:
    write(tmp_path, [b"a vote"])
    first = (tmp_path / "journal").read_bytes()
    write(tmp_path, [b"a later vote"])
    content = bytearray((tmp_path / "journal").read_bytes())
    content[len(first) - 1] ^= 1
    (tmp_path / "journal").write_bytes(content)
    with pytest.raises(DamagedStorage, match="journal is damaged at byte 0"):
        load(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.data())
def test_a_flipped_bit_ends_the_entries_before_it(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "flipped"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, ENTRIES)
    content = bytearray((folder / "journal").read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "journal").write_bytes(content)
    entries = load(folder).journal
    assert entries == ENTRIES[: len(entries)]
    assert len(entries) < len(ENTRIES)


OLD, NEW = {"anchor": b"old"}, {"anchor": b"new"}


def put(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ({"snapshot": OLD}, OLD),
        ({"snapshot": OLD, "snapshot.new": {}}, OLD),
        ({"snapshot": OLD, "snapshot.new": {"anchor": b"ne"}}, OLD),
        ({"snapshot": OLD, "snapshot.new": NEW}, OLD),
        ({"snapshot.old": OLD, "snapshot.new": NEW}, OLD),
        ({"snapshot.old": OLD, "snapshot": NEW}, NEW),
        ({"snapshot.old": {}, "snapshot": NEW}, NEW),
        ({"snapshot.new": NEW}, None),
    ],
    ids=["before", "begun", "half", "written", "between the renames", "renamed", "half removed", "first half"],
)
def test_a_crash_at_any_step_of_a_snapshot_leaves_a_whole_one(
    folders: dict[str, dict[str, bytes]], expected: dict[str, bytes] | None, tmp_path: Path
) -> None:
    write(tmp_path / "peer", ENTRIES)
    for name, files in folders.items():
        put(tmp_path / "peer" / name, files)
    (tmp_path / "peer" / "journal.new").write_bytes(b"half a journ")
    assert load(tmp_path / "peer") == Saved(ENTRIES, ENTRIES, expected)
    write(tmp_path / "peer", [b"more"], NEW)
    assert load(tmp_path / "peer") == Saved([*ENTRIES, b"more"], [b"more"], NEW)


def test_a_simulated_crash_while_writing_leaves_a_prefix_journal_first() -> None:
    seen = set()

    async def main(seed: int) -> None:
        storage = SimulatedStorage(random.Random(seed), write_seconds=10.0)
        with anyio.move_on_after(0.001):
            await storage.append([b"j1", b"j2"], [b"l1"])
        seen.add((tuple(storage.journal), tuple(storage.log)))

    for seed in range(40):
        anyio.run(main, seed)
    assert seen == {((), ()), ((b"j1",), ()), ((b"j1", b"j2"), ()), ((b"j1", b"j2"), (b"l1",))}
