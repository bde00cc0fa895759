"""What a peer remembers in its folder, and what it says if that is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.run import PEERS_FILE, remembered_peers

PEER = "12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"


def test_the_first_address_of_each_peer_met_is_remembered(tmp_path: Path) -> None:
    (tmp_path / PEERS_FILE).write_text(json.dumps([[ADDRESS, f"/ip4/192.0.2.1/tcp/1/p2p/{PEER}"], []]))
    assert remembered_peers(tmp_path) == (ADDRESS,)


def test_nobody_is_remembered_in_a_new_folder_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert remembered_peers(tmp_path) == ()
    assert not caplog.records


@pytest.mark.parametrize("damaged", ['[["/ip4', "5", "[5]", '[["here"]]', '{"a": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: str) -> None:
    (tmp_path / PEERS_FILE).write_text(damaged)
    assert remembered_peers(tmp_path) == ()
    assert str(tmp_path / PEERS_FILE) in caplog.text


@pytest.mark.parametrize(
    "odd", ["here", "/ip4/192.0.2.1/tcp/1", "", f"/foo/p2p/{PEER}", "/ip4/192.0.2.1/tcp/1/p2p/12D3KooWx"]
)
def test_one_peer_that_announced_nonsense_does_not_make_the_others_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, odd: str
) -> None:
    (tmp_path / PEERS_FILE).write_text(json.dumps([[odd], [ADDRESS]]))
    assert remembered_peers(tmp_path) == (ADDRESS,)
    assert repr(odd) in caplog.text
