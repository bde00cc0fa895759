"""The first bytes of a packet: what it is, so that anyone can name its chain, and that it fits one model only."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from compression.seam import InvalidPacket, TensorSpec

VERSION = 2
LAYOUT_BYTES = 2
# A word's number on the wire is its place here; how many numbers follow it is how many stand in its form.
WORDS = (
    "identity", "dct(n)",
    "all", "topk(k/n)", "globaltopk(k/n)", "random(k/n)", "mask(k/n)",
    "fp32", "bf16", "fp16", "bits(b)", "int(b)", "e3m0",
)  # fmt: skip
_CHAIN_WORDS = 3
_NUMBER_BYTES_MAX = 5


@final
@dataclass(frozen=True, slots=True)
class Description:
    """What a packet says of itself: the name of its chain, and a check of its tensors' shapes and types."""

    version: int
    chain: str
    layout: bytes
    header_bytes: int


def header_of(chain: str, layout: bytes) -> bytes:
    return bytes([VERSION]) + _encoded(chain) + layout


def describe(data: bytes) -> Description:
    """Reads the header alone; raises `InvalidPacket`."""
    if not data:
        raise InvalidPacket("version: missing")
    if data[0] != VERSION:
        raise InvalidPacket(f"version: {data[0]}, this is {VERSION}")
    words = []
    at = 1
    for _ in range(_CHAIN_WORDS):
        if at >= len(data) or data[at] >= len(WORDS):
            raise InvalidPacket("chain: truncated" if at >= len(data) else f"chain: word {data[at]} does not exist")
        form = WORDS[data[at]]
        at += 1
        numbers = []
        for _ in range(_arity(form)):
            number, at = _number(data, at)
            numbers.append(str(number))
        words.append(form.partition("(")[0] + (f"({'/'.join(numbers)})" if numbers else ""))
    if at + LAYOUT_BYTES > len(data):
        raise InvalidPacket("layout: truncated")
    return Description(VERSION, " ".join(words), data[at : at + LAYOUT_BYTES], at + LAYOUT_BYTES)


def check_header(data: bytes, chain: str, layout: bytes) -> int:
    """How many bytes it takes; raises `InvalidPacket` when it is not the header of this chain and these tensors."""
    expected = header_of(chain, layout)
    if data[: len(expected)] == expected:
        return len(expected)
    said = describe(data)
    if said.chain != chain or data[: len(expected) - LAYOUT_BYTES] != expected[:-LAYOUT_BYTES]:
        raise InvalidPacket(f"chain: {said.chain}, this run has {chain}")
    raise InvalidPacket("layout: of tensors with other shapes or types")


def layout_of(specs: Sequence[TensorSpec]) -> bytes:
    """16 bits that differ, most likely, between models: against mistakes, not against malice."""
    return _layout(tuple(specs))


@lru_cache(maxsize=64)
def _layout(specs: tuple[TensorSpec, ...]) -> bytes:
    text = ";".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
    return (zlib.crc32(text.encode()) & 0xFFFF).to_bytes(LAYOUT_BYTES, "big")


@lru_cache(maxsize=64)
def _encoded(chain: str) -> bytes:
    forms = {form.partition("(")[0]: code for code, form in enumerate(WORDS)}
    parts = bytearray()
    for word in chain.split():
        parts.append(forms[word.partition("(")[0]])
        for digits in re.findall(r"\d+", word.partition("(")[2]):
            number = int(digits)
            while number >= 128:
                parts.append(number & 127 | 128)
                number >>= 7
            parts.append(number)
    return bytes(parts)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first, the last without its top bit."""
    number = 0
    for place in range(_NUMBER_BYTES_MAX):
        if at + place >= len(data):
            raise InvalidPacket("chain: truncated")
        number |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128:
            return number, at + place + 1
    raise InvalidPacket("chain: a number is too long")


def _arity(form: str) -> int:
    return form.count("/") + 1 if "(" in form else 0
