"""The load of a device: its work per step once the pipeline is full.

Of M micro-batches, a device of a stage with r devices runs c = ceil(M / r), and receives and sends their activations
and gradients:

  compute    c (F + B) + update + all-reduce of the stage's gradients, 2(r-1)(latency + ceil(bytes/r) / bandwidth)
  transfers  c times each: activations in, gradients back, activations out, gradients in

Latency and bandwidth are those of `slowest_of` all links among the stage's devices, or from one stage's to the other's.
On a device that overlaps transfers with compute the load is the largest of these, else their sum. A tensor that later
stages use is relayed through the stages between. Stashes in flight are those of 1F1B over devices: ceil(w / r) if w
devices run the stage and those after it.

This file has the parts that all devices have in common: the boundaries, sums of the layers' costs between any two of
them, and transfer times. `homogeneous` and `heterogeneous` compute loads from them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.compute.arrays import Bools, Indices, Ints
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.throughput.downset_covers import packed_bits
from bapipe.simulator.interval_costs import IntervalCosts, cut_bytes, ring_ns, transfer_ns

if TYPE_CHECKING:
    Positions = int | Indices
    """Numbers of boundaries, of any shape; results have the shape that the arguments broadcast to."""
    Counts = int | np.int64 | Ints

INFEASIBLE_LOAD = np.int64(1 << 61)
"""The load of a stage that does not fit its devices, or whose boundaries are not nested."""

ROWS_PER_BLOCK = 256
"""Boundaries that are compared with all others between two looks at a deadline."""


class Boundaries:
    """The boundaries that stages may lie between, which of them contain which others, and the layers in each.

    Attributes:
        node_sets: the downset of each boundary, as a bit set of nodes of the graph.
        inside: 1 if a layer lies before a boundary; [boundaries, layers].
        nested: whether the second boundary contains the first and comes later; [boundaries, boundaries].
    """

    def __init__(
        self,
        node_sets: Sequence[int],
        layers_of_node: Sequence[Sequence[int]],
        num_layers: int,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """`deadline` ends the making of the tables with OutOfTime."""
        self.node_sets = tuple(node_sets)
        inside = np.zeros((len(node_sets), num_layers), dtype=np.int64)
        has_node = _has_node(node_sets, len(layers_of_node))
        for node, layers in enumerate(layers_of_node):
            inside[:, list(layers)] = has_node[:, [node]]
        self.inside: Ints = inside
        num_inside = inside.sum(axis=1)
        self.nested: Bools = np.triu(np.ones((len(node_sets),) * 2, dtype=bool), 1)
        if any(smaller & ~larger for smaller, larger in pairwise(node_sets)):  # else a chain: all are nested
            # a is a subset of b if and only if they have |a| layers in common; a product of floats uses BLAS.
            floats = inside.astype(np.float32)  # exact up to 2^24 layers
            for begin in range(0, len(node_sets), ROWS_PER_BLOCK):
                deadline.check()
                rows = slice(begin, begin + ROWS_PER_BLOCK)
                self.nested[rows] &= floats[rows] @ floats.T == num_inside[rows, None]

    @property
    def num_boundaries(self) -> int:
        return len(self.node_sets)

    @property
    def num_layers(self) -> int:
        return int(self.inside.shape[1])

    def layers(self, begin: int, end: int) -> list[int]:
        """Returns the layers between two boundaries, ascending."""
        return [int(i) for i in np.nonzero(self.inside[end] - self.inside[begin])[0]]


def _has_node(node_sets: Sequence[int], num_nodes: int) -> Bools:
    """Returns whether each set has each node. [sets, nodes]"""
    bits = np.unpackbits(packed_bits(node_sets, num_nodes), axis=1, bitorder="little")
    has_node: Bools = bits[:, :num_nodes].astype(bool)
    return has_node


class StageCostSums:
    """Costs of the layers between any two boundaries, at one micro-batch size, on devices of one kind and speed.

    Prefix sums over boundaries, by `IntervalCosts`: a stage's cost is the difference of two entries. Times are rounded
    per stage and phase, as the simulator rounds them.

    Attributes:
        send_bytes, grad_bytes: of one micro-batch, activations and gradients that cross each boundary; [boundaries].
    """

    def __init__(
        self,
        boundaries: Boundaries,
        profile: ModelProfile,
        microbatch_size: int,
        speed: float,
        member_links: Sequence[Bandwidth] = (),
        crossing_bytes: tuple[Ints, Ints] | None = None,
        host_sum: Sequence[Bandwidth] = (),
    ) -> None:
        """`member_links` are those among the members of a group, `crossing_bytes` those of `cut_bytes` if known.

        `host_sum` is the link of all-reduces within a host, if those take its compute.
        """
        measured, inside = profile.at(microbatch_size), boundaries.inside
        self._costs = IntervalCosts(profile, microbatch_size, speed, inside=inside)
        self._num_members, self._member_links = profile.device.num_members, tuple(member_links)
        self._host_sum = host_sum
        self._inside = inside
        without_replicas = np.array([not layer.allows_replicas for layer in profile.layers], dtype=np.int64)  # [layers]
        self._num_without_replicas = inside @ without_replicas  # [boundaries]
        self._workspaces: Ints = np.array([m.workspace_bytes for m in measured])  # [layers]; a maximum, not a sum
        self._max_workspace = int(self._workspaces.max())
        self.send_bytes, self.grad_bytes = crossing_bytes or cut_bytes(profile, microbatch_size, inside)

    def microbatch_ns(self, begin: "Positions", end: "Positions") -> Ints:
        """Returns F + B of one micro-batch, rounded as the simulator rounds them."""
        return self._costs.forward_ns(begin, end) + self._costs.backward_ns(begin, end)

    def own_microbatch_ns(self, begin: "Positions", end: "Positions") -> Ints:
        """Returns the part of that which the speed divides: without the host, and without what members exchange."""
        own = self._costs.own_work()
        return own.forward_ns(begin, end) + own.backward_ns(begin, end)

    def per_step_ns(self, begin: "Positions", end: "Positions", devices: "Counts", ring: Bandwidth) -> Ints:
        """Returns the update and the ring all-reduce over `devices` devices and their members, once per step."""
        return self.update_ns(begin, end) + self.all_reduce_ns(begin, end, devices, [ring])

    def update_ns(self, begin: "Positions", end: "Positions") -> Ints:
        """Returns the update, once per step."""
        return self._costs.update_ns(begin, end)

    def all_reduce_ns(
        self, begin: "Positions", end: "Positions", devices: "Counts", links: Sequence[Bandwidth]
    ) -> Ints:
        """Returns the ring all-reduce over `devices` devices, joined by `links`, and their members."""
        in_group = np.asarray(self._costs.group_gradient_bytes(begin, end))
        num_devices = np.asarray(devices)
        all_reduce = ring_ns(np.asarray(self._costs.gradient_bytes(begin, end)) - in_group, num_devices, links)
        if self._member_links:
            all_links = [*links, *self._member_links]
            in_each = ring_ns(in_group, num_devices * self._num_members, [*self._member_links, *self._host_sum])
            over_all = ring_ns(in_group, num_devices * self._num_members, all_links)
            all_reduce = all_reduce + np.where(num_devices > 1, over_all, in_each)
        return all_reduce

    def with_feasible_replicas(self, loads: Ints, begin: "Positions", end: "Positions", devices: "Counts") -> Ints:
        """Returns the loads of stages, `INFEASIBLE_LOAD` where several devices would run a layer without replicas."""
        if not self._num_without_replicas[-1]:
            return loads
        has_any = self.num_without_replicas(begin, end) > 0
        return np.where(has_any & (np.asarray(devices) > 1), INFEASIBLE_LOAD, loads)

    def num_without_replicas(self, begin: "Positions", end: "Positions") -> Ints:
        """Returns how many layers several devices cannot run."""
        found: Ints = self._num_without_replicas[end] - self._num_without_replicas[begin]
        return found

    @property
    def is_rounded(self) -> bool:
        """Whether times are divided by a speed, and each phase of a stage rounded."""
        return self._costs.speed != 1.0

    def max_bytes(self, max_in_flight: int, num_microbatches: int) -> int:
        """Returns an upper bound on the memory of any device of any plan."""
        costs = self._costs
        constant = costs.param_bytes(0, -1) + costs.gradient_bytes(0, -1) + costs.optimizer_bytes(0, -1)
        needed = constant + max_in_flight * costs.stash_bytes(0, -1) + self._max_workspace
        return int(needed + num_microbatches * (self.send_bytes.max() + self.grad_bytes.max()))

    def fits(
        self,
        begin: "Positions",
        end: "Positions",
        in_flight: "Counts",
        num_microbatches: "Counts",
        limit_bytes: int,
        received_bytes: tuple[Ints, Ints] | None = None,
    ) -> Bools:
        """Returns whether the layers, their stashes in flight, and the receive buffers fit in a device's memory.

        Args:
            received_bytes: activations and gradients that cross each boundary, if those of other kinds count.
        """
        send_bytes, grad_bytes = received_bytes or (self.send_bytes, self.grad_bytes)
        costs = self._costs
        constant = costs.param_bytes(begin, end) + costs.gradient_bytes(begin, end) + costs.optimizer_bytes(begin, end)
        buffers = num_microbatches * (send_bytes[begin] + grad_bytes[end])
        # Every device runs F and whole B only, without recomputation: only stashes are in flight.
        stashes = in_flight * costs.stash_bytes(begin, end)
        free_bytes: Ints = np.asarray(limit_bytes - (constant + stashes + buffers))
        # The largest workspace of a stage is a range maximum, which differences cannot give. It is computed only for
        # the few stages whose free memory lies between zero and the largest workspace of all layers.
        fits: Bools = free_bytes >= self._max_workspace
        undecided = np.nonzero((free_bytes >= 0) & ~fits)
        if undecided[0].size:
            begins, ends = np.broadcast_arrays(begin, end)
            for some in np.array_split(np.arange(undecided[0].size), undecided[0].size // 4096 + 1):
                pairs = tuple(axis[some] for axis in undecided)
                stages = self._inside[ends[pairs]] - self._inside[begins[pairs]]  # [some, layers]
                fits[pairs] = free_bytes[pairs] >= (stages * self._workspaces).max(axis=1)
        return fits


def host_sum_links(cluster: Cluster) -> tuple[Bandwidth, ...]:
    """Returns the link of all-reduces within a host, if those take its compute."""
    found = cluster.host_sum_link([0])
    return () if found is None else (found,)


def slowest_of(links: Sequence[Bandwidth]) -> Bandwidth:
    """Returns the least bandwidth and the largest latency of some links, maybe of two: no link takes longer."""
    return Bandwidth(
        bytes_per_s=min(link.bytes_per_s for link in links), latency_ns=max(link.latency_ns for link in links)
    )


def load_ceiling_ns(
    boundaries: Boundaries,
    sums_of_device: Sequence[StageCostSums],
    num_microbatches: int,
    num_devices: int,
    links: Sequence[Bandwidth],
) -> float:
    """Returns an upper bound on the load of every plan: all layers on the slowest device, over the slowest link."""
    last = boundaries.num_boundaries - 1
    largest = 1
    for link in links:
        for sums in sums_of_device:
            once = num_devices * int(sums.per_step_ns(0, last, np.int64(2), link))
            cut = int(max(transfer_ns(sums.send_bytes, link).max(), transfer_ns(sums.grad_bytes, link).max()))
            each = int(sums.microbatch_ns(0, last)) + 2 * num_devices  # F and B of each stage are rounded
            largest = max(largest, num_microbatches * (each + 4 * cut) + once + 1)
    return float(2 * largest)
