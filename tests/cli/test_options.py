"""What is typed arrives where it should: options of the swarm and of the peer, several values at once, folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.arguments import repeated
from cli.folder import claimed
from cli.simulate import described, size
from peer.options import BootstrapOptions, PeerOptions
from simulator.options import SimulateOptions, Summary, Tokens
from tests.cli.conftest import Run

ADDRESSES = tuple(
    f"/ip4/127.0.0.1/tcp/{port}/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8" for port in (1, 2)
)
SUMMARY = Summary(
    preset="muloco",
    model="gpt-nano",
    parameters=180_000,
    seed=3,
    peers=2,
    rounds_committed=5,
    loss_first=5.5,
    loss_last=2.5,
    fingerprints_equal=True,
    bytes_sent_per_peer_per_round=50_000.0,
    packet_bytes_sent_per_peer_per_round=45_000.0,
    dense_bytes_per_peer_per_round=14_400_000.0,
    tokens=Tokens(processed=1000, merged=900, lost=100),
    seconds=12.5,
    restarts=1,
)

words = st.sampled_from(["--data", "--port", "-v", "a", "b", "1", "--", "--data=c", "-"])


@given(st.lists(words))
def test_options_with_one_value_each_stay_as_they_are(arguments: list[str]) -> None:
    assert repeated(arguments, ()) == arguments


@given(st.lists(st.sampled_from("abc"), min_size=1), st.lists(words))
def test_several_values_are_the_option_several_times(values: list[str], rest: list[str]) -> None:
    separate = [word for value in values for word in ("--data", value)]
    assert repeated(["--data", *values, "--end", *rest], ["--data"]) == [
        *separate,
        "--end",
        *repeated(rest, ["--data"]),
    ]


def test_after_an_equals_sign_more_values_may_follow() -> None:
    assert repeated(["--data=a", "b", "--port", "1", "x"], ["--data"]) == [
        "--data=a",
        "--data",
        "b",
        "--port",
        "1",
        "x",
    ]
    assert repeated(["--data", "a", "--", "b", "c"], ["--data"]) == ["--data", "a", "--", "b", "c"]


class Recorder:
    """Stands in for the functions that commands call, and keeps what they were called with."""

    def __init__(self, result: object = None) -> None:
        self.calls: list[Any] = []
        self.result = result

    def __call__(self, options: object, *_: object) -> object:
        self.calls.append(options)
        return self.result


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Recorder]]:
    recorders = {"local": Recorder(SUMMARY), "virtual": Recorder(SUMMARY), "peer": Recorder(), "bootstrap": Recorder()}
    for name, functions in {
        "simulator.local": {"run_local_swarm": "local"},
        "simulator.virtual": {"run_virtual_swarm": "virtual"},
        "peer.run": {"run_peer": "peer"},
        "peer.bootstrap": {"run_bootstrap": "bootstrap"},
    }.items():
        module = ModuleType(name)
        for function, recorder in functions.items():
            setattr(module, function, recorders[recorder])
        monkeypatch.setitem(sys.modules, name, module)
    yield recorders


def test_simulate_without_options_takes_the_defaults(run: Run, swarm: dict[str, Recorder]) -> None:
    assert run("simulate", "--rounds", "5").code == 0
    assert swarm["local"].calls == [SimulateOptions(rounds=5)]
    assert swarm["virtual"].calls == []


def test_every_option_of_simulate_arrives(run: Run, swarm: dict[str, Recorder], tmp_path: Path) -> None:
    line = (
        "simulate --peers 2 --rounds 5 --preset distro --model gpt-mini --seed 3 --kill-every 20 --virtual --latency 80"
    )
    line += " --bandwidth 20 --churn 0.1 --timeout 90 --set inner_steps=3 outer.lr=0.5 --data"
    assert run(*line.split(), str(tmp_path), str(tmp_path)).code == 0
    assert swarm["virtual"].calls == [
        SimulateOptions(
            peers=2,
            rounds=5,
            preset="distro",
            settings={"inner_steps": "3", "outer.lr": "0.5"},
            model="gpt-mini",
            data=(tmp_path, tmp_path),
            seed=3,
            kill_every_seconds=20,
            latency_ms=80,
            bandwidth_mbit=20,
            churn_rate=0.1,
            timeout_seconds=90,
        )
    ]


def test_the_summary_is_for_people_and_for_programs(run: Run, swarm: dict[str, Recorder], tmp_path: Path) -> None:
    result = run("simulate", "--rounds", "5", "--json", str(tmp_path / "summary.json"))
    assert "288 times more" in result.out
    assert "1,000 processed, 900 merged, 100 lost" in result.out
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == SUMMARY.as_json()
    assert written["tokens"] == {"processed": 1000, "merged": 900, "lost": 100, "by_peer": {}}


def test_replicas_of_a_gossip_run_may_differ(run: Run, swarm: dict[str, Recorder]) -> None:
    gossip = {"tokens": SUMMARY.tokens, "fingerprints_equal": False, "mode": "gossip", "replicas_apart": 0.0123}
    swarm["local"].result = Summary(**{**SUMMARY.as_json(), **gossip})  # type: ignore[arg-type]
    result = run("simulate", "--rounds", "5", "--preset", "noloco")
    assert result.code == 0
    assert "one replica a peer, at most 1.23% of their norm apart" in result.out


def test_json_on_stdout_is_nothing_but_json(run: Run, swarm: dict[str, Recorder]) -> None:
    result = run("simulate", "--rounds", "5", "--json", "-")
    assert json.loads(result.out) == SUMMARY.as_json()
    assert "rounds committed" in result.err


def test_too_few_rounds_or_different_models_are_a_failed_training(run: Run, swarm: dict[str, Recorder]) -> None:
    result = run("simulate", "--rounds", "6")
    assert (result.code, result.err) == (5, "peer: 5 of 6 rounds were committed\n")
    swarm["local"].result = Summary(**{**SUMMARY.as_json(), "tokens": SUMMARY.tokens, "fingerprints_equal": False})  # type: ignore[arg-type]
    result = run("simulate", "--rounds", "5")
    assert result.code == 5
    assert "DIFFERENT" in result.out


def test_nothing_sent_is_no_division_by_zero() -> None:
    values = {**SUMMARY.as_json(), "tokens": SUMMARY.tokens, "bytes_sent_per_peer_per_round": 0.0}
    assert "sent     0 B" in described(Summary(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (9_999, "9,999 B"), (10_000, "10.0 kB"), (14_400_000, "14.4 MB"), (3e12, "3,000.0 GB")],
)
def test_sizes_are_readable(count: float, text: str) -> None:
    assert size(count) == text


def test_every_option_of_start_arrives(run: Run, swarm: dict[str, Recorder], tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.touch()
    line = "--port 31337 --listen 127.0.0.1 --device cpu --name me --json-events --folder"
    result = run("start", str(spec), *line.split(), str(tmp_path / "state"), "--announce", ADDRESSES[0])
    assert result.code == 0
    assert swarm["peer"].calls == [
        PeerOptions(
            folder=tmp_path / "state",
            spec_file=spec,
            host="127.0.0.1",
            port=31337,
            announce=ADDRESSES[:1],
            device="cpu",
            name="me",
            json_events=True,
        )
    ]


def test_every_option_of_join_arrives(run: Run, swarm: dict[str, Recorder], tmp_path: Path, home: Path) -> None:
    result = run("join", "--initial-peers", *ADDRESSES, "--run", "example", "--rounds", "3", "--data", str(tmp_path))
    assert result.code == 0
    assert swarm["peer"].calls == [
        PeerOptions(
            folder=home / "join", initial_peers=ADDRESSES, run="example", rounds_max=3, data=(tmp_path,), device="auto"
        )
    ]


def test_a_peer_that_comes_back_needs_no_option(run: Run, swarm: dict[str, Recorder], home: Path) -> None:
    assert run("join").code == 0
    assert swarm["peer"].calls == [PeerOptions(folder=home / "join")]


def test_every_option_of_bootstrap_arrives(run: Run, swarm: dict[str, Recorder], home: Path) -> None:
    assert run("bootstrap", "--port", "31337", "--initial-peers", *ADDRESSES).code == 0
    assert swarm["bootstrap"].calls == [
        BootstrapOptions(folder=home / "bootstrap", port=31337, initial_peers=ADDRESSES)
    ]


def test_two_peers_on_one_machine_have_two_folders_and_keep_them(home: Path) -> None:
    with claimed(None, "join") as first, claimed(None, "join") as second:
        assert (first, second) == (home / "join", home / "join-2")
    with claimed(None, "join") as again:
        assert again == first


def test_a_folder_in_use_is_refused(run: Run, swarm: dict[str, Recorder], tmp_path: Path) -> None:
    with claimed(tmp_path, "join"):
        result = run("join", "--folder", str(tmp_path))
    assert result.code == 2
    assert f"--folder {tmp_path}: another process" in result.err
    assert swarm["peer"].calls == []


def test_a_folder_that_cannot_be_is_refused(run: Run, swarm: dict[str, Recorder], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("join", "--folder", str(tmp_path / "file" / "state"))
    assert result.code == 2
    assert "cannot be written" in result.err
