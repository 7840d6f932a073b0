"""The memory that layers of a line take on devices, and the room of stages, without a table of actions."""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bapipe.planner.device_line.in_flight import most_held
from bapipe.planner.device_line.line import DeviceLine
from bapipe.simulator.interval_costs import cut_bytes, prefix_sums

if TYPE_CHECKING:
    from bapipe.planner.device_line.fitting_programme import FittingLayers, FittingStages


class LineMemory:
    """What stages hold, for one micro-batch size. Ignores tied weights, and that sizes may differ between kinds.

    Attributes:
        state, stash, left: sums over the layers before each one: of parameters, gradients and states of the optimizer,
            of stashes, and of what I leaves for W. [layers + 1]
        sent, returned: the bytes that pass each cut, forwards and backwards. [layers + 1]
        workspace: of each layer. [layers]
    """

    def __init__(self, line: DeviceLine, microbatch_size: int) -> None:
        self.microbatch_size, self.num_microbatches = microbatch_size, line.options.minibatch_size // microbatch_size
        self._cuts = np.array(line.cuts)
        profile = line.profiles[line.kinds[0]]
        measured = profile.at(microbatch_size)
        state = [x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in profile.layers]
        self.state, self.stash = prefix_sums(state), prefix_sums([m.stash_bytes for m in measured])
        self.left = prefix_sums([m.left_by_input_grad_bytes for m in measured])
        self.sent, self.returned = (np.asarray(of_cuts) for of_cuts in cut_bytes(profile, microbatch_size))
        self.workspace = np.array([m.workspace_bytes for m in measured])

    @cached_property
    def at_boundaries(self) -> "FittingLayers":
        """Returns what the layers hold, by the boundaries of the line: the same for all orders of its devices."""
        from bapipe.planner.device_line.fitting_programme import FittingLayers

        cuts = self._cuts
        return FittingLayers(
            state=self.state[cuts],
            stash=self.stash[cuts],
            left=self.left[cuts],
            sent=self.sent[cuts],
            returned=self.returned[cuts],
            workspace=np.maximum.reduceat(self.workspace, cuts[:-1]),
        )

    def room(
        self, line: DeviceLine, schedule: str, num_devices: int, stages: Iterable[tuple[int, int]]
    ) -> "FittingStages":
        """Returns what stages have to fit in.

        Args:
            num_devices: the number of devices of all stages together.
            stages: the first device and the number of devices of each stage.
        """
        from bapipe.planner.device_line.fitting_programme import FittingStages

        rows = []
        for first, count in stages:
            most = most_held(schedule, first, num_devices - first, self.num_microbatches, count)
            limit = min(line.limits[first : first + count])
            rows.append((*most, -(-self.num_microbatches // count), limit))
        return FittingStages(*np.array(rows).T.copy())
