"""Kinds of plans, which a bound decides one by one."""

from typing import NamedTuple

ANY_END = 2**31 - 1


class PlanKind(NamedTuple):
    """Plans with so many cuts between their stages, and replicas of their last and first stages.

    The boundaries at which the first stage ends are only looked at by `prefix_programme.py` and `suffix_programme.py`.
    """

    fewest_cuts: int
    most_cuts: int
    last_fewest: int
    last_most: int
    first_fewest: int
    first_most: int
    earliest_end: int = 0
    latest_end: int = ANY_END
