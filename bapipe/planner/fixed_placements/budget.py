"""The budget of a search, in simulated actions, so that results do not depend on the speed of the machine."""

from bapipe.planner.compute.deadline import Deadline


class Budget:
    """How much work a search may still do.

    Attributes:
        spent: the work done so far, in simulated actions.
    """

    def __init__(self, max_actions: int, deadline: Deadline) -> None:
        """`deadline` ends the search even if some of the budget is left."""
        self._max_actions, self._deadline, self.spent = max_actions, deadline, 0

    def spend(self, num_actions: int) -> None:
        """Counts work that takes as long as simulating `num_actions` actions."""
        self.spent += num_actions

    @property
    def is_out_of_time(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline.is_over

    def part(self, divisor: int) -> "Budget":
        """Returns a budget of its own, of a part of what is left: its spending is not counted here."""
        left = max(0, self._max_actions - self.spent)
        return Budget(left // divisor, self._deadline.share_of_limit(divisor))

    def is_over(self) -> bool:
        """Returns whether the budget is spent or the deadline has passed."""
        return self.spent >= self._max_actions or self.is_out_of_time
