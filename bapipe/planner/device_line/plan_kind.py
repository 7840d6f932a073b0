"""Kinds of plans, which a bound decides one by one."""

from typing import NamedTuple


class PlanKind(NamedTuple):
    """Plans with so many cuts between their stages, and replicas of their last and first stages."""

    fewest_cuts: int
    most_cuts: int
    last_fewest: int
    last_most: int
    first_fewest: int
    first_most: int
