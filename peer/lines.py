"""Lines on stdout: for people, or one JSON object each for programs."""

from __future__ import annotations

import json


def emit(event: dict[str, object]) -> None:
    """One JSON object on a line of its own."""
    print(json.dumps(event), flush=True)


def say(text: str) -> None:
    print(text, flush=True)


def say_or_emit(as_json: bool, text: str) -> None:
    if as_json:
        emit({"event": "Note", "text": text})
    else:
        say(text)


def counted(count: int, noun: str) -> str:
    """`1 peer`, `2 peers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
