"""A node of the search tree: the first stages of a plan, and the numbers that its bounds need.

Letters such as f, x and e are those of `lower_bound.py`. All times are lower bounds in ns.
"""

from dataclasses import dataclass

from bapipe.planner.stages.placements import StagePlacement


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A placed stage of a partial plan.

    Attributes:
        num_replicas, max_in_flight, forward_ns: R, d and f.
        round_trip_before_ns: one micro-batch through all previous stages and back: sum of f + x + y + r.
    """

    num_replicas: int
    max_in_flight: int
    forward_ns: int
    round_trip_before_ns: int


@dataclass(frozen=True, slots=True)
class PartialPlan:
    """The placed stages, and what they mean for the step. The next stage has a placement, but no end yet.

    Attributes:
        boundaries: (0, ..., i): where the placed stages begin and end.
        placements: those of the placed stages, and of the next one unless the plan is complete.
        first_arrival_ns: when the first micro-batch can reach the next stage: sum of f + x.
        last_arrival_ns: when the last micro-batch can, by the bound "last micro-batch" of the placed stages.
        tail_ns: how long the step goes on after the next stage's last r: max over stages j of (sum of y + r) + e_j.
        backwards_tail_ns: how long it goes on after the next stage's first r, if all F come first (forwards first).
        forwards_ns: how much later one of the final micro-batches reaches the next stage than the first one does
            (forwards first).
        send_ns, grad_ns: x and y between the last placed stage and the next one.
        bound_ns: the lower bound on the step from the placed stages alone.
        round_trip_ns: one micro-batch through the placed stages and back: sum of f + x + y + r.
        stages: the placed stages.
        work_ns: if devices have several stages, F and B of all micro-batches on each device so far, else ().
            [positions]
    """

    boundaries: tuple[int, ...]
    placements: tuple[StagePlacement, ...]
    first_arrival_ns: int = 0
    last_arrival_ns: int = 0
    tail_ns: int = 0
    backwards_tail_ns: int = 0
    forwards_ns: int = 0
    send_ns: int = 0
    grad_ns: int = 0
    bound_ns: int = 0
    round_trip_ns: int = 0
    stages: tuple[PlacedStage, ...] = ()
    work_ns: tuple[int, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every layer is in a placed stage."""
        return len(self.boundaries) > len(self.placements)
