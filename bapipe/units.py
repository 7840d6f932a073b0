"""Integer types of the file formats, exact rounding, and numbers for people."""

from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, log10
from typing import Annotated

import msgspec

MAX_INT = 2**63 - 1
"""Largest integer a file may hold: 292 years in nanoseconds, 8 EiB in bytes."""

NonNegative = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


def decimal(value: float) -> Fraction:
    """Returns the decimal number that a file or a user writes as this float: 15/100 of 0.15, which is a little less."""
    return Fraction(str(value))


def round_half_up(value: Fraction) -> int:
    """Returns the nearest integer, the larger one of two equally near."""
    return (2 * value.numerator + value.denominator) // (2 * value.denominator)


def number(value: float) -> str:
    """Returns a number with three significant digits: all digits before the point, at most three after it.

    Rounding up to a power of ten gives one digit more: 9.996 is 10.00.
    """
    if value == 0:
        return "0"
    return f"{value:,.{_num_decimals(value)}f}"


def number_down(value: float) -> str:
    """Returns a positive number as `number` does, but rounded down: for what something is at least."""
    if value == 0:
        return "0"
    decimals = _num_decimals(value)
    return f"{Decimal(repr(value)).quantize(Decimal(1).scaleb(-decimals), ROUND_FLOOR):,.{decimals}f}"


def _num_decimals(value: float) -> int:
    return min(max(0, 2 - floor(log10(abs(value)))), 3)


def percent_up(share: float, num_digits: int = 2) -> str:
    """Returns a share in percent, rounded up: for what something is at most, such as a gap.

    A gap is a quotient less 1: what rounding may have added to it is left out, so that 3.2 % are `3.20%`.
    """
    num_steps = 10 ** (num_digits + 2)
    steps = max(ceil((share - 2**-52 * (1 + share)) * num_steps), int(share > 0))
    return f"{steps / num_steps:,.{num_digits}%}"


def percent_change(share: float) -> str:
    """Returns by how much something changes, in percent with its sign; what rounds to nothing is `+0.0%`."""
    return f"{share:+z,.1%}"


def at_speed(time_ns: int, speed: float) -> int:
    """Returns `time_ns / speed` rounded half up; `speed` is read as the decimal number a file shows."""
    if speed == 1.0:
        return time_ns
    numerator, denominator = _ratio(speed)
    return (2 * time_ns * denominator + numerator) // (2 * numerator)


@lru_cache(maxsize=4096)
def _ratio(speed: float) -> tuple[int, int]:
    fraction = decimal(speed)
    return fraction.numerator, fraction.denominator
