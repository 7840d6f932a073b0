"""The least time in which recomputed layers run again, chosen so that the stages of a device fit in its memory.

A dynamic programme over the layers of one stage after another, with Pareto frontiers of time against saved bytes
(Nemhauser and Ullmann 1969) under each of the memory limits. Its state tells of each tensor that later layers of the
stage use whether its producer is recomputed; between two stages there is one state.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.stages.intervals import INF, IntArray

EPSILON = 1e-12
"""Margin for the rounding of floating point, relative to a value."""

BLOCK = 256
"""Labels that are compared with one another at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageItems:
    """The layers of a stage, of which some may be recomputed. Positions count from its first layer.

    Attributes:
        begin: the number of its first layer.
        forward_ns: what it costs to run each layer again. [layers]
        stash_bytes: of each layer; devices that the limits tell apart may differ. [layers, limits]
        may_recompute: whether each layer can be recomputed without the whole stage. [layers]
        tensors: (producer or -1, bytes, users) of those that the layers use.
        kept, in_backward: micro-batches in each limit, as `InFlight` counts them. [limits]
        input_bytes: what a micro-batch keeps if the whole stage is recomputed; None if it may not be here.
    """

    begin: int
    forward_ns: Sequence[int]
    stash_bytes: IntArray
    may_recompute: Sequence[bool]
    tensors: Sequence[tuple[int, int, tuple[int, ...]]]
    kept: IntArray
    in_backward: IntArray
    input_bytes: int | None = None

    @property
    def stash_in_flight(self) -> IntArray:
        """The stashes of the micro-batches in each limit if nothing is recomputed. [limits]"""
        in_flight: IntArray = self.kept * self.stash_bytes.sum(axis=0, dtype=np.int64)
        return in_flight

    def saves(self) -> IntArray:
        """What recomputing each layer saves at most. [layers, limits]"""
        return (self.kept - self.in_backward) * self.stash_bytes

    def saved_by_whole(self) -> IntArray:
        """What recomputing the whole stage saves. [limits]"""
        assert self.input_bytes is not None
        saved: IntArray = self.saves().sum(axis=0, dtype=np.int64) - self.kept * self.input_bytes
        return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class KnapsackSolution:
    """The layers recomputed, by number, their time, `INF` if none were found, and whether no others take less."""

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
"""Whether all layers of the stage so far are recomputed; and tensors that may have to be kept, with their producer's
choice."""


class LayerKnapsack:
    """The choice for the stages of a device: minimize F subject to bytes in flight <= room under each limit."""

    def __init__(self, stages: Sequence[StageItems], room_bytes: IntArray, deadline: Deadline) -> None:
        """`room_bytes` is what is left for the stashes of all stages. [limits]"""
        self._stages, self._deadline = stages, deadline
        self._needed = sum((stage.stash_in_flight for stage in stages), -room_bytes)  # [limits]
        self._saves = [stage.saves() for stage in stages]
        self._suffix = [
            [self._fractional(s, layer) for layer in range(len(stage.forward_ns) + 1)] for s, stage in enumerate(stages)
        ]

    def solve(self, upper_bound_ns: int, max_labels: int) -> KnapsackSolution:
        """Returns a choice faster than a bound, of time `INF` if none was found; `is_best` if there is none faster.

        None is found if the deadline passes before.
        """
        self._history: list[tuple[IntArray, tuple[int, ...]]] = []  # parents of labels, and the layers recomputed
        self._num_labels, self._is_best = 1, True
        zeros = np.zeros((1, len(self._needed)), dtype=np.int64)
        labels = _Labels(np.zeros(1, dtype=np.int64), zeros, np.zeros(1, dtype=np.int64))
        for s in range(len(self._stages)):
            ends = [each for each in self._ends(s, labels, upper_bound_ns, max_labels) if len(each.numbers)]
            if not ends or self._deadline.is_over:
                return KnapsackSolution(
                    layers=frozenset(), total_ns=INF, is_best=self._is_best and not self._deadline.is_over
                )
            labels = _joined(ends)
            if s + 1 < len(self._stages):
                labels = self._best_of([labels], s + 1, 0, upper_bound_ns, max_labels)
        best = int(labels.total_ns.argmin())
        return KnapsackSolution(
            layers=self._layers(int(labels.numbers[best])), total_ns=int(labels.total_ns[best]), is_best=self._is_best
        )

    def _ends(self, s: int, labels: _Labels, upper_bound_ns: int, max_labels: int) -> Iterator[_Labels]:
        """Yields the choices for the stages up to the s-th, from those for the stages before it."""
        stage = self._stages[s]
        start = frozenset((t, False) for t, (producer, _, _) in enumerate(stage.tensors) if producer < 0)
        states = {(True, start): labels}
        for layer in range(len(stage.forward_ns)):
            if self._deadline.is_over:
                return
            groups: dict[_State, list[_Labels]] = {}
            for state, of_state in states.items():
                for again in (False, True) if stage.may_recompute[layer] else (False,):
                    following, tensor_bytes = _following(stage, state, layer, again)
                    extended = self._extended(s, of_state, layer, again, tensor_bytes)
                    groups.setdefault(following, []).append(extended)
            states = {}
            for state, group in groups.items():
                found = self._best_of(group, s, layer + 1, upper_bound_ns, max_labels)
                if len(found.numbers):
                    states[state] = found
        # If all layers are recomputed the stage keeps its input, in place of the tensors that its layers use.
        yield from (of_state for (all_again, _), of_state in states.items() if not all_again)
        if stage.input_bytes is not None:
            whole = self._whole(s, labels)
            yield self._best_of([whole], s, len(stage.forward_ns), upper_bound_ns, max_labels)

    def _extended(self, s: int, labels: _Labels, layer: int, again: bool, tensor_bytes: int) -> _Labels:
        stage = self._stages[s]
        saved = labels.saved - stage.kept * tensor_bytes
        numbers = self._numbered(labels, (stage.begin + layer,) if again else ())
        if not again:
            return _Labels(labels.total_ns, saved, numbers)
        return _Labels(labels.total_ns + stage.forward_ns[layer], saved + self._saves[s][layer], numbers)

    def _whole(self, s: int, labels: _Labels) -> _Labels:
        """The choices with all of a stage recomputed."""
        stage = self._stages[s]
        numbers = self._numbered(labels, tuple(range(stage.begin, stage.begin + len(stage.forward_ns))))
        return _Labels(labels.total_ns + sum(stage.forward_ns), labels.saved + stage.saved_by_whole(), numbers)

    def _numbered(self, labels: _Labels, recomputed: tuple[int, ...]) -> IntArray:
        """The numbers of the labels that follow some in the history."""
        numbers = np.arange(self._num_labels, self._num_labels + len(labels.numbers))
        self._num_labels += len(numbers)
        self._history.append((labels.numbers, recomputed))
        return numbers

    def _best_of(self, group: Sequence[_Labels], s: int, layer: int, upper_bound_ns: int, max_labels: int) -> _Labels:
        """The Pareto frontier of the labels that can fit and be faster than a bound, before a layer of a stage."""
        labels, bounds_ns = self._promising(_joined(group), s, layer, upper_bound_ns)
        labels, all_kept = _pareto(labels, bounds_ns, max_labels)
        self._is_best &= all_kept
        return labels

    def _promising(self, labels: _Labels, s: int, layer: int, upper_bound_ns: int) -> tuple[_Labels, IntArray]:
        """Returns the labels that can still fit and be faster than a bound, and their lower bounds."""
        lacking = self._needed - labels.saved  # [labels, limits]
        bounds = labels.total_ns.astype(np.float64)
        can_fit = np.ones(len(bounds), dtype=bool)
        for i, (saved, total_ns) in enumerate(self._suffix[s][layer]):
            can_fit &= lacking[:, i] <= saved[-1]
            # A little less, because large numbers of bytes that differ by a few are equal as floats.
            more = np.interp(lacking[:, i] * (1 - EPSILON), saved, total_ns)
            bounds = np.maximum(bounds, labels.total_ns + more * (1 - EPSILON))
        keep = np.flatnonzero(can_fit & (np.ceil(bounds - EPSILON * bounds) < upper_bound_ns))
        return _Labels(labels.total_ns[keep], labels.saved[keep], labels.numbers[keep]), bounds[keep]

    def _fractional(self, s: int, layer: int) -> list[tuple[IntArray, IntArray]]:
        """Returns for each limit the fractional knapsack of the layers from one on: bytes saved by increasing time."""
        firsts = [layer, *[0] * (len(self._stages) - s - 1)]
        left = list(zip(self._stages[s:], self._saves[s:], firsts, strict=True))
        forward = np.concatenate([np.array(stage.forward_ns[first:], dtype=np.float64) for stage, _, first in left])
        # Layers that cannot be recomputed alone can be with their whole stage.
        may = np.concatenate(
            [
                np.array(stage.may_recompute[first:], dtype=bool) | (stage.input_bytes is not None)
                for stage, _, first in left
            ]
        )
        every = np.concatenate([saves[first:] for _, saves, first in left])
        found = []
        for i in range(len(self._needed)):
            saves = every[:, i]
            useful = np.flatnonzero(may & (saves > 0))
            useful = useful[np.argsort(forward[useful] / saves[useful], kind="stable")]
            found.append(
                (np.concatenate([[0], np.cumsum(saves[useful])]), np.concatenate([[0], np.cumsum(forward[useful])]))
            )
        return found

    def _layers(self, number: int) -> frozenset[int]:
        """Returns the layers that a label recomputes, by following its history."""
        firsts = np.cumsum([1, *(len(parents) for parents, _ in self._history)])
        layers: set[int] = set()
        while number:
            step = int(np.searchsorted(firsts, number, side="right")) - 1
            parents, recomputed = self._history[step]
            layers.update(recomputed)
            number = int(parents[number - firsts[step]])
        return frozenset(layers)


def _following(stage: StageItems, state: _State, layer: int, again: bool) -> tuple[_State, int]:
    """Returns the state after a choice, and the bytes of tensors that it requires to be kept."""
    all_again, tensors = state
    num_bytes, open_tensors = 0, set()
    for t, by_recomputed in tensors:
        _, size, users = stage.tensors[t]
        if layer in users and by_recomputed != again:
            num_bytes += size
        elif users[-1] > layer:
            open_tensors.add((t, by_recomputed))
    open_tensors |= {(t, again) for t, (producer, _, _) in enumerate(stage.tensors) if producer == layer}
    return (all_again and again, frozenset(open_tensors)), num_bytes


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
        chosen = _maximal(saved)
    all_kept = len(chosen) <= max_labels
    if not all_kept:
        num_saving = max_labels // 4  # those that save most, as no others may fit in the end
        by_bound = np.argsort(bounds_ns[order[chosen]], kind="stable")[: max_labels - num_saving]
        by_saved = np.argsort(-saved[chosen].min(axis=1), kind="stable")[:num_saving]
        chosen = chosen[np.union1d(by_bound, by_saved)]
    numbers = order[chosen]
    return _Labels(labels.total_ns[numbers], labels.saved[numbers], labels.numbers[numbers]), all_kept


def _maximal(saved: IntArray) -> IntArray:
    """Returns the rows of which no earlier one has no less in any column. [rows, columns] -> [kept]"""
    kept = np.zeros(0, dtype=np.int64)
    for first in range(0, len(saved), BLOCK):
        block = saved[first : first + BLOCK]
        others = np.concatenate([saved[kept], block])
        is_no_less = np.tri(len(block), len(others), len(kept) - 1, dtype=bool)  # only those before each
        for column in range(saved.shape[1]):
            is_no_less &= others[:, column] >= block[:, column, None]
        kept = np.concatenate([kept, first + np.flatnonzero(~is_no_less.any(axis=1))])
    return kept
