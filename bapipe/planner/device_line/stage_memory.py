"""What the layers of a line hold on devices, from sums over them, without a table of actions."""

import numpy as np

from bapipe.planner.device_line.line import DeviceLine
from bapipe.simulator.interval_costs import cut_bytes, prefix_sums


class StageMemory:
    """What stages hold, for one micro-batch size. Tied weights and kinds with other sizes are left out.

    Attributes:
        state, stash, left: sums over the layers before each one: of parameters, gradients and states of the optimizer,
            of stashes, and of what I leaves for W. [layers + 1]
        sent, returned: the bytes that pass each cut, forwards and backwards. [layers + 1]
        workspace: of each layer. [layers]
    """

    def __init__(self, line: DeviceLine, microbatch_size: int) -> None:
        self.line, self.num_microbatches = line, line.options.minibatch_size // microbatch_size
        profile = line.profiles[min(device.kind for device in line.cluster.devices)]
        measured = profile.at(microbatch_size)
        state = [x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in profile.layers]
        self.state, self.stash = prefix_sums(state), prefix_sums([m.stash_bytes for m in measured])
        self.left = prefix_sums([m.left_by_input_grad_bytes for m in measured])
        self.sent, self.returned = (np.asarray(of_cuts) for of_cuts in cut_bytes(profile, microbatch_size))
        self.workspace = np.array([m.workspace_bytes for m in measured])
