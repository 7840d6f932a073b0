"""Which layers of a stage are recomputed: those with the least forward time with which the stage fits.

This is a knapsack in which tensors between a recomputed layer and one that is not have to be kept (docs/simulator.md).
`LayerChoice` solves it exactly (`layer_knapsack.py`), for one stage or for all stages of a device together.
`RecomputationBound` is a lower bound on its time for all intervals at once. It ignores these tensors and uses the dual
of the fractional knapsack (Dantzig 1957), of which every multiplier gives a lower bound.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from bapipe.formats.cluster import Cluster
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import LOSS, ProfilesByKind, has_host_times
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.scalable_times import scalable_times, scales_exchange
from bapipe.planner.stages.intervals import INF, IntArray, IntervalIndex, Rows
from bapipe.planner.stages.layer_knapsack import EPSILON, LayerKnapsack, RecomputedLayers, StageItems

MAX_LABELS = 4_096
"""Maximum number of points of a Pareto frontier; if there are more, the best choice may be missed."""

FEW_LABELS = 32
"""Maximum number of points for a first choice, whose time is then an upper bound for the exact search."""

NUM_MULTIPLIERS = 16
"""Number of multipliers of the bound; each takes an array of all intervals."""

MAX_BRANCHED_LAYERS = 48
"""Maximum number of layers of a stage that is solved exactly although it has many tensors in use at once."""

MAX_SIDE_BY_SIDE = 2
"""A longer stage is solved exactly only if at most this many tensors are in use at once: the dynamic programme has a
state for each combination of their producers' choices."""

MAX_LABELS_TOGETHER = 128
"""Maximum number of points of a frontier if a device has several stages: many limits make frontiers large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StashLimit:
    """A state of a replica in which the stashes of its micro-batches must fit.

    Attributes:
        kind: the kind of its device.
        kept, in_backward: numbers of micro-batches, as in `InFlight`.
        room_bytes: what is left for their stashes.
    """

    kind: str
    kept: int
    in_backward: int
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimit:
    """A state of a device with several stages in which the stashes of all their micro-batches must fit.

    Attributes:
        kept, in_backward: numbers of micro-batches of each stage, as in `InFlight`. [stages]
        room_bytes: what is left for the stashes of all stages.
    """

    kept: tuple[int, ...]
    in_backward: tuple[int, ...]
    room_bytes: int

    def of(self, stage: int, kind: str) -> StashLimit:
        """Returns the limit for one of the stages if the others keep nothing."""
        return StashLimit(
            kind=kind, kept=self.kept[stage], in_backward=self.in_backward[stage], room_bytes=self.room_bytes
        )


class RecomputationBound:
    """Lower bounds on the forward time that recomputation adds, for all intervals on one kind of device."""

    def __init__(
        self,
        intervals: IntervalIndex,
        measured: Sequence[LayerMeasurement],
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """`measured` are the measurements of all layers; after `deadline`, making the tables raises OutOfTime."""
        forward = np.array([m.forward_ns for m in measured], dtype=np.float64)
        stash = np.array([m.stash_bytes for m in measured], dtype=np.float64)
        densities = np.unique(forward[stash > 0] / stash[stash > 0])
        # Large multipliers, with which the sums below would overflow 64 bits, are left out.
        densities = densities[densities * (1 + stash.sum()) < float(INF >> 1)]
        chosen = np.unique(np.linspace(0, len(densities) - 1, min(NUM_MULTIPLIERS, len(densities))).astype(int))
        self._multipliers = [float(densities[i]) for i in chosen]
        # sum over the layers of max(0, ns * stash - F), as in `least_ns`. [multipliers][intervals]
        surplus = [np.ceil(np.maximum(0, ns * stash * (1 + EPSILON) - forward)) for ns in self._multipliers]
        self._surplus: list[IntArray] = []
        for of_layers in surplus:
            deadline.check()
            self._surplus.append(intervals.sums([int(value) for value in of_layers]))

    def least_ns(self, saved_bytes: IntArray, rows: Rows) -> IntArray:
        """Returns a lower bound on F of any layers of an interval whose stashes have `saved_bytes` together. [rows]"""
        # For any multiplier ns: F >= ns * saved - sum over the layers of max(0, ns * stash - F).
        least = np.zeros(saved_bytes.shape, dtype=np.int64)
        saved = np.minimum(saved_bytes, INF >> 8).astype(np.float64)
        for ns, surplus in zip(self._multipliers, self._surplus, strict=True):
            value = np.minimum(np.floor(ns * saved * (1 - EPSILON)), float(INF >> 8)).astype(np.int64)
            least = np.maximum(least, value - surplus[rows])
        return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What the searches need to know of recomputation, at one micro-batch size.

    Attributes:
        bounds: lower bounds on the time, by kind of device.
        choice: chooses the layers.
    """

    bounds: Mapping[str, RecomputationBound]
    choice: "LayerChoice"


class LayerChoice:
    """Chooses the recomputed layers of stages, at one micro-batch size.

    Attributes:
        has_host_times: whether profiles have times of the host, which an action may take instead of the device's.
    """

    def __init__(
        self,
        profiles: ProfilesByKind,
        cluster: Cluster,
        microbatch_size: int,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """After `deadline`, stages recompute all of their layers, which may not be the best choice."""
        self.deadline = deadline
        first = next(iter(profiles.values()))
        self._names = [layer.name for layer in first.layers]
        self._inputs = [layer.inputs for layer in first.layers]
        self._outputs = [layer.outputs for layer in first.layers]
        measured = {kind: scalable_times(profile, microbatch_size, cluster) for kind, profile in profiles.items()}
        self.has_host_times = any(map(has_host_times, profiles.values()))
        self._is_in_proportion = not any(scales_exchange(profile, cluster) for profile in profiles.values())
        self._forward_ns = {kind: [m.forward_ns for m in of_kind] for kind, of_kind in measured.items()}
        self._stash = {kind: np.array([m.stash_bytes for m in of_kind]) for kind, of_kind in measured.items()}
        self._tensor_bytes = {
            kind: {
                name: num_bytes
                for layer, m in zip(profiles[kind].layers, of_kind, strict=True)
                for name, num_bytes in zip(layer.outputs, m.output_bytes, strict=True)
            }
            for kind, of_kind in measured.items()
        }
        self._found: dict[tuple[int, int, str, tuple[StashLimit, ...]], RecomputedLayers] = {}
        self._found_together: dict[Hashable, RecomputedLayers] = {}

    def best(
        self, begin: int, end: int, limits: Sequence[StashLimit], first_kind: str, *, whole_fits: bool
    ) -> RecomputedLayers:
        """Returns which of the layers [begin, end) to recompute: the choice with the least sum of F.

        If the replicas are of several kinds, F is summed over the kinds.

        Args:
            limits: the states of all replicas.
            first_kind: the kind of the first replica's device, whose profile gives the sizes of tensors.
            whole_fits: whether the stage fits if all of it is recomputed from its input.
        """
        key = begin, end, first_kind, tuple(sorted(set(limits), key=repr))
        if key not in self._found:
            self._found[key] = self._best(begin, end, key[3], first_kind, whole_fits)
        return self._found[key]

    def _best(
        self, begin: int, end: int, limits: Sequence[StashLimit], first_kind: str, whole_fits: bool
    ) -> RecomputedLayers:
        """See `best`; `limits` are the different ones."""
        kinds = sorted({limit.kind for limit in limits})
        stage = self._items(begin, end, first_kind, kinds, limits)
        whole = RecomputedLayers(layers=frozenset(range(begin, end)), total_ns=sum(stage.forward_ns), is_best=False)
        if whole_fits and self._is_too_wide(begin, end, first_kind):
            return whole
        knapsack = LayerKnapsack([stage], np.array([limit.room_bytes for limit in limits]), self.deadline)
        best = self._solve(knapsack, whole.total_ns if whole_fits else INF, MAX_LABELS)
        if not whole_fits and not best.fits:
            return best
        # The choice with the least F on the device need not be the fastest if the host is slower, or at another
        # speed if members exchange data, which the speed does not divide.
        is_best = best.is_best and len(kinds) == 1 and self._is_in_proportion and not self.has_host_times
        return replace(best if best.fits else whole, is_best=is_best)

    def best_together(
        self,
        stages: Sequence[tuple[int, int]],
        limits: Sequence[DeviceLimit],
        kind: str,
        *,
        input_bytes: Sequence[int],
        weights: Sequence[int],
    ) -> RecomputedLayers:
        """Returns which layers of the stages of a device to recompute: the choice with the least weighted sum of F.

        Args:
            stages: (begin, end) of the layers of each stage.
            limits: the states of the device.
            kind: the kind of the device.
            input_bytes: what a micro-batch of each stage keeps if all of it is recomputed. [stages]
            weights: the factor by which F of each stage is multiplied. [stages]
        """
        key = tuple(stages), tuple(sorted(set(limits), key=repr)), kind, tuple(input_bytes), tuple(weights)
        if key not in self._found_together:
            wide = [self._is_too_wide(begin, end, kind) for begin, end in stages]
            items = []
            for s, (begin, end) in enumerate(stages):
                of_stage = self._items(begin, end, kind, [kind], [limit.of(s, kind) for limit in key[1]])
                items.append(
                    replace(
                        of_stage,
                        forward_ns=[weights[s] * ns for ns in of_stage.forward_ns],
                        # A stage with too many tensors in use at once recomputes all or nothing.
                        may_recompute=(False,) * (end - begin) if wide[s] else of_stage.may_recompute,
                        input_bytes=input_bytes[s],
                    )
                )
            knapsack = LayerKnapsack(items, np.array([limit.room_bytes for limit in key[1]]), self.deadline)
            found = self._solve(knapsack, INF, MAX_LABELS_TOGETHER)
            self._found_together[key] = replace(found, is_best=found.is_best and not any(wide))
        return self._found_together[key]

    def _items(
        self, begin: int, end: int, first_kind: str, kinds: Sequence[str], limits: Sequence[StashLimit]
    ) -> StageItems:
        """Returns the layers of a stage on replicas of some kinds; running one again costs the sum over the kinds."""
        return StageItems(
            begin=begin,
            forward_ns=[sum(self._forward_ns[kind][i] for kind in kinds) for i in range(begin, end)],
            stash_bytes=np.stack([self._stash[limit.kind][begin:end] for limit in limits], axis=1),
            may_recompute=[name != LOSS for name in self._names[begin:end]],
            tensors=self._tensors(begin, end, first_kind),
            kept=np.array([limit.kept for limit in limits]),
            in_backward=np.array([limit.in_backward for limit in limits]),
        )

    def _solve(self, knapsack: LayerKnapsack, upper_bound_ns: int, max_labels: int) -> RecomputedLayers:
        """Returns a choice below an upper bound: first one from few labels, whose time bounds the search with more."""
        first = knapsack.solve(upper_bound_ns, FEW_LABELS)
        if first.is_best or self.deadline.is_over:
            return first
        found = knapsack.solve(min(first.total_ns, upper_bound_ns), max_labels)
        better = min((found, first), key=lambda solution: solution.total_ns)
        return replace(better, is_best=found.is_best)

    def _is_too_wide(self, begin: int, end: int, kind: str) -> bool:
        """Returns whether a stage is long and has too many tensors in use at once to be solved exactly."""
        if end - begin <= MAX_BRANCHED_LAYERS:
            return False
        change = [0] * (end - begin + 1)
        for producer, _, users in self._tensors(begin, end, kind):
            change[max(producer, 0)] += 1
            change[users[-1]] -= 1
        return max(accumulate(change)) > MAX_SIDE_BY_SIDE

    def _tensors(self, begin: int, end: int, kind: str) -> list[tuple[int, int, tuple[int, ...]]]:
        """Returns `StageItems.tensors` for layers [begin, end): (producer or -1, bytes, users)."""
        producer = {name: i - begin for i in range(begin, end) for name in self._outputs[i]}
        users: dict[str, list[int]] = {}
        for i in range(begin, end):
            for name in dict.fromkeys(self._inputs[i]):
                users.setdefault(name, []).append(i - begin)
        sizes = self._tensor_bytes[kind]
        return [(producer.get(name, -1), sizes[name], tuple(of)) for name, of in users.items() if sizes.get(name)]
