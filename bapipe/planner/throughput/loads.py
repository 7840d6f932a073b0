"""The load of a device: what it does in a step when the pipeline never runs dry.

Of M micro-batches, a device of a stage with r devices runs c = ceil(M / r), and receives and sends what they need:

  compute    c (F + B) + update + all-reduce of the stage's gradients, 2(r-1)(latency + ceil(bytes/r) / bandwidth)
  transfers  c times each: activations in, gradients back, activations out, gradients in

On a device that overlaps transfers with compute the load is the largest of these, else their sum. A tensor that later
stages use is relayed through the stages between. Stashes in flight are those of 1F1B over devices: ceil(w / r) if w
devices run the stage and what follows.

This file holds what every device needs for that: the boundaries, sums of the layers' costs between any two of them, and
transfer times. `homogeneous` and `heterogeneous` make loads of it.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET

from bapipe.formats.cluster import Bandwidth
from bapipe.formats.profile import ModelProfile
from bapipe.graph.downsets import members

if TYPE_CHECKING:
    from bapipe.planner.throughput.problem import BoolArray, IndexArray, IntArray

    Positions = int | IndexArray
    """Numbers of boundaries, of any shape; results have the shape that the arguments broadcast to."""
    Counts = int | np.int64 | IntArray

INFEASIBLE_LOAD = np.int64(1 << 61)
"""The load of a stage that does not fit its devices, or whose boundaries are not nested."""


class Boundaries:
    """The boundaries that stages may lie between, which of them contain which others, and the layers in each.

    Attributes:
        node_sets: the downset of each boundary, as a bit set of nodes of the graph.
        inside: 1 if a layer lies before a boundary; [boundaries, layers].
        nested: whether the second boundary contains the first and comes later; [boundaries, boundaries].
    """

    def __init__(self, node_sets: Sequence[int], layers_of_node: Sequence[Sequence[int]], num_layers: int) -> None:
        self.node_sets = tuple(node_sets)
        inside = np.zeros((len(node_sets), num_layers), dtype=np.int64)
        for row, nodes in enumerate(node_sets):
            inside[row, [layer for node in members(nodes) for layer in layers_of_node[node]]] = 1
        self.inside: IntArray = inside
        num_inside = inside.sum(axis=1)
        self.nested: BoolArray = np.triu(np.ones((len(node_sets),) * 2, dtype=bool), 1)
        if any(smaller & ~larger for smaller, larger in pairwise(node_sets)):  # else they are a chain, all nested
            # a is a subset of b if and only if they have |a| layers in common; a product of floats uses BLAS.
            floats = inside.astype(np.float64)
            self.nested &= floats @ floats.T == num_inside[:, None]

    @property
    def num_boundaries(self) -> int:
        return len(self.node_sets)

    @property
    def num_layers(self) -> int:
        return int(self.inside.shape[1])

    def layers(self, begin: int, end: int) -> list[int]:
        """Returns the layers between two boundaries, ascending."""
        return [int(i) for i in np.nonzero(self.inside[end] - self.inside[begin])[0]]


class StageCostSums:
    """Costs of the layers between any two boundaries, at one micro-batch size, on devices of one kind and speed.

    Prefix sums over boundaries: `inside @ cost` has shape [boundaries], and a stage's cost is the difference of two
    entries. Times are rounded per stage and phase, as the simulator rounds them.

    Attributes:
        send_bytes, grad_bytes: of one micro-batch, activations and gradients that cross each boundary; [boundaries].
    """

    def __init__(self, boundaries: Boundaries, profile: ModelProfile, microbatch_size: int, speed: float) -> None:
        measured, inside = profile.at(microbatch_size), boundaries.inside
        self._speed = Fraction(str(speed))
        # each [boundaries]: the sum over the layers before the boundary
        self._forward: IntArray = inside @ np.array([m.forward_ns for m in measured])
        self._input_grad: IntArray = inside @ np.array([m.input_grad_ns for m in measured])
        self._weight_grad: IntArray = inside @ np.array([m.weight_grad_ns for m in measured])
        self._backward: IntArray = inside @ np.array([m.whole_backward_ns for m in measured])
        self._num_whole: IntArray = inside @ np.array([m.backward_ns is not UNSET for m in measured], dtype=np.int64)
        self._update: IntArray = inside @ np.array([layer.update_ns for layer in profile.layers])
        self._params: IntArray = inside @ np.array([layer.param_bytes for layer in profile.layers])
        self._optimizer: IntArray = inside @ np.array([layer.optimizer_state_bytes for layer in profile.layers])
        self._stash: IntArray = inside @ np.array([m.stash_bytes for m in measured])
        self._inside = inside
        self._workspaces: IntArray = np.array([m.workspace_bytes for m in measured])  # [layers]; a maximum, not a sum
        self.send_bytes, self.grad_bytes = _alive_bytes(inside, profile, microbatch_size)

    def _at_speed(self, time_ns: "IntArray") -> "IntArray":
        """Divides by the speed and rounds half up, in integers."""
        if self._speed == 1:
            return time_ns
        up, down = self._speed.numerator, self._speed.denominator
        return (2 * time_ns * down + up) // (2 * up)

    def microbatch_ns(self, begin: "Positions", end: "Positions") -> "IntArray":
        """Returns F + B of one micro-batch, rounded as the simulator rounds them."""
        forward, whole = (self._at_speed(sums[end] - sums[begin]) for sums in (self._forward, self._backward))
        if self._speed == 1:
            return forward + whole
        # A stage without a measured whole B runs I and W, each rounded by itself.
        input_grad, weight_grad = (
            self._at_speed(sums[end] - sums[begin]) for sums in (self._input_grad, self._weight_grad)
        )
        return forward + np.where(self._num_whole[end] > self._num_whole[begin], whole, input_grad + weight_grad)

    def per_step_ns(self, begin: "Positions", end: "Positions", devices: "Counts", ring: Bandwidth) -> "IntArray":
        """Returns the update and the ring all-reduce over `devices` devices, once per step."""
        params = self._params[end] - self._params[begin]
        update = self._at_speed(self._update[end] - self._update[begin])
        chunk_bytes: IntArray = -(-params // np.asarray(devices))
        round_ns = message_ns(chunk_bytes, ring)  # each of the 2(r - 1) rounds sends one r-th of the gradients
        all_reduce: IntArray = np.where((devices > 1) & (params > 0), 2 * (devices - 1) * round_ns, 0)
        return update + all_reduce

    def max_bytes(self, max_in_flight: int, num_microbatches: int) -> int:
        """Returns an upper bound on what any device of any plan holds."""
        held = 2 * self._params[-1] + self._optimizer[-1] + max_in_flight * self._stash[-1] + self._workspaces.max()
        return int(held + num_microbatches * (self.send_bytes.max() + self.grad_bytes.max()))

    def fits(
        self,
        begin: "Positions",
        end: "Positions",
        in_flight: "Counts",
        num_microbatches: "Counts",
        limit_bytes: int,
    ) -> "BoolArray":
        """Returns whether a device can hold the layers, their stashes in flight, and what its micro-batches receive."""
        held = 2 * (self._params[end] - self._params[begin]) + self._optimizer[end] - self._optimizer[begin]
        buffers = num_microbatches * (self.send_bytes[begin] + self.grad_bytes[end])
        stashes = in_flight * (self._stash[end] - self._stash[begin])
        room: IntArray = np.asarray(limit_bytes - (held + stashes + buffers))
        # The largest workspace of a stage is a range maximum, which differences cannot give. It is computed only for
        # the few stages whose room lies between zero and the largest workspace of all layers.
        fits: BoolArray = room >= self._workspaces.max()
        undecided = np.nonzero((room >= 0) & ~fits)
        if undecided[0].size:
            begins, ends = np.broadcast_arrays(begin, end)
            for some in np.array_split(np.arange(undecided[0].size), undecided[0].size // 4096 + 1):
                pairs = tuple(axis[some] for axis in undecided)
                stages = self._inside[ends[pairs]] - self._inside[begins[pairs]]  # [some, layers]
                fits[pairs] = room[pairs] >= (stages * self._workspaces).max(axis=1)
        return fits


def load_ceiling_ns(
    boundaries: Boundaries,
    sums_of_device: Sequence[StageCostSums],
    num_microbatches: int,
    num_devices: int,
    links: Sequence[Bandwidth],
) -> float:
    """Returns an upper bound on the load of every plan: everything on the slowest device, over the slowest link."""
    last = boundaries.num_boundaries - 1
    largest = 1
    for link in links:
        for sums in sums_of_device:
            once = num_devices * int(sums.per_step_ns(0, last, np.int64(2), link))
            cut = int(max(transfer_ns(sums.send_bytes, link).max(), transfer_ns(sums.grad_bytes, link).max()))
            each = int(sums.microbatch_ns(0, last)) + 2 * num_devices  # F and B of each stage are rounded
            largest = max(largest, num_microbatches * (each + 4 * cut) + once + 1)
    return float(2 * largest)


def transfer_ns(num_bytes: "Counts", link: Bandwidth) -> "IntArray":
    """Returns the time of one transfer for each of many sizes; no bytes take no time."""
    return np.where(num_bytes > 0, message_ns(num_bytes, link), 0)


def message_ns(num_bytes: "Counts", link: Bandwidth) -> "IntArray":
    """Returns latency plus bytes over bandwidth, rounded up; at most 2**60.

    Bytes times 10**9 overflow 64 bits from 2**33 bytes on; such sizes are computed with Python integers.
    """
    sizes = np.asarray(num_bytes)
    exact = sizes if np.abs(sizes).max(initial=0) < 2**33 else sizes.astype(object)
    times: IntArray = np.minimum(link.latency_ns - (-exact * 1_000_000_000 // link.bytes_per_s), 2**60).astype(np.int64)
    return times


def _alive_bytes(inside: "IntArray", profile: ModelProfile, microbatch_size: int) -> "tuple[IntArray, IntArray]":
    """Returns the bytes of activations and gradients that cross each boundary, [boundaries] each.

    A tensor crosses a boundary if it is made before it and some layer after it uses it.
    """
    send: IntArray = np.zeros(len(inside), dtype=np.int64)
    grad: IntArray = np.zeros(len(inside), dtype=np.int64)
    users: dict[str, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        for tensor in layer.inputs:
            users.setdefault(tensor, []).append(i)
    for i, (layer, measured) in enumerate(zip(profile.layers, profile.at(microbatch_size), strict=True)):
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
            if tensor in users:
                is_used_later = inside[:, users[tensor]].min(axis=1) == 0
                crosses = (inside[:, i] == 1) & is_used_later
                send += num_bytes * crosses
                grad += 0 if tensor in layer.no_gradient else num_bytes * crosses
    return send, grad
