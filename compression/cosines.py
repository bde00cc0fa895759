"""The DCT-II basis as integers that are the same on every machine, and as real numbers."""

from __future__ import annotations

from decimal import ROUND_HALF_EVEN, Context, Decimal
from functools import lru_cache

BASIS_BITS = 22
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
# A context of our own: the caller's precision, rounding and traps must not reach the wire.
_CONTEXT = Context(prec=50, rounding=ROUND_HALF_EVEN)


def integer_basis(length: int) -> list[list[int]]:
    """Row u, column i: round(2^22 s_u cos(pi (2i + 1) u / (2 length))), s_0 = sqrt(1/length), else sqrt(2/length)."""
    factor = Decimal(2**BASIS_BITS)
    return [
        [int(_CONTEXT.to_integral_value(_CONTEXT.multiply(value, factor))) for value in row] for row in _basis(length)
    ]


def real_basis(length: int) -> list[list[float]]:
    """The same before rounding, as the nearest floats."""
    return [[float(value) for value in row] for row in _basis(length)]


@lru_cache(maxsize=256)
def _basis(length: int) -> list[list[Decimal]]:
    """In decimal arithmetic, whose results are defined to the last digit; a C library's `cos` is not."""
    cosines = _cosines(length)
    first = _CONTEXT.sqrt(_CONTEXT.divide(Decimal(1), Decimal(length)))
    other = _CONTEXT.sqrt(_CONTEXT.divide(Decimal(2), Decimal(length)))
    return [
        [_CONTEXT.multiply(other if u else first, cosines[(2 * i + 1) * u % (4 * length)]) for i in range(length)]
        for u in range(length)
    ]


def _cosines(length: int) -> list[Decimal]:
    """cos(pi j / (2 length)) for j = 0 .. 4 length - 1, by cos (j+1)t = 2 cos t cos jt - cos (j-1)t.

    The recurrence loses a few of its 50 digits over 512 terms; the basis needs 8.
    """
    step = _cosine(_CONTEXT.divide(_PI, Decimal(2 * length)))
    twice = _CONTEXT.multiply(Decimal(2), step)
    cosines = [Decimal(1), step]
    while len(cosines) < 4 * length:
        cosines.append(_CONTEXT.subtract(_CONTEXT.multiply(twice, cosines[-1]), cosines[-2]))
    return cosines


def _cosine(angle: Decimal) -> Decimal:
    """The Taylor series; for 0 < angle <= pi/2 forty terms leave less than 10^-80."""
    square = _CONTEXT.multiply(angle, angle)
    term = total = Decimal(1)
    for n in range(1, 41):
        term = _CONTEXT.divide(_CONTEXT.multiply(term, square), Decimal((2 * n - 1) * (2 * n)))
        total = _CONTEXT.subtract(total, term) if n % 2 else _CONTEXT.add(total, term)
    return total
