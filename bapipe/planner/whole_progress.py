"""The progress of a search in parts, such as one for each grouping of the devices, as that of the whole."""

from bapipe.progress import SearchProgress
from bapipe.units import MAX_INT


class WholeProgress:
    """Makes a part's reports the whole search's: the best step of any part, and the smaller of this part's bound and
    `others_ns`.

    Attributes:
        others_ns: a lower bound on the plans of all other parts, those that are still to be searched included.
    """

    def __init__(self, progress: SearchProgress) -> None:
        self._progress = progress
        self._best_ns, self._bound_ns, self.others_ns = MAX_INT, 0, MAX_INT
        self._num_before = self._num_of_part = 0

    def __call__(self, num_simulated: int, best_ns: int, bound_ns: int) -> None:
        """Is told of the part; each search within it counts its simulated plans from the start."""
        if num_simulated < self._num_of_part:
            self._num_before += self._num_of_part
        self._num_of_part = num_simulated
        self._best_ns = min(self._best_ns, best_ns)
        # What was proven of the whole stays so, also where a later search begins with less.
        self._bound_ns = max(self._bound_ns, min(bound_ns, self.others_ns))
        self._progress(self._num_before + num_simulated, self._best_ns, min(self._bound_ns, self._best_ns))


def bounded_progress(progress: SearchProgress, others_ns: int) -> SearchProgress:
    """Returns what a search of some of the plans tells: `others_ns` is a lower bound on the other ones."""

    def report(num_simulated: int, best_ns: int, bound_ns: int) -> None:
        progress(num_simulated, best_ns, min(bound_ns, others_ns))

    return report
