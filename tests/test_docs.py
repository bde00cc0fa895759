"""What the documents say can be typed, found and read: commands parse, paths and links exist, no machine leaks in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.main import DEBUG, peer
from network.identity import Identity
from peer.spec import load_spec

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PEER_ID = Identity(bytes(32)).peer_id
# Places of one machine, and what should be an issue.
FORBIDDEN = re.compile(r"(?<![\w.~])/(work|root|home|tmp/v)\b|\bTODO\b")
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# What stands for a value in prose.
PLACEHOLDERS = {
    "ADDR": f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER_ID}",
    "NAME": "example",
    "COMMAND": "join",
    "RUN.toml": "examples/run.toml",
}
FOLDERS = ("FOLDER", "texts")
FILES = ("FILE", *FOLDERS)


def commands(text: str) -> Iterator[str]:
    """The command lines of a page: lines of code blocks, and code in a sentence, that begin with `peer`."""
    in_block = False
    for line in text.splitlines():
        if line.strip().startswith("```"):
            in_block = not in_block
        elif in_block:
            if re.match(r"\s*(bin/)?peer [a-z-]", line) and "  " not in line.strip():
                yield line.strip()
        else:
            yield from (code for code in re.findall(r"`([^`]+)`", line) if re.match(r"(bin/)?peer [a-z-]", code))


def parse(line: str, folder: Path) -> None:
    """Has click read every word of the line, as `peer` would, and runs nothing; raises `click.ClickException`.

    A command's bare name, as in a sentence about it, must only be one.
    """
    words = [PLACEHOLDERS.get(word, word).replace("12D3Koo...", PEER_ID) for word in shlex.split(line)[1:]]
    words = [str(folder / word) if word in FILES else word for word in words if word not in (DEBUG, "...")]
    command: click.Command = peer
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found is not None
        command = found
    if words and "--help" not in words:
        command.make_context("peer", words)


ALL_COMMANDS = [(page, line) for page in PAGES for line in commands(page.read_text())]


@pytest.mark.parametrize(("page", "line"), ALL_COMMANDS, ids=[f"{p.name}: {line}" for p, line in ALL_COMMANDS])
def test_every_command_in_the_documents_parses(
    page: Path, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    (tmp_path / "FILE").touch()
    parse(line, tmp_path)


def test_commands_are_found_and_a_wrong_one_is_noticed(tmp_path: Path) -> None:
    assert len(ALL_COMMANDS) > 20
    assert {line.split()[1] for _, line in ALL_COMMANDS} >= {
        "simulate",
        "start",
        "join",
        "bootstrap",
        "status",
        "setup",
    }
    for wrong in ("bin/peer join --intial-peers ADDR", "bin/peer simulate --peers many", "bin/peer jion"):
        with pytest.raises(click.ClickException):
            parse(wrong, tmp_path)


def test_every_path_in_the_tree_exists() -> None:
    tree = (ROOT / "README.md").read_text().partition("## Where things are")[2].split("```")[1]
    folder = Path()
    named = []
    for line in tree.strip().splitlines():
        name = line.split()[0]
        path = folder / name if line.startswith("  ") else Path(name)
        if not line.startswith("  "):
            folder = path
        assert (ROOT / path).exists(), path
        assert (ROOT / path).is_dir() == name.endswith("/"), path
        assert len(line.split(maxsplit=1)) == 2, f"{path} has no description"
        named.append(path.parts[0])
    folders = {path.parent.name for path in ROOT.glob("*/*.py")} - {"bin"}
    assert folders <= set(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name}: {link}"
        assert path.is_relative_to(ROOT), f"{page.name}: {link}"
        if anchor:
            assert anchor in {slug(heading) for heading in HEADING.findall(path.read_text())}, f"{page.name}: {link}"


def slug(heading: str) -> str:
    """How a heading is linked to."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=lambda page: page.name)
def test_the_documents_speak_of_the_project_alone(page: Path) -> None:
    found = FORBIDDEN.search(page.read_text())
    assert found is None, f"{page.name}: {found and found[0]}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_example_is_a_run(example: Path) -> None:
    assert load_spec(example, PEER_ID).run.rounds


def test_decisions_are_numbered_without_a_gap() -> None:
    numbers = [int(page.name[:4]) for page in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    for page in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        assert page.read_text().startswith(f"# {int(page.name[:4])}. "), page.name
