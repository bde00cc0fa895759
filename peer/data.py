"""Byte text to train on: where it comes from, which files validate, and what a peer reads in a given step."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

_SKIPPED_FOLDERS = frozenset(("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"))
_PROBE_BYTES = 8_192


@dataclass(frozen=True, slots=True)
class DataLimits:
    """Bounds on what is read and kept in memory (while it is read, three times as much)."""

    text_bytes_max: int = 64 * 2**20
    file_bytes_max: int = 64 * 2**20
    library_file_bytes_max: int = 256 * 2**10
    files_max: int = 100_000
    validation_share: float = 0.05
    split_bytes_min: int = 1_024


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text as uint8 tensors (bytes,), which never change. `complete` is False when a limit cut something off."""

    training: Tensor
    validation: Tensor
    source: str
    complete: bool

    @property
    def sha256(self) -> str:
        """Of all the text, training before validation, in hexadecimal: equal where peers hold the same."""
        digest = hashlib.sha256(self.training.numpy().tobytes())
        digest.update(self.validation.numpy().tobytes())
        return digest.hexdigest()

    def sample(self, seed: int, peer: str, round_index: int, step: int, *, batch: int, length: int) -> Tensor:
        """`batch` windows of training text, int64 (batch, length + 1), a function of the arguments alone."""
        label = f"{seed}/{peer}/{round_index}/{step}".encode()
        stream = hashlib.shake_128(label).digest(8 * batch)
        places = places_of(self.training, length, self.source)
        starts = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") % places for i in range(batch)]
        return windows(self.training, starts, length)

    def validation_batches(self, *, batch: int, length: int, batches: int) -> list[Tensor]:
        """The same windows each time, evenly spread over the validation text: int64 (batch, length + 1) each."""
        places = places_of(self.validation, length, self.source)
        starts = [i * (places - 1) // max(1, batch * batches - 1) for i in range(batch * batches)]
        return [windows(self.validation, starts[i * batch : (i + 1) * batch], length) for i in range(batches)]


def load_corpus(paths: Sequence[Path] = (), limits: DataLimits | None = None) -> Corpus:
    """Reads the text files and folders at `paths`; by default the Python sources of the running interpreter's library.

    In folders, files that hold a zero byte near their start, hidden files and links are left out. Blocks: call it on a
    worker thread. Raises `ValueError` naming the path that is missing, unreadable or too short.
    """
    limits = limits or DataLimits()
    source = ", ".join(str(path) for path in paths) or "the Python standard library"
    files: list[tuple[str, Path]] = []
    complete = True
    for name, path in list_library(limits) if not paths else list_files(paths):
        if len(files) == limits.files_max:
            complete = False
            break
        files.append((name, path))
    texts, whole = read_texts(files, limits)
    training, validation = split(texts, limits)
    for part, text in (("training", training), ("validation", validation)):
        if len(text) < limits.split_bytes_min:
            needed = f"at least {limits.split_bytes_min} are needed"
            raise ValueError(f"data = {source}: {len(text)} bytes of {part} text; {needed}")
    return Corpus(as_tensor(training), as_tensor(validation), source, complete and whole)


def list_library(limits: DataLimits) -> Iterator[tuple[str, Path]]:
    """The library's Python files, by relative path; tests, packages added later and oversized files left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for name, path in walk(root, _SKIPPED_FOLDERS):
        if name.endswith(".py") and path.stat().st_size <= limits.library_file_bytes_max:
            yield name, path


def list_files(paths: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    for path in paths:
        if path.is_file():
            yield path.name, path
        elif path.is_dir():
            yield from ((name, file) for name, file in walk(path, frozenset()) if not holds_zero_byte(file))
        else:
            raise ValueError(f"data = {path}: there is no such file or folder")


def walk(root: Path, skipped: frozenset[str]) -> Iterator[tuple[str, Path]]:
    """Regular files under `root` with their relative names, in the order of the names' parts."""
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path.relative_to(root).as_posix(), path


def refuse(error: OSError) -> None:
    raise ValueError(f"data = {error.filename}: cannot be read ({error.strerror})") from error


def holds_zero_byte(path: Path) -> bool:
    with open_file(path) as file:
        return b"\0" in file.read(_PROBE_BYTES)


def read_texts(files: Iterable[tuple[str, Path]], limits: DataLimits) -> tuple[dict[str, bytes], bool]:
    """Text by name, and whether everything fitted. Names that repeat (two folders) are told apart by their order."""
    texts: dict[str, bytes] = {}
    left, complete = limits.text_bytes_max, True
    for name, path in files:
        allowed = min(limits.file_bytes_max, left)
        with open_file(path) as file:
            text = file.read(allowed + 1)
        complete &= len(text) <= allowed
        text = text[:allowed]
        left -= len(text)
        if text:
            texts[name if name not in texts else f"{name}#{len(texts)}"] = text
        if left == 0:
            break
    return texts, complete


def open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"data = {path}: cannot be read ({error.strerror})") from error


def split(texts: dict[str, bytes], limits: DataLimits) -> tuple[bytes, bytes]:
    """Training and validation text: whole files, chosen by a hash of their names; a single file is cut near its end."""
    if len(texts) == 1:
        (text,) = texts.values()
        cut = len(text) - int(len(text) * limits.validation_share)
        return text[:cut], text[cut:]
    rank = {name: hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in texts}
    threshold = int(limits.validation_share * 2**64).to_bytes(8, "big")
    ordered = sorted(texts, key=lambda name: (rank[name], name))
    count = sum(rank[name] < threshold for name in ordered)
    count = max(1, min(count, len(ordered) - 1))
    chosen = set(ordered[:count])
    training = b"\n".join(text for name, text in texts.items() if name not in chosen)
    return training, b"\n".join(texts[name] for name in texts if name in chosen)


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(text: Tensor, starts: Sequence[int], length: int) -> Tensor:
    """Windows of length + 1 bytes, int64, one row a start."""
    positions = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(length + 1)
    return text[positions].long()


def places_of(text: Tensor, length: int, source: str) -> int:
    """How many windows of length + 1 bytes begin in `text`; raises `ValueError` if none does."""
    if len(text) <= length:
        raise ValueError(f"data = {source}: {len(text)} bytes are too short for windows of {length + 1} bytes")
    return len(text) - length


def sampler(corpus: Corpus, seed: int, peer: str, *, batch: int, length: int) -> Callable[[int, int], Tensor]:
    """What `Trainer` reads: (round, step) to a batch."""
    return lambda round_index, step: corpus.sample(seed, peer, round_index, step, batch=batch, length=length)
