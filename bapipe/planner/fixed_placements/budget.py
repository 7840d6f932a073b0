"""The budget of a search, counted in simulated actions so that results do not depend on the speed of the machine."""

from collections.abc import Callable


class Budget:
    """How much work a search may do.

    Attributes:
        spent: how much it has done, in actions.
    """

    def __init__(self, max_actions: int, stop: Callable[[], bool]) -> None:
        """`stop` says whether the search should end although work is left."""
        self._max_actions, self._stop, self.spent = max_actions, stop, 0

    def spend(self, num_actions: int) -> None:
        """Counts work that takes as long as the simulation of so many actions."""
        self.spent += num_actions

    def is_over(self) -> bool:
        """Returns whether all the work is done, or the search should end."""
        return self.spent >= self._max_actions or self._stop()
