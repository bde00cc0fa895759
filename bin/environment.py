"""Makes .venv beside this folder: the virtual environment with the releases that setup.cfg and constraints.txt name.

`environment.py base|test KEY`, started by bin/environment.sh when `.venv/stamp.<kind>` does not hold KEY; and
`environment.py again`, started by `peer setup`, for what a first set-up could not do. Standard library only. The stamp
is written last, so a set-up that was interrupted is known by its absence and made anew.
"""

from __future__ import annotations

import configparser
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KINDS = ("base", "test")
OBSERVER_MISSING = "observer-missing"
"""The marker in .venv that says why libp2p is not there; `peer status` reads it."""
OBSERVER_ADVICE = (
    "`peer status` needs libp2p, which is compiled here: "
    "run `apt-get install gcc libgmp-dev python3-dev` (or your system's like), then `peer setup`"
)

REASON = "What was printed:"


class SetupFailed(Exception):
    """What the user reads: what failed, and what to do."""


@dataclass(frozen=True)
class Place:
    """The paths of one checkout."""

    root: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def stamp(self, kind: str) -> Path:
        return self.venv / f"stamp.{kind}"


def main(arguments: list[str]) -> int:
    if arguments != ["again"] and (len(arguments) != 2 or arguments[0] not in KINDS):
        print(f"usage: environment.py {'|'.join(KINDS)} KEY, or environment.py again", file=sys.stderr)
        return 2
    place = Place(Path(__file__).resolve().parent.parent)
    try:
        with only_one(place.root / ".setup.lock"):
            if arguments == ["again"]:
                make_again(place)
            else:
                make(place, arguments[0], arguments[1])
    except SetupFailed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("set-up interrupted; the next start begins it again")
        return 130
    except OSError as error:
        say(f"set-up failed: {error}; {place.root} must be writable and have about 2 GB of free space")
        return 1
    return 0


def make(place: Place, kind: str, key: str) -> None:
    """Bring .venv to the state that `key` names; does nothing if another start has just done so."""
    if is_current(place, kind, key):
        return
    requirements = read_requirements((place.root / "setup.cfg").read_text())
    if not is_usable(place):
        started = time.monotonic()
        say(f"first start: setting up {place.venv} with Python {sys.version.split()[0]}, once")
        make_venv(place)
        install_base(place, requirements["base"], key)
        install_observer(place, requirements["observer"])
        say(f"set up in {time.monotonic() - started:.0f} s")
    elif not is_current(place, "base", key):
        say("setup.cfg or constraints.txt changed: updating .venv")
        install_base(place, requirements["base"], key)
        install_observer(place, requirements["observer"])
    if kind == "test":
        say("installing the test tools")
        place.stamp("test").unlink(missing_ok=True)
        pip_install(place, requirements["test"])
        write_stamp(place, "test", key)


def make_again(place: Place) -> None:
    """Try the optional part once more; the rest is complete, or bin/peer would have seen to it."""
    install_observer(place, read_requirements((place.root / "setup.cfg").read_text())["observer"])
    marker = place.venv / OBSERVER_MISSING
    if marker.exists():
        raise SetupFailed(f"why libp2p could not be installed:\n{marker.read_text().partition(REASON)[2].strip()}")
    say("all is installed")


def is_current(place: Place, kind: str, key: str) -> bool:
    try:
        return place.python.exists() and place.stamp(kind).read_text().strip() == key.strip()
    except FileNotFoundError:
        return False


def is_usable(place: Place) -> bool:
    """Whether a set-up was once completed here and its interpreter still is where it was."""
    return place.stamp("base").exists() and place.python.exists()


def read_requirements(setup_cfg: str) -> dict[str, list[str]]:
    """The requirements by kind: `base`, and every extra."""
    config = configparser.ConfigParser(interpolation=None)
    config.read_string(setup_cfg)
    found = {"base": lines(config["options"]["install_requires"])}
    for extra, text in config["options.extras_require"].items():
        found[extra] = lines(text)
    return found


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def make_venv(place: Place) -> None:
    shutil.rmtree(place.venv, ignore_errors=True)
    say("[1/3] virtual environment")
    # Not with symlinks to a virtual environment's own python: the base interpreter outlives it.
    base = getattr(sys, "_base_executable", sys.executable)
    made = run([base, "-m", "venv", str(place.venv)])
    if made.returncode != 0:
        shutil.rmtree(place.venv, ignore_errors=True)
        raise SetupFailed(f"{tail(made)}\npeer: Python's venv failed (Debian, Ubuntu: apt-get install python3-venv)")


def install_base(place: Place, requirements: list[str], key: str) -> None:
    say(f"[2/3] torch, hivemind and {len(requirements) - 2} others (minutes; 1 GB, more where torch brings CUDA)")
    # From here to the new stamp the environment is neither the old nor the new one.
    for kind in KINDS:
        place.stamp(kind).unlink(missing_ok=True)
    pip_install(place, requirements)
    write_stamp(place, "base", key)


def install_observer(place: Place, requirements: list[str]) -> None:
    """libp2p is optional: where it cannot be compiled, a marker says so and everything else works."""
    marker = place.venv / OBSERVER_MISSING
    say("[3/3] libp2p, for `peer status`")
    marker.write_text(f"{OBSERVER_ADVICE}\n")  # Until it is there: an interrupted installation leaves the marker.
    try:
        pip_install(place, requirements)
    except SetupFailed as error:
        marker.write_text(f"{OBSERVER_ADVICE}\n{REASON}\n{error}\n")
        say(f"not installed, all else works. {OBSERVER_ADVICE}")
    else:
        marker.unlink()


def pip_install(place: Place, requirements: list[str]) -> None:
    options = ["--quiet", "--quiet", "--no-input", "--disable-pip-version-check", "--constraint"]
    constraints = str(place.root / "constraints.txt")
    done = run([str(place.python), "-m", "pip", "install", *options, constraints, *requirements])
    if done.returncode != 0:
        raise SetupFailed(f"{tail(done)}\npeer: pip failed; is there a network, and free disk? Start again to go on")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # No PYTHONPATH: pip must not take the checkout's folders for installed packages.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # The child inherits the lock: a pip that outlives us still holds it, and nobody rebuilds under its hands.
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
        close_fds=False,
    )


def tail(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join(done.stdout.strip().splitlines()[-20:])


def write_stamp(place: Place, kind: str, key: str) -> None:
    draft = place.venv / f"stamp.{kind}.draft"
    draft.write_text(f"{key.strip()}\n")
    draft.replace(place.stamp(kind))


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Held by one process of this checkout at a time; the system frees it when that process dies, however it dies."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another start is setting up this checkout; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield


def say(text: str) -> None:
    print(f"peer: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
