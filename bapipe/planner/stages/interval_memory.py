"""Memory of every layer interval [begin, end) between legal cuts: the bytes that a stage with these layers needs.

Shapes as in `intervals.py`.
"""

from collections.abc import Sequence

import numpy as np

from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile
from bapipe.planner.stages.intervals import BoolArray, IntArray, IntervalIndex, Rows
from bapipe.simulator.in_flight import InFlight, in_flight_bytes
from bapipe.simulator.tied_weights import TiedWeights


class IntervalMemory:
    """Bytes of every interval at one micro-batch size, on one kind of device. All [intervals].

    Attributes:
        static_bytes: parameters, gradients, optimizer state and workspace, with the copies of tied weights.
        stash_bytes: kept per micro-batch from F to the end of its backward.
        gradient_stash_bytes: what I leaves for W, per micro-batch; 0 if the stage sends no gradient back.
        input_bytes, output_grad_bytes: activations received per micro-batch, and gradients of the outputs received.
    """

    def __init__(
        self,
        intervals: IntervalIndex,
        profile: ModelProfile,
        microbatch_size: int,
        cut_bytes: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """`cut_bytes` are the activations and the gradients that cross the cut before each layer. [layers + 1]"""
        measured = profile.at(microbatch_size)
        static_bytes = [
            layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in profile.layers
        ]
        self.static_bytes = intervals.sums(static_bytes) + intervals.maxima([m.workspace_bytes for m in measured])
        self.static_bytes += _tied_copy_bytes(intervals, profile)
        self.stash_bytes = intervals.sums([m.stash_bytes for m in measured])
        left_for_w = intervals.sums([m.left_by_input_grad_bytes for m in measured])
        self.gradient_stash_bytes = np.where(intervals.sends_gradient(profile), left_for_w, 0)
        # [layers + 1] -> [boundaries]. Activations come in at the begin of a stage, gradients at its end.
        send, grad = (np.array([side[cut] for cut in intervals.cuts], dtype=np.int64) for side in cut_bytes)
        self.input_bytes, self.output_grad_bytes = send[intervals.begins], grad[intervals.ends]

    def in_flight_bytes(self, peaks: Sequence[InFlight], rows: Rows, *, recompute: bool) -> IntArray:
        """Returns the bytes that the micro-batches in flight keep, the maximum over some states of a device. [rows]

        Args:
            peaks: the states, from `ReplicaLoad.memory_peaks`.
            recompute: whether the whole stage is recomputed, or nothing.
        """
        stash, gradient_stash = self.stash_bytes[rows], self.gradient_stash_bytes[rows]
        # Without recomputation a micro-batch keeps its stash, and nothing more during its backward.
        states = peaks if recompute else dict.fromkeys(peak._replace(in_backward=0) for peak in peaks)
        kept = self.input_bytes[rows] if recompute else stash
        num_bytes: IntArray = np.maximum.reduce(
            [in_flight_bytes(state, kept, stash, gradient_stash) for state in states]
        )
        return num_bytes

    def least_in_flight_bytes(self, peaks: Sequence[InFlight], rows: Rows) -> IntArray:
        """Returns a lower bound on `in_flight_bytes` for any choice of recomputed layers. [rows]"""
        stash, gradient_stash = self.stash_bytes[rows], self.gradient_stash_bytes[rows]
        num_bytes: IntArray = np.maximum.reduce(
            [min(of.kept, of.in_backward) * stash + of.before_weight_grad * gradient_stash for of in peaks]
        )
        return num_bytes


def _tied_copy_bytes(intervals: IntervalIndex, profile: ModelProfile) -> IntArray:
    """Returns the bytes of tied parameters, gradients and optimizer state of which each interval needs a copy.

    [intervals]
    """
    num_bytes = np.zeros(len(intervals.begins), dtype=np.int64)
    index = {layer.name: i for i, layer in enumerate(profile.layers)}

    def contains(layer: LayerProfile) -> BoolArray:
        cuts, i = np.array(intervals.cuts), index[layer.name]
        inside: BoolArray = (cuts[intervals.begins] <= i) & (i < cuts[intervals.ends])
        return inside

    for owner, users, copy in TiedWeights(profile.layers).copies():
        # The profile counts tied weights at their owner: a stage with a user but without the owner needs a copy.
        # [intervals]
        needs_copy = np.logical_or.reduce([contains(user) for user in users]) & ~contains(owner)
        copy_bytes = copy.param_bytes + copy.gradient_bytes + copy.optimizer_bytes
        num_bytes += np.where(needs_copy, copy_bytes, 0)
    return num_bytes
