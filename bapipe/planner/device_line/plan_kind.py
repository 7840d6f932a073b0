"""Kinds of plans: what a bound is asked about."""

from typing import NamedTuple

ANY_END = 2**31 - 1


class PlanKind(NamedTuple):
    """Limits for the number of cuts, the replicas of the last and the first stage, and the end of the first stage."""

    fewest_cuts: int
    most_cuts: int
    last_fewest: int
    last_most: int
    first_fewest: int
    first_most: int
    earliest_end: int = 0
    latest_end: int = ANY_END
