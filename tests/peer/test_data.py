"""Text: a stable split by file, samples that follow from their arguments, limits that hold, errors that say where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.data import Corpus, DataLimits, load_corpus, walk

CORPUS = Corpus(torch.arange(200, dtype=torch.uint8), torch.arange(100, dtype=torch.uint8), "counting", True)


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_corpus()


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)


def texts(count: int, size: int = 2_000) -> dict[str, bytes]:
    return {f"file{i:02d}.txt": bytes([65 + i]) * size for i in range(count)}


def test_the_default_is_the_standard_library(library: Corpus) -> None:
    assert len(library.training) > 3_000_000
    assert 0.01 < len(library.validation) / len(library.training) < 0.15
    assert library.complete
    assert b"def " in bytes(library.validation.numpy())


def test_loading_again_gives_the_same_text(library: Corpus) -> None:
    again = load_corpus()
    assert torch.equal(library.training, again.training)
    assert torch.equal(library.validation, again.validation)


@given(st.integers(0, 2**63), st.text(min_size=1, max_size=60), st.integers(0, 10**9), st.integers(0, 10**6))
def test_a_sample_is_a_function_of_its_arguments(seed: int, peer: str, round_index: int, step: int) -> None:
    batch = CORPUS.sample(seed, peer, round_index, step, batch=4, length=16)
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, batch[:, :1] + torch.arange(17))
    assert torch.equal(batch, CORPUS.sample(seed, peer, round_index, step, batch=4, length=16))


def test_samples_differ_between_seeds_peers_rounds_and_steps() -> None:
    calls = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    batches = [tuple(CORPUS.sample(*call, batch=16, length=8)[:, 0].tolist()) for call in calls]
    assert len(set(batches)) == len(batches)


def test_every_place_of_the_text_is_read() -> None:
    starts = {int(s) for step in range(40) for s in CORPUS.sample(0, "a", 0, step, batch=64, length=8)[:, 0]}
    assert starts == set(range(192))


def test_validation_is_fixed_and_spread_from_the_first_byte_to_the_last() -> None:
    batches = CORPUS.validation_batches(batch=3, length=9, batches=2)
    assert [tuple(batch.shape) for batch in batches] == [(3, 10)] * 2
    assert int(batches[0][0, 0]) == 0
    assert int(batches[-1][-1, -1]) == 99
    again = CORPUS.validation_batches(batch=3, length=9, batches=2)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_whole_files_validate_and_the_choice_follows_the_relative_name(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, texts(20))
    one, two = load_corpus([tmp_path / "one"]), load_corpus([tmp_path / "two"])
    assert torch.equal(one.validation, two.validation)
    letters = set(one.training.tolist()) - {10}, set(one.validation.tolist()) - {10}
    assert letters[0] | letters[1] == set(range(65, 85))
    assert not letters[0] & letters[1]
    assert len(letters[1]) >= 1


@pytest.mark.parametrize("count", range(2, 8))
def test_few_files_still_give_both_parts(tmp_path: Path, count: int) -> None:
    write(tmp_path, texts(count))
    corpus = load_corpus([tmp_path])
    assert min(len(corpus.training), len(corpus.validation)) >= 2_000


def test_a_single_file_is_cut_near_its_end(tmp_path: Path) -> None:
    write(tmp_path, {"book.txt": bytes(range(256)) * 200})
    corpus = load_corpus([tmp_path / "book.txt"])
    assert (len(corpus.training), len(corpus.validation)) == (48_640, 2_560)


def test_two_folders_with_the_same_names_are_both_read(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder, {"text.txt": folder.encode() * 1_000})
    corpus = load_corpus([tmp_path / "one", tmp_path / "two"])
    assert len(corpus.training) + len(corpus.validation) == 6_000


def test_binary_hidden_and_linked_files_are_left_out(tmp_path: Path) -> None:
    unwanted = {".hidden": b"h" * 5_000, "image": b"i\0" * 3_000, ".git/config": b"g" * 5_000}
    write(tmp_path / "data", texts(3) | unwanted)
    write(tmp_path, {"outside": b"o" * 5_000})
    (tmp_path / "data" / "link").symlink_to(tmp_path / "outside")
    corpus = load_corpus([tmp_path / "data"])
    assert set(corpus.training.tolist()) | set(corpus.validation.tolist()) <= {10, 65, 66, 67}


@pytest.mark.parametrize(
    "limits",
    [DataLimits(text_bytes_max=9_000), DataLimits(file_bytes_max=1_500), DataLimits(files_max=5)],
    ids=["text", "file", "files"],
)
def test_a_limit_cuts_and_is_reported(tmp_path: Path, limits: DataLimits) -> None:
    write(tmp_path, texts(10))
    assert load_corpus([tmp_path]).complete
    corpus = load_corpus([tmp_path], limits)
    assert not corpus.complete
    assert len(corpus.training) + len(corpus.validation) < 20_000


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data = .*nowhere: there is no such file or folder"):
        load_corpus([tmp_path / "nowhere"])
    write(tmp_path, {"short.txt": b"a few words"})
    with pytest.raises(ValueError, match=r"data = .*short.txt: 11 bytes of training text; at least 1024"):
        load_corpus([tmp_path / "short.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data = .*empty: 0 bytes"):
        load_corpus([tmp_path / "empty"])
    with pytest.raises(ValueError, match=r"data = .*gone: cannot be read"):
        list(walk(tmp_path / "gone", frozenset()))
    with pytest.raises(ValueError, match=r"counting: 200 bytes are too short for windows of 201 bytes"):
        CORPUS.sample(0, "a", 0, 0, batch=1, length=200)
