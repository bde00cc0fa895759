"""Learning-rate schedules as pure functions of the position in a run, with the same bits on every machine."""

from __future__ import annotations

import struct
from dataclasses import dataclass

SCHEDULES = ("constant", "cosine", "wsd")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A linear warm-up to 1, then `constant`, `cosine` to `final`, or `wsd` (stable, then linear to `final`).

    All lengths are in rounds. `rounds` is the length of the run; 0 means open-ended: every kind is then constant
    after the warm-up. `decay` is the share of the run over which `wsd` falls.
    """

    kind: str = "wsd"
    warmup: int = 10
    rounds: int = 0
    decay: float = 0.3
    final: float = 0.0

    def validate(self, prefix: str = "schedule") -> None:
        """Raises `ValueError` naming the setting and its value."""
        if self.kind not in SCHEDULES:
            raise ValueError(f"{prefix}.kind = {self.kind!r}: must be one of {', '.join(SCHEDULES)}")
        for name in ("warmup", "rounds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{prefix}.{name} = {getattr(self, name)}: must not be negative")
        if not 0 < self.decay <= 1:
            raise ValueError(f"{prefix}.decay = {self.decay}: must be above 0 and at most 1")
        if not 0 <= self.final <= 1:
            raise ValueError(f"{prefix}.final = {self.final}: must lie between 0 and 1")

    def factor(self, position: float) -> float:
        """What to multiply the peak learning rate by at `position`, in rounds since the start (may be fractional).

        Only + - * / on Python floats, which IEEE 754 fixes; `math.cos` may differ in its last bit between libraries.
        """
        warm = min(1.0, (position + 1) / (self.warmup + 1))
        return warm * self.decayed(min(1.0, position / self.rounds)) if self.rounds else warm

    def decayed(self, done: float) -> float:
        """The factor without the warm-up when the share `done` of the run is over."""
        if self.kind == "cosine":
            fall = (1 - cosine_of_half_turns(done)) / 2
        elif self.kind == "wsd":
            fall = (done - (1 - self.decay)) / self.decay
        else:
            fall = 0.0
        # Rounding may leave a fall of 1 + 1e-15, and a learning rate below zero would climb.
        return 1 - min(1.0, max(0.0, fall)) * (1 - self.final)


def cosine_of_half_turns(x: float) -> float:
    """cos(pi x) for x in [0, 1], within 1e-9: the Taylor polynomial of the sine about a quarter turn."""
    angle = 3.141592653589793 * (0.5 - x)
    square = angle * angle
    total = 0.0
    for power in (15, 13, 11, 9, 7, 5, 3):
        total = (1 + total) * -square / (power * (power - 1))
    return angle * (1 + total)


def integer_power(base: float, exponent: int) -> float:
    """base ** exponent by squaring: multiplications only, so the same bits everywhere, unlike the C library's pow."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def float32(value: float) -> float:
    """`value` rounded to the float32 that a tensor is multiplied by; rounding here leaves no choice to a device."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
