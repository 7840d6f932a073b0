"""Which layers of a stage are recomputed: those of the least forward time with which the stage fits.

A knapsack in which, where recomputed layers meet others, the tensors between the two are kept (docs/simulator.md).
`LayerChoice.best` solves it exactly by a dynamic programme over the layers, with Pareto frontiers of time against saved
bytes (Nemhauser and Ullmann 1969); the state tells of each tensor that later layers use whether its producer is
recomputed, which on a chain is one bit. `RecomputationBound` bounds it for all intervals at once: without the tensors
between, the dual of the fractional knapsack (Dantzig 1957), of which any multiplier gives a lower bound.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from bapipe.formats.profile import LOSS, ModelProfile, has_host_times
from bapipe.planner.branch_and_bound.intervals import INF, IntArray, IntervalIndex
from bapipe.planner.deadline import UNLIMITED, Deadline

MAX_LABELS = 4_096
"""Points of a Pareto frontier that are kept; only beyond that a choice may miss the best one."""

FEW_LABELS = 32
"""Points that are kept for a first choice, whose time then bounds the exact one."""

NUM_MULTIPLIERS = 16
"""Multipliers of the bound: each costs an array of all intervals."""

MAX_BRANCHED_LAYERS = 48
"""Layers of a stage with many tensors in use side by side up to which its choices are gone through."""

MAX_SIDE_BY_SIDE = 2
"""Tensors in use side by side, whose producers' choices are the states of the dynamic programme."""

EPSILON = 1e-12
"""Margin for the rounding of floating point, relative to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A state of a replica, in which what its micro-batches hold must fit.

    Attributes:
        kind: of device.
        kept, in_backward: numbers of micro-batches, as `InFlight` counts them.
        room_bytes: what is left for their stashes.
    """

    kind: str
    kept: int
    in_backward: int
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayers:
    """The numbers of the layers that a stage recomputes, and whether no other choice takes less time."""

    layers: frozenset[int]
    is_best: bool = True


class RecomputationBound:
    """Lower bounds of the forward time that recomputation repeats, for all intervals on one kind of device."""

    def __init__(
        self,
        intervals: IntervalIndex,
        profile: ModelProfile,
        microbatch_size: int,
        deadline: Deadline = UNLIMITED,
    ) -> None:
        """`deadline` ends the making of the tables with OutOfTime."""
        measured = profile.at(microbatch_size)
        forward = np.array([m.forward_ns for m in measured], dtype=np.float64)
        stash = np.array([m.stash_bytes for m in measured], dtype=np.float64)
        densities = np.unique(forward[stash > 0] / stash[stash > 0])
        chosen = np.unique(np.linspace(0, len(densities) - 1, min(NUM_MULTIPLIERS, len(densities))).astype(int))
        self._multipliers = [float(densities[i]) for i in chosen]
        # What layers that save more than the multiplier asks for give away at it. [multipliers][intervals]
        surplus = [np.ceil(np.maximum(0, ns * stash * (1 + EPSILON) - forward)) for ns in self._multipliers]
        self._surplus: list[IntArray] = []
        for of_layers in surplus:
            deadline.check()
            self._surplus.append(intervals.sums([int(value) for value in of_layers]))

    def least_ns(self, saved_bytes: IntArray, rows: slice) -> IntArray:
        """Returns a lower bound of F of any layers of each interval whose stashes have so many bytes. [rows]"""
        # For any multiplier: F >= ns * saved - sum over the layers of max(0, ns * stash - F).
        least = np.zeros(saved_bytes.shape, dtype=np.int64)
        saved = np.minimum(saved_bytes, INF >> 8).astype(np.float64)
        for ns, surplus in zip(self._multipliers, self._surplus, strict=True):
            value = np.minimum(np.floor(ns * saved * (1 - EPSILON)), float(INF >> 8)).astype(np.int64)
            least = np.maximum(least, value - surplus[rows])
        return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Bounds by kind of device, and the choice, at one micro-batch size."""

    bounds: Mapping[str, RecomputationBound]
    choice: "LayerChoice"


class LayerChoice:
    """Chooses the recomputed layers of stages, at one micro-batch size."""

    def __init__(
        self, profiles: Mapping[str, ModelProfile], microbatch_size: int, deadline: Deadline = UNLIMITED
    ) -> None:
        """After `deadline` stages recompute all of their layers, which may not be the best choice."""
        self.deadline = deadline
        first = next(iter(profiles.values()))
        self._names = [layer.name for layer in first.layers]
        self._inputs = [layer.inputs for layer in first.layers]
        self._outputs = [layer.outputs for layer in first.layers]
        measured = {kind: profile.at(microbatch_size) for kind, profile in profiles.items()}
        self._has_host_times = any(map(has_host_times, profiles.values()))
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
        self._found: dict[tuple[int, int, str, tuple[MemoryLimit, ...]], RecomputedLayers | None] = {}

    def best(
        self, begin: int, end: int, limits: Sequence[MemoryLimit], first_kind: str, *, whole_fits: bool
    ) -> RecomputedLayers | None:
        """Returns which of the layers [begin, end) to recompute, None if the stage does not fit with any.

        It has the least sum of F; with replicas of several kinds, summed over the kinds.

        Args:
            first_kind: of the first replica, whose profile gives the sizes of tensors.
            whole_fits: whether the stage fits if all of it is recomputed, from its input.
        """
        key = begin, end, first_kind, tuple(sorted(set(limits), key=repr))
        if key not in self._found and whole_fits and self._is_too_wide(begin, end, first_kind):
            self._found[key] = RecomputedLayers(layers=frozenset(range(begin, end)), is_best=False)
        if key not in self._found:
            kinds = sorted({limit.kind for limit in limits})
            forward_ns = [sum(self._forward_ns[kind][i] for kind in kinds) for i in range(begin, end)]
            knapsack = _Knapsack(self, begin, end, key[3], first_kind, forward_ns)
            upper_bound_ns = sum(forward_ns) if whole_fits else INF
            first = knapsack.solve(upper_bound_ns, FEW_LABELS)
            is_last = first.is_best or self.deadline.is_over
            found = first if is_last else knapsack.solve(min(first.total_ns, upper_bound_ns), MAX_LABELS)
            better = min((found, first), key=lambda solution: solution.total_ns)
            # The least F on the device need not be the least if the host is slower.
            is_best = found.is_best and len(kinds) == 1 and not self._has_host_times
            if better.total_ns < upper_bound_ns:
                self._found[key] = RecomputedLayers(layers=better.layers, is_best=is_best)
            elif whole_fits:
                self._found[key] = RecomputedLayers(layers=frozenset(range(begin, end)), is_best=is_best)
            else:
                self._found[key] = None if found.is_best else RecomputedLayers(layers=frozenset(), is_best=False)
        return self._found[key]

    def _is_too_wide(self, begin: int, end: int, kind: str) -> bool:
        """Returns whether a long stage has so many tensors in use at once that its choices are not gone through."""
        if end - begin <= MAX_BRANCHED_LAYERS:
            return False
        change = [0] * (end - begin + 1)
        for producer, _, users in self.tensors(begin, end, kind):
            change[max(producer, 0)] += 1
            change[users[-1]] -= 1
        return max(accumulate(change)) > MAX_SIDE_BY_SIDE

    def stash_bytes(self, kind: str, begin: int, end: int) -> IntArray:
        """Returns the stash of each of the layers. [end - begin]"""
        return self._stash[kind][begin:end]

    def can_recompute(self, layer: int) -> bool:
        """Returns whether a layer can be recomputed without its whole stage."""
        return self._names[layer] != LOSS

    def tensors(self, begin: int, end: int, kind: str) -> list[tuple[int, int, tuple[int, ...]]]:
        """Returns (producer or -1, bytes, users) of the tensors that layers [begin, end) use; numbers from 0."""
        producer = {name: i - begin for i in range(begin, end) for name in self._outputs[i]}
        users: dict[str, list[int]] = {}
        for i in range(begin, end):
            for name in dict.fromkeys(self._inputs[i]):
                users.setdefault(name, []).append(i - begin)
        sizes = self._tensor_bytes[kind]
        return [(producer.get(name, -1), sizes[name], tuple(of)) for name, of in users.items() if sizes.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    layers: frozenset[int]
    total_ns: int
    is_best: bool


@dataclass(frozen=True, slots=True)
class _Labels:
    """Choices for the first layers in one state: F, bytes saved under each limit, and numbers in the history."""

    total_ns: IntArray  # [labels]
    saved: IntArray  # [labels, limits]
    numbers: IntArray  # [labels]


_State = tuple[bool, frozenset[tuple[int, bool]]]
"""Whether all layers so far are recomputed; and tensors that may have to be kept, with their producer's choice."""


class _Knapsack:
    """The choice for one stage: minimize F subject to saved bytes >= needed bytes under each limit."""

    def __init__(
        self,
        choice: LayerChoice,
        begin: int,
        end: int,
        limits: Sequence[MemoryLimit],
        first_kind: str,
        forward_ns: Sequence[int],
    ) -> None:
        self._begin, self._forward_ns = begin, forward_ns
        self._may = [choice.can_recompute(i) for i in range(begin, end)]
        stash = [choice.stash_bytes(limit.kind, begin, end) for limit in limits]
        self._kept = np.array([limit.kept for limit in limits], dtype=np.int64)  # [limits]
        per_byte = self._kept - np.array([limit.in_backward for limit in limits])
        self._saves = np.stack([n * of for n, of in zip(per_byte, stash, strict=True)], axis=1)  # [layers, limits]
        room = np.array([limit.room_bytes for limit in limits])
        self._needed = self._kept * np.array([int(of.sum()) for of in stash]) - room  # [limits]
        self._tensors = choice.tensors(begin, end, first_kind)
        self._deadline = choice.deadline
        self._suffix = [self._fractional(i) for i in range(len(forward_ns) + 1)]

    def solve(self, upper_bound_ns: int, max_labels: int) -> _Solution:
        """Returns a choice faster than a bound, of time `INF` if none was found; `is_best` if there is none faster.

        None is found if the deadline passes before.
        """
        self._history: list[tuple[IntArray, int]] = []  # parents of labels, and the layer they recompute or -1
        self._num_labels, is_best = 1, True
        start = frozenset((t, False) for t, (producer, _, _) in enumerate(self._tensors) if producer < 0)
        zeros = np.zeros((1, len(self._kept)), dtype=np.int64)
        states = {(True, start): _Labels(np.zeros(1, dtype=np.int64), zeros, np.zeros(1, dtype=np.int64))}
        for layer in range(len(self._forward_ns)):
            if self._deadline.is_over:
                return _Solution(layers=frozenset(), total_ns=INF, is_best=False)
            groups: dict[_State, list[_Labels]] = {}
            for state, labels in states.items():
                for again in (False, True) if self._may[layer] else (False,):
                    following, tensor_bytes = self._following(state, layer, again)
                    groups.setdefault(following, []).append(self._extended(labels, layer, again, tensor_bytes))
            states = {}
            for state, group in groups.items():
                labels, bounds_ns = self._promising(_joined(group), layer + 1, upper_bound_ns)
                labels, all_kept = _pareto(labels, bounds_ns, max_labels)
                is_best &= all_kept
                if len(labels.numbers):
                    states[state] = labels
        ends = [labels for (all_again, _), labels in states.items() if not all_again]
        ends = [labels for labels in ends if len(labels.numbers)]
        if not ends:
            return _Solution(layers=frozenset(), total_ns=INF, is_best=is_best)
        final = _joined(ends)
        best = int(final.total_ns.argmin())
        return _Solution(
            layers=self._layers(int(final.numbers[best])), total_ns=int(final.total_ns[best]), is_best=is_best
        )

    def _following(self, state: _State, layer: int, again: bool) -> tuple[_State, int]:
        """Returns the state after a choice, and the bytes of tensors that it requires to be kept."""
        all_again, tensors = state
        num_bytes, open_tensors = 0, set()
        for t, by_recomputed in tensors:
            _, size, users = self._tensors[t]
            if layer in users and by_recomputed != again:
                num_bytes += size
            elif users[-1] > layer:
                open_tensors.add((t, by_recomputed))
        open_tensors |= {(t, again) for t, (producer, _, _) in enumerate(self._tensors) if producer == layer}
        return (all_again and again, frozenset(open_tensors)), num_bytes

    def _extended(self, labels: _Labels, layer: int, again: bool, tensor_bytes: int) -> _Labels:
        saved = labels.saved - self._kept * tensor_bytes
        numbers = np.arange(self._num_labels, self._num_labels + len(labels.numbers))
        self._num_labels += len(numbers)
        self._history.append((labels.numbers, layer if again else -1))
        if not again:
            return _Labels(labels.total_ns, saved, numbers)
        return _Labels(labels.total_ns + self._forward_ns[layer], saved + self._saves[layer], numbers)

    def _promising(self, labels: _Labels, layer: int, upper_bound_ns: int) -> tuple[_Labels, IntArray]:
        """Returns the labels that can still fit and be faster than a bound, and their lower bounds."""
        lacking = self._needed - labels.saved  # [labels, limits]
        bounds = labels.total_ns.astype(np.float64)
        can_fit = np.ones(len(bounds), dtype=bool)
        for i, (saved, total_ns) in enumerate(self._suffix[layer]):
            can_fit &= lacking[:, i] <= saved[-1]
            more = np.interp(lacking[:, i], saved, total_ns)
            bounds = np.maximum(bounds, labels.total_ns + more * (1 - EPSILON))
        keep = np.flatnonzero(can_fit & (np.ceil(bounds - EPSILON * bounds) < upper_bound_ns))
        return _Labels(labels.total_ns[keep], labels.saved[keep], labels.numbers[keep]), bounds[keep]

    def _fractional(self, layer: int) -> list[tuple[IntArray, IntArray]]:
        """Returns for each limit the fractional knapsack of the layers from one on: bytes saved by increasing time."""
        found = []
        forward = np.array(self._forward_ns[layer:], dtype=np.float64)
        may = np.array(self._may[layer:], dtype=bool)
        for i in range(len(self._kept)):
            saves = self._saves[layer:, i]
            useful = np.flatnonzero(may & (saves > 0))
            useful = useful[np.argsort(forward[useful] / saves[useful], kind="stable")]
            found.append(
                (np.concatenate([[0], np.cumsum(saves[useful])]), np.concatenate([[0], np.cumsum(forward[useful])]))
            )
        return found

    def _layers(self, number: int) -> frozenset[int]:
        """Returns the layers that a label recomputes, by following its history."""
        firsts = np.cumsum([1, *(len(parents) for parents, _ in self._history)])
        layers = set()
        while number:
            step = int(np.searchsorted(firsts, number, side="right")) - 1
            parents, layer = self._history[step]
            if layer >= 0:
                layers.add(self._begin + layer)
            number = int(parents[number - firsts[step]])
        return frozenset(layers)


def _joined(groups: Iterable[_Labels]) -> _Labels:
    groups = list(groups)
    return _Labels(
        np.concatenate([labels.total_ns for labels in groups]),
        np.concatenate([labels.saved for labels in groups]),
        np.concatenate([labels.numbers for labels in groups]),
    )


def _pareto(labels: _Labels, bounds_ns: IntArray, max_labels: int) -> tuple[_Labels, bool]:
    """Returns the labels of which no other takes no more time and saves no less; and whether these are all kept."""
    order = np.lexsort((*(-labels.saved.T), labels.total_ns))
    saved = labels.saved[order]
    if saved.shape[1] == 1:
        before = np.concatenate([[-INF], np.maximum.accumulate(saved[:, 0])[:-1]])
        chosen = np.flatnonzero(saved[:, 0] > before)
    else:
        kept: list[int] = []
        for i in range(len(saved)):
            if not kept or not (saved[kept] >= saved[i]).all(axis=1).any():
                kept.append(i)
        chosen = np.array(kept, dtype=np.int64)
    all_kept = len(chosen) <= max_labels
    if not all_kept:
        chosen = np.sort(chosen[np.argsort(bounds_ns[order[chosen]], kind="stable")[:max_labels]])
    numbers = order[chosen]
    return _Labels(labels.total_ns[numbers], labels.saved[numbers], labels.numbers[numbers]), all_kept
