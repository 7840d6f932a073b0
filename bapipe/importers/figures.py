"""Numbers in other tools' files."""

from math import inf

from bapipe.errors import BapipeError
from bapipe.units import MAX_INT


def figure(line: int, text: str, what: str, factor: int = 1) -> int:
    """Returns a number times `factor`, rounded.

    Raises:
        BapipeError: it is no number, negative, or larger than a profile may hold.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < inf:
        raise BapipeError(f"line {line}: '{text[:40]}' is not a valid {what}; want a number >= 0")
    if value * factor > MAX_INT:
        raise BapipeError(f"line {line}: the {what} {text[:40]} is too large; check the unit")
    return round(value * factor)
