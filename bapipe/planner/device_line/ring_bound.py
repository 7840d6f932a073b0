"""Decides whether any plan can be within a step time, with the rings of early stages behind backwards of later ones.

The bounds of a stage in `prefix_bound.py` end with its own rings, or with the way back of its last micro-batch. But
every earlier stage has the last micro-batches of a later one on their way back before it, several of them on one
replica, and only then the rings of its own gradients: its *delay*, beyond the way back of one micro-batch. So the
dynamic programme over prefixes has levels: of what the longest delay so far is. A level is a range, of which the limits
of later stages use the lower end (docs/many_devices.md).

Let y + 1 micro-batches leave the later stage at the end, and R be the devices of the earlier one, with backward b. The
delay is at least e + floor(y / R) b, and that at least e + h + y density, with the smallest h over all y. Here e is B
of the first bucket and the rings, less B of all layers before the stage's end and the transfers back over the cuts
before it, but 0 at least. Levels are ranges of e + h. On unlike devices y counts as 0: the last micro-batches of
replicas that are not equally fast do not end together.
"""

import threading
from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.prefix_bound import ROUNDING_NS, PrefixBound

if TYPE_CHECKING:
    from bapipe.planner.device_line.stage_delays import Delays

DENSITY = 0.7
"""Delays count each micro-batch left behind as this part of all B of one, divided by the devices."""

FEW_LEVELS, MANY_LEVELS = 32, 64
"""Of delays."""


class RingBound:
    """The problem of a prefix bound with replicas, and 1F1B or GPipe.

    Attributes:
        num_tried: the work so far, see `FurthestPrefixes`.
    """

    def __init__(self, prefix: PrefixBound, longest_ns: float) -> None:
        """Delays above `longest_ns` are not told apart."""
        self.prefix, self.num_tried = prefix, 0
        self._counts = threading.Lock()
        self._few, self._many = (_delays(prefix, longest_ns, num) for num in (FEW_LEVELS, MANY_LEVELS))

    def is_feasible(
        self, kind: PlanKind, limit_ns: int, deadline: Deadline, *, counts_cuts: bool = True, is_fine: bool = True
    ) -> bool:
        """Returns whether the relaxation has a plan of a kind within a step time.

        Args:
            counts_cuts: whether prefixes with different numbers of cuts are told apart: that takes longer, ...
            is_fine: ... as it does to tell many levels of delays apart.
        """
        delays = self._many if is_fine else self._few
        prefixes = FurthestPrefixes(self.prefix.programme, kind, limit_ns, delays, counts_cuts=counts_cuts)
        try:
            return prefixes.find(deadline) is not None
        finally:
            with self._counts:  # ranges are asked in several threads
                self.num_tried += prefixes.num_tried


def _delays(prefix: PrefixBound, longest_ns: float, num_levels: int) -> "Delays":
    """What the compiled programme needs to know of delays."""
    from bapipe.planner.device_line.stage_delays import Delays

    few, most, num = prefix.classes.fewest, prefix.classes.most, prefix.num_microbatches
    left = np.zeros_like(most)
    if prefix.has_one_speed:
        # As many micro-batches but one are each the last one of a replica that has the most.
        left = np.minimum(num - 1 - (-(-num // most) - 1) * most, (num - 1) // 2)
    density_ns = DENSITY * float(prefix.least.backward[-1]) / prefix.max_speed / prefix.num_devices
    most_left = int(left.max())
    rounds = most_left // most
    counted = [-np.minimum(most - 1, most_left), 1 - rounds * most, np.full_like(most, -most_left)]
    rounding_ns = ROUNDING_NS * (most_left // few + 3) + prefix.rounded_ns
    least_ns = -most_left * density_ns
    level_ns = (longest_ns - least_ns) / num_levels
    from_ns = least_ns + level_ns * np.arange(num_levels, dtype=float)
    from_ns[0] = -np.inf
    return Delays(
        from_ns=from_ns,
        least_ns=least_ns,
        level_ns=level_ns,
        left=left * density_ns,
        rounds=rounds.astype(float),
        filler=np.stack(counted, axis=1) * density_ns - rounding_ns[:, None],
        back=np.cumsum(np.append(0.0, np.sort(prefix.back_ns)[::-1])),
    )
