"""How fast plans are simulated, so that none is begun for which too little of a time limit is left."""

from bapipe.planner.compute.deadline import Deadline

ACTIONS_PER_S, FEW_ACTIONS = 60_000, 5_000
"""The assumed rate until a plan has been measured; and the number of actions below which any plan is simulated."""

TIMES_SIMULATED = 2.5
"""What the plan that becomes the result takes, in simulations: its timeline and table are made, too."""


class Pace:
    """The rate at which a search simulates actions, measured on its largest plan so far."""

    def __init__(self) -> None:
        self._longest = 0, 0.0  # actions, and the seconds that they took

    def note(self, num_actions: int, took_s: float) -> None:
        """Records that a plan of `num_actions` actions was simulated in `took_s` seconds."""
        self._longest = max(self._longest, (num_actions, took_s))

    def has_time_for(self, num_actions: int, deadline: Deadline, num_times: float = 1.0) -> bool:
        """Returns whether `num_times` simulations of `num_actions` actions probably end before the deadline."""
        most_actions, took_s = self._longest
        per_s = most_actions / took_s if most_actions > FEW_ACTIONS else ACTIONS_PER_S
        return num_actions < FEW_ACTIONS or deadline.has_time_for(num_times * num_actions, per_s)

    def has_time_for_result(self, num_actions: int, deadline: Deadline) -> bool:
        """The same for one simulation and for building the result from it."""
        return self.has_time_for(num_actions, deadline, TIMES_SIMULATED)
