"""Limits between the bound and the best step, of which a search proves one after another that no plan is within it."""

FIRST_SHARE = 1 / 4
"""How much of the gap between the bound and the best step lies below the first limit."""

MIN_GAP_DIVISOR = 1_000
"""If bound and best step differ by less than 1 / `MIN_GAP_DIVISOR` of the step, no limit is set between them."""


def is_small_gap(bound_ns: int, step_ns: int) -> bool:
    """Returns whether no limit is set between a bound and a step."""
    return (step_ns - bound_ns) * MIN_GAP_DIVISOR < step_ns
