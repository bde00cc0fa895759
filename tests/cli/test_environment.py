"""The set-up of a checkout, as far as it is pure: what is wanted, and when there is nothing to do."""

from __future__ import annotations

import configparser
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_environment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "bin" / "environment.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["environment"] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module


environment = load_environment()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("setup.cfg", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def installed(root: Path, *kinds: str, key: str = "1 2") -> None:
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.touch()
    for kind in kinds:
        (root / ".venv" / f"stamp.{kind}").write_text(f"{key}\n")


def name_of(requirement: str) -> str:
    """`torch>=2.9; python_version < "3.11"` is `torch`."""
    return re.split(r"[<>=;\s]", requirement)[0]


def test_a_finished_set_up_is_left_alone(place: Path) -> None:
    installed(place, "base", "test")
    before = sorted(place.rglob("*"))
    for kind in environment.KINDS:
        environment.make(environment.Place(place), kind, "1 2")
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("missing", ["stamp", "python", "key"])
def test_an_unfinished_or_outdated_one_is_not_current(place: Path, missing: str) -> None:
    installed(place, "base")
    if missing == "stamp":
        (place / ".venv" / "stamp.base").unlink()
    if missing == "python":
        (place / ".venv" / "bin" / "python").unlink()
    here = environment.Place(place)
    assert not environment.is_current(here, "base", "3 4" if missing == "key" else "1 2")
    assert environment.is_usable(here) == (missing == "key")


def test_the_stamp_of_another_kind_says_nothing(place: Path) -> None:
    installed(place, "base")
    assert not environment.is_current(environment.Place(place), "test", "1 2")


def test_what_is_installed_is_what_setup_cfg_says() -> None:
    found = environment.read_requirements((ROOT / "setup.cfg").read_text())
    assert set(found) == {"base", "observer", "plot", "test"}
    assert "hivemind==1.1.12" in found["base"]
    assert 'tomli>=2.2; python_version < "3.11"' in found["base"]
    assert [name_of(each) for each in found["observer"]] == ["libp2p"]


def test_every_requirement_is_pinned_for_every_python() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    found = environment.read_requirements((ROOT / "setup.cfg").read_text())
    for requirement in [each for kind in found.values() for each in kind]:
        assert name_of(requirement) in pinned


def test_pins_are_exact_and_one_a_python() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+( ; .+)?", line) for line in lines)
    assert len(set(lines)) == len(lines)


def test_the_package_lists_every_folder_of_the_house() -> None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {line.rstrip("*") for line in environment.lines(config["options.packages.find"]["include"])} == packages
    assert set(environment.lines(config["importlinter"]["root_packages"])) == packages


def test_wrong_arguments_are_refused_and_change_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bin" / "environment.py"), "everything"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
