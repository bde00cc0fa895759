"""Child processes that take one JSON object a line and answer likewise; for what must be measured inside a process."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import IO, Any, final

from simulator.processes import environment

STOP_SECONDS_MAX = 10.0


class ChildFailed(Exception):
    """A child ended or was silent for too long; the text has its last words."""


@final
class Child:
    """A running `python -m MODULE ARGUMENTS`; stdout must be JSON, stderr is kept for `ChildFailed`."""

    def __init__(self, module: str, arguments: Sequence[str], peers: int) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment(peers),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.process_id = self._process.pid
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closing its input asks a child to end; it is killed if it does not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_SECONDS_MAX)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def tell(self, **message: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def hear(self, seconds_max: float) -> dict[str, Any]:
        """Its next answer; raises `ChildFailed`."""
        try:
            answer = self._answers.get(timeout=seconds_max)
        except queue.Empty:
            raise ChildFailed(f"silent for {seconds_max:g} s: {self._last_words()}") from None
        if answer is None:
            raise ChildFailed(f"ended: {self._last_words()}")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._answers.put(json.loads(line))
            except ValueError:
                continue  # A library's remark.
        self._answers.put(None)

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-2000:].decode(errors="replace").strip()


@contextmanager
def open_children(module: str, arguments: Sequence[Sequence[str]]) -> Iterator[list[Child]]:
    """One child for each list of arguments; all of them are gone in the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(Child(module, given, len(arguments))) for given in arguments]


def ask_all(children: Sequence[Child], seconds_max: float, **message: object) -> list[dict[str, Any]]:
    """Tells all of them the same, then collects every answer."""
    for child in children:
        child.tell(**message)
    return [child.hear(seconds_max) for child in children]


def answer(value: Mapping[str, object]) -> None:
    """In a child: to whoever asked."""
    print(json.dumps(value), flush=True)
