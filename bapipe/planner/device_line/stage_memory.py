"""What the devices of a stage hold, from sums over the layers, without a table of actions."""

from collections.abc import Sequence

import numpy as np

from bapipe.planner.device_line.line import DeviceLine
from bapipe.simulator.in_flight import InFlight
from bapipe.simulator.interval_costs import BoolArray, Index, IntArray, cut_bytes, prefix_sums


class StageMemory:
    """Says whether stages fit, for one micro-batch size. Tied weights and kinds with other sizes are left out."""

    def __init__(self, line: DeviceLine, microbatch_size: int) -> None:
        self.line, self.num_microbatches = line, line.options.minibatch_size // microbatch_size
        profile = line.profiles[min(device.kind for device in line.cluster.devices)]
        measured = profile.at(microbatch_size)
        state = [x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in profile.layers]
        # Sums over the layers before each one, and the bytes that pass each cut. [layers + 1]
        self.static, self.stash = prefix_sums(state), prefix_sums([m.stash_bytes for m in measured])
        self.sent, self.returned = (np.asarray(of_cuts) for of_cuts in cut_bytes(profile, microbatch_size))
        self.left = prefix_sums([m.left_by_input_grad_bytes for m in measured])
        self.workspace = np.array([m.workspace_bytes for m in measured])

    def fits(self, begin: Index, end: Index, workspace_bytes: Index, ranks: Sequence[int], most: InFlight) -> BoolArray:
        """Returns whether stages of the layers [begin, end) fit on some devices, recomputed if the options allow it.

        Args:
            workspace_bytes: the largest one of the layers of each stage.
            most: the micro-batches that each of the devices holds.
        """
        keeps, limit = (False, True) if self.line.options.recompute else (True,), self.limit(ranks)
        held = [self._held(begin, end, len(ranks), most, keeps_all=each) + workspace_bytes for each in keeps]
        fits: BoolArray = np.minimum.reduce(held) <= limit
        return fits

    def limit(self, ranks: Sequence[int]) -> int:
        """Returns how many bytes each of some devices may hold."""
        return min(self.line.limits[rank] for rank in ranks)

    def least_held(self, most: InFlight) -> IntArray:
        """Returns sums over the layers before each one of what they hold in a stage at least. [layers + 1]"""
        return self.static + self.stash * (most.in_backward if self.line.options.recompute else most.kept)

    def _held(self, begin: Index, end: Index, num_replicas: int, most: InFlight, *, keeps_all: bool) -> IntArray:
        """Bytes of a device: parameters, stashes or inputs, what I leaves for W, and buffers; without workspace."""
        stash, received = self.stash[end] - self.stash[begin], self.sent[begin]
        kept = most.kept * stash if keeps_all else most.kept * received + most.in_backward * stash
        # A stage that sends no gradient back has no I that leaves anything.
        left = np.where(self.returned[begin] > 0, self.left[end] - self.left[begin], 0)
        buffers = -(-self.num_microbatches // num_replicas) * (received + self.returned[end])
        held: IntArray = self.static[end] - self.static[begin] + kept + most.before_weight_grad * left + buffers
        return held
