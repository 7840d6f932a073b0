"""How fast plans are simulated, so that none is begun for which too little of a time limit is left."""

from bapipe.planner.compute.deadline import Deadline

ACTIONS_PER_S, FEW_ACTIONS = 60_000, 5_000
"""So many actions are simulated in a second, about; and what takes no longer than so many is not asked about."""

TIMES_SIMULATED = 2.5
"""The plan that becomes the result takes so many times as long as its step: its timeline and table are made, too."""


class Pace:
    """The pace of a search, by the largest plan that it has timed."""

    def __init__(self) -> None:
        self._longest = 0, 0.0  # actions, and the seconds that they took

    def note(self, num_actions: int, took_s: float) -> None:
        """Notes a plan that has been timed."""
        self._longest = max(self._longest, (num_actions, took_s))

    def has_time_for(self, num_actions: int, deadline: Deadline, num_times: float = 1.0) -> bool:
        """Returns whether a plan with so many actions is timed so often before a deadline, about."""
        most_actions, took_s = self._longest
        per_s = most_actions / took_s if most_actions > FEW_ACTIONS else ACTIONS_PER_S
        return num_actions < FEW_ACTIONS or deadline.has_time_for(num_times * num_actions, per_s)

    def has_time_for_result(self, num_actions: int, deadline: Deadline) -> bool:
        """Returns whether a plan with so many actions is timed, and made the result, before a deadline, about."""
        return self.has_time_for(num_actions, deadline, TIMES_SIMULATED)
