"""What the exit code of `peer` means, and which exception leads to which."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from peer.errors import NetworkFailed, RunNotFound, TrainingFailed


class ExitCode(IntEnum):
    """Documented in docs/exit-codes.md and at the end of `peer --help`."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NETWORK = 3
    NOT_FOUND = 4
    TRAINING = 5
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.UNEXPECTED: "an unexpected error: --debug shows where",
    ExitCode.USAGE: "a wrong option, value or file content",
    ExitCode.NETWORK: "nobody could be reached, or the port is taken",
    ExitCode.NOT_FOUND: "no such run, file or folder",
    ExitCode.TRAINING: "the training failed, or ended before its goal",
    ExitCode.INTERRUPTED: "interrupted (Ctrl+C)",
}

# The first that matches counts: FileNotFoundError is an OSError, InvalidSpec and InvalidIdentity are ValueErrors.
_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (KeyboardInterrupt, ExitCode.INTERRUPTED),
    (NetworkFailed, ExitCode.NETWORK),
    (RunNotFound, ExitCode.NOT_FOUND),
    (FileNotFoundError, ExitCode.NOT_FOUND),
    (TrainingFailed, ExitCode.TRAINING),
    (ValueError, ExitCode.USAGE),
)


def explained(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code for what came out of a command, and the sentence for the user.

    Of a group of exceptions, as task groups raise them, the first that has a code of its own speaks.
    """
    for kind, code in _CODES:
        for leaf in leaves(error):
            if isinstance(leaf, kind):
                return code, sentence(leaf)
    leaf = next(leaves(error))
    text = f"unexpected {type(leaf).__name__}: {leaf}; the same command with --debug shows where it came from"
    return ExitCode.UNEXPECTED, text


def sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group, at any depth; the exception itself if it is none."""
    inner = getattr(error, "exceptions", None)  # Python 3.10 has no name for exception groups.
    if not inner:
        yield error
    else:
        for each in inner:
            yield from leaves(each)
