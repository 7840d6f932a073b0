"""Decides whether any plan on the first devices of a cluster, in its order, can be within a step time.

For a limit T, let furthest(p, c) be the last boundary such that the first p devices can run all layers before it, in
stages that are within T, with c cuts between them. A stage that begins later, and so has fewer layers, is within T
whenever a longer one is, so nothing else about the layers before matters: a dynamic programme over p, c and the number
of devices of the next stage, without tables of intervals or placements. A stage [i, j) of R devices is within T only if
it keeps the limits of the table in docs/many_devices.md: for the work of its busiest replica, for the way back of its
last micro-batch, for consecutive round trips and the work between them, for the all-reduces of its gradients, and for
memory; and the two limits for early and later stages that wait for each other (`early_waits.py`).
"""

from copy import copy
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.furthest_prefixes import FurthestPrefixes
from bapipe.planner.device_line.in_flight import (
    FORWARDS_FIRST,
    IN_FLIGHT,
    IN_PAIRS,
    WEIGHTS_BEHIND_FORWARDS,
)
from bapipe.planner.device_line.layer_sums import LayerSums
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.replica_classes import MAX_ALIKE, ReplicaClasses, replica_classes
from bapipe.planner.device_line.replica_weights import replica_weights
from bapipe.planner.device_line.rings import Rings
from bapipe.planner.device_line.savings import no_savings, savings_of
from bapipe.planner.device_line.stage_arrays import BOUNDED_STAGE, LAYER_SUMS, Boundaries, BoundInputs, Savings
from bapipe.planner.device_line.stage_kinds import StageKinds
from bapipe.planner.stages.intervals import IntArray
from bapipe.schedules import splits_backwards

LAST_STAGE_GROWTH = 4
"""GPipe: the replicas of the last stage are divided into ranges at powers of this."""

ROUNDING_NS = 2.0
"""By how much the simulator's time of an action may be shorter than the sum over its layers, two halves each way."""

MANY_DEVICES, FEW_MICROBATCHES = 128, 2
"""With more than `MANY_DEVICES` devices, GPipe's gradients are distinguished only if there are at least
`FEW_MICROBATCHES` micro-batches per device. So are turns of 1F1B, which need it only with that many devices, where
classes of numbers of devices blur them."""


class PrefixBound(LayerSums):
    """The problem of one order of the devices, schedule and micro-batch size.

    Attributes:
        num_cuts: the minimum and the maximum number of cuts between the stages of its plans.
        bound_ns: a lower bound on the step time of every plan.
        tells_gradients: whether `trip_bound.py` distinguishes when each gradient is back (GPipe).
        tells_turns: whether it distinguishes more finely how many micro-batches follow turns of early stages (1F1B).
        rounded_ns: what the rounding of times on devices of other speeds can add up to, over all stages.
    """

    def __init__(
        self,
        line: DeviceLine,
        schedule: str,
        size: int,
        num_devices: int,
        last_replicas: tuple[int, int] | None = None,
        only_replicas: int | None = None,
    ) -> None:
        """`last_replicas` restricts the last stage's devices to a range; `only_replicas` fixes those of all stages."""
        super().__init__(line, schedule, size, num_devices)
        most, wanted = min(num_devices, len(line.cuts) - 1) - 1, line.options.num_stages
        self.num_cuts = (0, most) if wanted is None else (min(wanted - 1, most),) * 2
        self.last_replicas, self._only_replicas = last_replicas or (1, num_devices), only_replicas
        self.bound_ns = 0
        self.has_cycles = schedule == "1f1b" and self.num_microbatches > num_devices + 1
        self._rounded_stages = num_devices if self.is_rounded else 0
        self.rounded_ns = self._rounded_stages * (1 + 1 / float(self.speeds.min()))
        self.are_forwards_first = schedule in FORWARDS_FIRST
        self.tells_gradients = self.are_forwards_first and self._may_tell_gradients(num_devices)
        self.tells_turns = self.has_cycles and num_devices > MANY_DEVICES and self._may_tell_gradients(num_devices)
        self._depths = None  # the micro-batches in flight from each position on, on one device. [devices]
        if schedule in IN_FLIGHT:
            self._depths = np.array([IN_FLIGHT[schedule](num_devices - p) for p in range(num_devices)])
        if only_replicas is not None:
            self.classes = ReplicaClasses(fewest=np.array([only_replicas]), most=np.array([only_replicas]))
        else:
            every = min(num_devices, self.num_microbatches) if line.options.replicas else 1
            is_fine = self.tells_gradients or self.tells_turns
            self.classes = replica_classes(
                every, self.num_microbatches, schedule, alike=self.has_one_speed, fine=is_fine
            )
        self.weights = replica_weights(self.speeds, schedule, self.num_microbatches, self.classes)
        self.kinds_of_stages = StageKinds(self, self.classes.most)
        self.rings = Rings(self, self.classes.fewest, may_be_idle=self.has_one_speed)
        self.limit_bytes = self._list_memory()

    def _may_tell_gradients(self, num_devices: int) -> bool:
        """Whether bounds by trips may distinguish gradients of GPipe or turns of 1F1B, which is slow for many devices.

        It gains the most if each device has many micro-batches, and transfers are short compared to layers.
        """
        if num_devices <= MANY_DEVICES:
            return True
        over_cut_ns = float(np.mean(self.send_ns + self.back_ns)) if self.send_ns.size else 0.0
        layer_ns = float(self.least.trip[-1]) / self.max_speed / (len(self.line.cuts) - 1)
        return self.num_microbatches >= FEW_MICROBATCHES * num_devices and over_cut_ns <= layer_ns

    def with_num_cuts(self, fewest: int, most: int) -> "PrefixBound":
        """Returns the problem of the plans with `fewest` to `most` cuts between their stages."""
        other = copy(self)
        other.num_cuts = fewest, most
        return other

    def parts_by_last_stage(self) -> list["PrefixBound"]:
        """Returns, for GPipe, problems for ranges of the last stage's replicas, on which its bound depends."""
        most = int(self.classes.most[-1])
        if not self.are_forwards_first or self.last_replicas != (1, most) or most < LAST_STAGE_GROWTH:
            return []
        powers = [LAST_STAGE_GROWTH**i for i in range(most.bit_length()) if LAST_STAGE_GROWTH**i <= most]
        parts = [copy(self) for _ in powers]
        for part, fewest in zip(parts, powers, strict=True):
            part.last_replicas = fewest, min(LAST_STAGE_GROWTH * fewest - 1, most)
        return parts

    @property
    def has_many_alike(self) -> bool:
        """Whether its devices are equal, and too many for `trip_bound.py` alone."""
        return self.has_one_speed and self.num_devices > MAX_ALIKE

    @property
    def has_rings(self) -> bool:
        """Whether `ring_bound.py` gives stronger bounds: 1F1B or GPipe, with replicas."""
        return self.schedule in ("1f1b", "gpipe") and self.line.options.replicas

    def _list_memory(self) -> Floats:
        """Returns the bytes that the devices of a stage may hold besides buffers. [positions, classes]"""
        limits = np.array(self.line.limits[: self.num_devices], dtype=float)
        limit_bytes = np.full((self.num_devices, self.classes.fewest.size), limits.max())
        if not self.has_one_speed:
            for g, number in enumerate(self.classes.fewest.tolist()):
                if number <= limits.size:
                    windows = np.lib.stride_tricks.sliding_window_view(limits, number).min(axis=1)
                    limit_bytes[: windows.size, g] = windows
        # A stage after the first one has a buffer for what each of its micro-batches receives.
        most, have_same = self.classes.most, len(set(limits.tolist())) == 1
        num_received = -(-self.num_microbatches // most) if have_same else self.num_microbatches // most
        limit_bytes[1:] -= num_received * self.least_received
        return limit_bytes

    @property
    def kind(self) -> PlanKind:
        """The limits of all its plans."""
        return PlanKind(*self.num_cuts, *self.last_replicas, int(self.classes.fewest[0]), int(self.classes.most[-1]))

    def path(self, limit_ns: int, deadline: Deadline) -> LinePlan | None:
        """Returns the stages that the relaxation chooses within a step time; None if no plan can be within it."""
        prefixes = FurthestPrefixes(self.programme, self.kind, limit_ns)
        position = prefixes.find(deadline)
        return None if position is None else self._trace(prefixes.furthest[0], prefixes.origin, position)

    @cached_property
    def programme(self) -> BoundInputs:
        """The problem as the compiled programme takes it."""
        kinds = self.kinds_of_stages
        layers = np.zeros((len(kinds.sums), len(self.line.cuts)), dtype=LAYER_SUMS)
        for of_kinds, sums in zip(layers, kinds.sums, strict=True):
            for name in LAYER_SUMS.names or ():
                of_kinds[name] = getattr(sums if hasattr(sums, name) else self, name)
        return BoundInputs(
            layers=layers,
            columns=np.stack([layers[name] for name in LAYER_SUMS.names or ()], axis=1),
            stages=self._stages(),
            savings=self._savings(),
            one_way=np.asarray(self._one_way, dtype=float),
            both_ways=np.asarray(self._both_ways, dtype=float),
            boundaries_before=self.boundaries_before,
            extra_one_way=float(self._extra_one_way),
            extra_both=float(self._extra_both),
            num_microbatches=self.num_microbatches,
            max_speed=self.max_speed,
            max_bucket=float(self.max_bucket),
            max_gradients=float(np.diff(self.gradients).max()),
            is_alike=self.has_one_speed,
            are_forwards_first=self.are_forwards_first,
            has_whole_backward=not splits_backwards(self.schedule),
            has_cycles=self.has_cycles,
            rounding_ns=ROUNDING_NS * (1 + 1 / float(self.speeds.min())),
            is_rounded=self.is_rounded,
        )

    def _savings(self) -> Savings:
        if not (self.are_forwards_first and self.line.options.recompute):
            return no_savings(len(self.line.cuts))
        profiles = [self.line.profiles[kind] for kind in self._kinds]
        return savings_of(profiles, self.size, self.line.cuts, self._times[:, :, 0].min(axis=0), self.returned)

    def _stages(self) -> NDArray[np.void]:
        """Returns what is known of stages by their first device and class: `BOUNDED_STAGE`. [positions, classes]"""
        weights, rings, kinds = self.weights, self.rings, self.kinds_of_stages
        n = weights.counts
        in_flight, last_in_flight, num_rounds = np.zeros_like(n), np.zeros_like(n[0]), np.zeros_like(n)
        if self._depths is not None:
            in_flight = -(-self._depths[:, None] // self.classes.fewest)
            of_last = np.array([IN_FLIGHT[self.schedule](most) for most in self.classes.most.tolist()])
            last_in_flight = -(-of_last // self.classes.fewest)
            num_rounds = np.stack([self._num_rounds(int(depth)) for depth in self._depths])
        num_counted = self._num_counted()
        columns = {
            "own": kinds.own,
            "before": kinds.before,
            "behind": kinds.behind[:, None],
            "few": self.classes.fewest,
            "most": self.classes.most,
            "in_flight": in_flight,
            "last_in_flight": last_in_flight,
            "num_rounds": np.minimum(num_rounds, num_counted),
            "count": n,
            "fastest": 1 / weights.fastest,
            "until": 1 / weights.until,
            "forward": 1 / weights.forward_speed,
            "backward": 1 / weights.speed,
            "before_ns": weights.before,
            "behind_ns": weights.behind,
            "from_here": weights.from_here[:, None],
            "busiest": weights.busiest,
            "slack": self._slack(in_flight),
            "last_ring": rings.last_ns,
            "ring_latency": rings.latency,
            "ring_rate": rings.rate,
            "limit_bytes": self.limit_bytes,
            "num_stashes": self._num_stashes(),
            "may_recompute": self.line.options.recompute,
            "is_behind": np.arange(self.num_devices)[:, None] > 0,
        }
        stages = np.zeros(n.shape, dtype=BOUNDED_STAGE)
        for name, values in columns.items():
            stages[name] = values
        share = 0.5 if self.schedule in IN_PAIRS else 1.0  # of F + r: from one F or r to the next
        for way, trips in enumerate((2 * np.ones_like(n), 1 + (n - 1) // np.maximum(in_flight, 1))):
            steps = np.minimum(n - 1 - (trips - 1) * in_flight, num_counted - trips)
            has_rounds = (in_flight > 0) & (trips >= 2) & (steps >= 0)
            stages["trips"][:, :, way] = np.where(has_rounds, trips, 0)
            stages["steps"][:, :, way] = np.where(has_rounds, share * steps, 0.0)
        return stages

    def _num_counted(self) -> IntArray:
        """Returns how many r of a replica a chain of round trips may count at most. [positions, classes]

        The first stage has W for r: if all of these come after the last F, only those after the last trip count.
        """
        num_counted = np.full_like(self.weights.counts, self.num_microbatches)
        if self.schedule in WEIGHTS_BEHIND_FORWARDS and self._depths is not None:
            num_left = (self.num_microbatches - self._depths[0]) // self.classes.most + 1
            num_counted[0] = np.maximum(num_left, 1)
        return num_counted

    def _num_stashes(self) -> IntArray | int:
        """Returns a lower bound on the micro-batches whose stashes some device of a stage holds at once. [classes]

        If all F come first, those of a replica: one with the maximum number, or any one if devices differ.
        """
        if not self.are_forwards_first:
            return 1
        most = self.classes.most
        return -(-self.num_microbatches // most) if self.has_one_speed else self.num_microbatches // most

    def _slack(self, in_flight: IntArray) -> Floats:
        """Returns by how much a chain of actions may be shorter than its layers' sums, in ns. [positions, classes]"""
        n, v = self.weights.counts, self.weights.speed
        trips = 1 + (n - 1) // np.maximum(in_flight, 1) * (in_flight > 0)
        slack: Floats = (ROUNDING_NS * n + self._rounded_stages * trips) * (1 + 1 / v)
        return slack

    def _num_rounds(self, depth: int) -> IntArray:
        """Returns a lower bound on the number of consecutive round trips to the last stage. [classes]

        A stage has a multiple of its devices in flight: the maximum over the class counts.
        """
        if self._only_replicas is not None:
            most = self.classes.fewest * -(-depth // self.classes.fewest)
        else:
            sizes = np.arange(1, int(self.classes.most[-1]) + 1)
            most = np.maximum.reduceat(sizes * -(-depth // sizes), self.classes.fewest - 1)
        rounds: IntArray = (self.num_microbatches - 1) // most + 1
        return rounds

    def _trace(self, furthest: Boundaries, before: Boundaries, position: int) -> LinePlan:
        """Returns the stages of a path; devices that it leaves idle, or without layers, join the stage before them."""
        boundaries, begins = [len(self.line.cuts) - 1], []
        num_cuts = int(np.flatnonzero(furthest[position] == boundaries[0])[0])
        at = position
        for c in range(num_cuts, 0, -1):
            at = int(before[at, c])
            boundary = int(furthest[at, c - 1])
            if boundary < boundaries[-1]:
                begins.append(at)
                boundaries.append(boundary)
        boundaries.reverse()
        firsts = [0, *begins[::-1][1:], position]
        counts = tuple(min(b - a, int(self.classes.most[-1])) for a, b in pairwise(firsts))
        return LinePlan(
            cuts=tuple(self.line.cuts[boundary] for boundary in boundaries),
            counts=counts,
            schedule=self.schedule,
            microbatch_size=self.size,
        )
