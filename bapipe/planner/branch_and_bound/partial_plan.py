"""A node of the search tree: the first stages of a plan, and the numbers that its bounds need.

Letters such as f, x and e are those of `lower_bound.py`.
"""

from dataclasses import dataclass

from bapipe.planner.stages.placements import StagePlacement


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """A stage of a partial plan.

    Attributes:
        num_replicas, max_in_flight, forward_ns: R, d and f.
        round_trip_before_ns: one micro-batch through the stages before this one and back.
    """

    num_replicas: int
    max_in_flight: int
    forward_ns: int
    round_trip_before_ns: int


@dataclass(frozen=True, slots=True)
class PartialPlan:
    """The first stages of a plan, and what they say of the step. The next stage has its placement, but not its end.

    Attributes:
        boundaries: (0, ..., i): where the stages so far begin and end.
        placements: of the stages so far, and of the next one.
        first_arrival_ns: when the first micro-batch can reach the next stage: sum (f + x).
        last_arrival_ns: when the last micro-batch can: bound "last micro-batch" of the stages so far.
        tail_ns: what must follow the next stage's last r: max over the stages j so far of sum (y + r) + e_j.
        backwards_tail_ns: what must follow its first r if only backwards remain (forwards first).
        forwards_ns: what F of all micro-batches add to those of the first one (forwards first).
        send_ns, grad_ns: x and y of the last stage so far.
        bound_ns: the lower bound from the stages so far.
        round_trip_ns: one micro-batch through the stages so far and back.
        stages: the stages so far.
        work_ns: if devices have several stages, F and B of all micro-batches on each device so far. [positions]
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
        """Whether every layer has its stage."""
        return len(self.boundaries) > len(self.placements)
