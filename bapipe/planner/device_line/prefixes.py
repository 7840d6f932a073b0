"""Prefixes of plans, behind which a bound adds a stage."""

from dataclasses import dataclass

from bapipe.planner.branch_and_bound.intervals import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Prefixes on as many devices, of plans that may be of several kinds. All [prefixes].

    Attributes:
        begins: the boundary at which the next stage begins.
        cuts: the cuts before that stage.
        fewest_cuts: the cuts that the whole plan has at least.
        last_fewest, last_most: the replicas that its last stage may have.
    """

    begins: IntArray
    cuts: IntArray
    fewest_cuts: IntArray
    last_fewest: IntArray
    last_most: IntArray
