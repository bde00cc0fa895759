"""A peer is its key: it is shown, backed up and restored, never overwritten, and a refused file says why."""

from __future__ import annotations

import stat
from pathlib import Path

from network.identity import load_or_create
from peer.options import IDENTITY_FILE
from tests.cli.conftest import Run


def make(folder: Path) -> str:
    return load_or_create(folder / IDENTITY_FILE).peer_id


def test_no_identity_yet_is_said(run: Run) -> None:
    result = run("identity")
    assert result.code == 0
    assert "no identity under" in result.err


def test_all_identities_are_shown_and_a_damaged_one_does_not_hide_the_others(run: Run, home: Path) -> None:
    first, second = make(home / "join"), make(home / "join-2")
    (home / "start").mkdir()
    (home / "start" / IDENTITY_FILE).write_bytes(b"x")
    result = run("identity", "show")
    assert result.out.splitlines() == [f"{first}  {home / 'join'}", f"{second}  {home / 'join-2'}"]
    assert "not an Ed25519 key file" in result.err
    assert run("identity", "show", "--folder", str(home / "start")).code == 2


def test_a_backup_restores_the_same_peer(run: Run, home: Path, tmp_path: Path) -> None:
    peer_id = make(home / "join")
    backup = tmp_path / "peer.key"
    assert peer_id in run("identity", "backup", str(backup)).out
    assert stat.S_IMODE(backup.stat().st_mode) == 0o400
    assert run("identity", "restore", str(backup), "--folder", str(tmp_path / "new")).code == 0
    assert run("identity", "show", "--folder", str(tmp_path / "new")).out.split()[0] == peer_id


def test_nothing_is_ever_overwritten(run: Run, home: Path, tmp_path: Path) -> None:
    make(home / "join")
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = run("identity", "backup", str(taken))
    assert result.code == 2
    assert "is there already" in result.err
    assert taken.read_text() == "mine"
    backup = tmp_path / "peer.key"
    run("identity", "backup", str(backup))
    other = make(home / "other")
    assert run("identity", "restore", str(backup), "--folder", str(home / "other")).code == 2
    assert run("identity", "show", "--folder", str(home / "other")).out.split()[0] == other


def test_which_of_several_must_be_said(run: Run, home: Path, tmp_path: Path) -> None:
    make(home / "join")
    make(home / "start")
    result = run("identity", "backup", str(tmp_path / "peer.key"))
    assert result.code == 2
    assert f"--folder {home / 'join'}" in result.err


def test_a_file_that_is_no_key_is_refused_with_the_reason(run: Run, tmp_path: Path) -> None:
    (tmp_path / "no.key").write_bytes(bytes(68))
    result = run("identity", "restore", str(tmp_path / "no.key"), "--folder", str(tmp_path / "new"))
    assert result.code == 2
    assert "not an Ed25519 key file in libp2p's form" in result.err
    assert not (tmp_path / "new" / IDENTITY_FILE).exists()
