"""Which parameters a round concerns: the model in P parts that take turns, and payloads that say which they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, final

from compression.seam import InvalidPacket
from optimizers.presets import Method
from optimizers.seam import Tensors

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_Value = TypeVar("_Value")


@final
@dataclass(frozen=True, slots=True)
class Fragments:
    """`names` holds the parameters of each fragment, sorted; every parameter is in exactly one.

    A payload begins with one byte, its fragment's index, unless there is only one fragment: so it can be read whatever
    round it belongs to. Two fragments may have equal shapes, and then nothing else would tell them apart. What names
    another fragment than its round's says nothing in that round, at every peer alike.
    """

    names: tuple[tuple[str, ...], ...]

    def __len__(self) -> int:
        return len(self.names)

    def of_round(self, number: int) -> int:
        """The index of the fragment that round `number`, from 1, concerns."""
        return (number - 1) % len(self.names)

    def part(self, index: int, values: Mapping[str, _Value]) -> dict[str, _Value]:
        return {name: values[name] for name in self.names[index]}

    def labelled(self, index: int, packed: bytes) -> bytes:
        return packed if len(self.names) == 1 else bytes([index]) + packed

    def opened(self, payload: bytes) -> tuple[int, bytes]:
        """Fragment and packets; raises `InvalidPacket` where there is no such fragment."""
        if len(self.names) == 1:
            return 0, payload
        if not payload or payload[0] >= len(self.names):
            raise InvalidPacket(f"payload names no fragment of {len(self.names)}")
        return payload[0], payload[1:]


def fragments_of(anchor: Tensors, method: Method) -> Fragments:
    """The method's fragments of a model; raises `ValueError` where it has too few parameters."""
    return Fragments(partition({n: t.numel() for n, t in anchor.items()}, method.fragments, method.fragment_by))


def partition(sizes: Mapping[str, int], fragments: int, by: str = "size") -> tuple[tuple[str, ...], ...]:
    """Every name in exactly one of so many parts, none of them empty; the same for equal `sizes` in any order.

    `size`: the largest first, each to the part that is lightest so far. `layers`: layer l goes to part l mod P, as in
    Streaming DiLoCo (arXiv 2501.18512); what is in no layer follows as in `size`. Raises `ValueError`.
    """
    parts: list[list[str]] = [[] for _ in range(fragments)]
    loads = [0] * fragments
    layers: dict[tuple[str, int], list[str]] = {}
    if by == "layers":
        for name in sorted(sizes):
            found = _LAYER.search(name)
            if found is not None:
                layers.setdefault((name[: found.start()], int(found[1])), []).append(name)
    for order, layer in enumerate(sorted(layers)):
        parts[order % fragments] += layers[layer]
        loads[order % fragments] += sum(sizes[name] for name in layers[layer])
    placed = {name for part in parts for name in part}
    for name in sorted(sizes.keys() - placed, key=lambda name: (-sizes[name], name)):
        # Empty parts first: a parameter may have no elements.
        lightest = min(range(fragments), key=lambda index: (bool(parts[index]), loads[index], index))
        parts[lightest].append(name)
        loads[lightest] += sizes[name]
    if not all(parts):
        units = f"{len(layers)} layers and {len(sizes) - len(placed)} other" if layers else str(len(sizes))
        raise ValueError(f"fragments = {fragments}: the model has only {units} parameters to share out; choose fewer")
    return tuple(tuple(sorted(part)) for part in parts)
