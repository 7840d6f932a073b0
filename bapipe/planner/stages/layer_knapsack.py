"""Which layers to recompute so that the stages of a device fit in its memory, with the least time: a knapsack.

A dynamic programme goes through the layers, one stage after another. Its state says, for each tensor that later layers
of the stage use, whether the tensor's producer is recomputed; between two stages there is only one state. Each state
has a Pareto frontier of *labels*: choices for the layers so far, by their time and the bytes that they save under each
memory limit (Nemhauser and Ullmann 1969).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.stages.intervals import INF, IntArray

EPSILON = 1e-12
"""Relative margin for the rounding of floating-point numbers."""

BLOCK = 256
"""How many labels are compared with each other at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageItems:
    """The layers of a stage, of which some may be recomputed. Layers are numbered from the first one of the stage.

    Attributes:
        begin: the number of the first layer in the profile.
        forward_ns: the cost of running each layer again. [layers]
        stash_bytes: the stash of each layer; limits may be of different kinds of devices. [layers, limits]
        may_recompute: whether each layer can be recomputed without the whole stage. [layers]
        tensors: (producer, or -1 outside the stage; bytes; users) of the tensors that the layers use.
        kept, in_backward: numbers of micro-batches in the state of each limit, as in `InFlight`. [limits]
        input_bytes: what a micro-batch keeps if the whole stage is recomputed from its input; None if that is not a
            choice of this knapsack.
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
        """The bytes of the stashes in the state of each limit if nothing is recomputed. [limits]"""
        in_flight: IntArray = self.kept * self.stash_bytes.sum(axis=0, dtype=np.int64)
        return in_flight

    def saves(self) -> IntArray:
        """Returns the bytes that recomputing each layer saves, before tensors that must be kept. [layers, limits]"""
        return (self.kept - self.in_backward) * self.stash_bytes

    def saved_by_whole(self) -> IntArray:
        """Returns the bytes that recomputing the whole stage from its input saves. [limits]"""
        assert self.input_bytes is not None
        saved: IntArray = self.saves().sum(axis=0, dtype=np.int64) - self.kept * self.input_bytes
        return saved


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedLayers:
    """The layers that are chosen to be recomputed, none if no choice was found with which the stages fit.

    Attributes:
        layers: their numbers in the profile.
        total_ns: their forward time; `INF` if no choice was found.
        is_best: whether it is proven that no other choice takes less time; if none was found, that there is none.
    """

    layers: frozenset[int]
    total_ns: int
    is_best: bool

    @property
    def fits(self) -> bool:
        """Whether a choice was found."""
        return self.total_ns < INF


@dataclass(frozen=True, slots=True)
class _Labels:
    """The choices for the layers so far that lead to one state.

    Attributes:
        total_ns: the forward time of the recomputed layers. [labels]
        saved: the bytes saved under each limit. [labels, limits]
        numbers: identify each label in the history, from which its layers are found. [labels]
    """

    total_ns: IntArray
    saved: IntArray
    numbers: IntArray


_State = tuple[bool, frozenset[tuple[int, bool]]]
"""Whether all layers of the stage so far are recomputed; and the tensors that later layers use, each with whether its
producer is recomputed."""


class LayerKnapsack:
    """Chooses layers of the stages of a device: minimizes F, subject to bytes in flight <= room under each limit."""

    def __init__(self, stages: Sequence[StageItems], room_bytes: IntArray, deadline: Deadline) -> None:
        """`room_bytes` is what the limits leave for the stashes of all stages. [limits]"""
        self._stages, self._deadline = stages, deadline
        self._needed = sum((stage.stash_in_flight for stage in stages), -room_bytes)  # [limits]
        self._saves = [stage.saves() for stage in stages]
        self._suffix = [
            [self._fractional(s, layer) for layer in range(len(stage.forward_ns) + 1)] for s, stage in enumerate(stages)
        ]

    def solve(self, upper_bound_ns: int, max_labels: int) -> RecomputedLayers:
        """Returns the fastest choice found with less time than `upper_bound_ns`.

        Exact if no frontier has more than `max_labels` labels. Nothing is found if the deadline passes before the end.
        """
        # For each step, the numbers of the parents of the new labels, and the layers that the step recomputes.
        self._history: list[tuple[IntArray, tuple[int, ...]]] = []
        self._num_labels, self._is_best = 1, True
        zeros = np.zeros((1, len(self._needed)), dtype=np.int64)
        labels = _Labels(np.zeros(1, dtype=np.int64), zeros, np.zeros(1, dtype=np.int64))
        for s in range(len(self._stages)):
            ends = [each for each in self._add_stage(s, labels, upper_bound_ns, max_labels) if len(each.numbers)]
            if not ends or self._deadline.is_over:
                return RecomputedLayers(
                    layers=frozenset(), total_ns=INF, is_best=self._is_best and not self._deadline.is_over
                )
            labels = _joined(ends)
            if s + 1 < len(self._stages):
                labels = self._best_of([labels], s + 1, 0, upper_bound_ns, max_labels)
        best = int(labels.total_ns.argmin())
        return RecomputedLayers(
            layers=self._recomputed_layers(int(labels.numbers[best])),
            total_ns=int(labels.total_ns[best]),
            is_best=self._is_best,
        )

    def _add_stage(self, s: int, labels: _Labels, upper_bound_ns: int, max_labels: int) -> Iterator[_Labels]:
        """Extends the choices for the stages before the s-th by its layers; yields a frontier per final state."""
        stage = self._stages[s]
        start = frozenset((t, False) for t, (producer, _, _) in enumerate(stage.tensors) if producer < 0)
        states = {(True, start): labels}
        for layer in range(len(stage.forward_ns)):
            if self._deadline.is_over:
                return
            groups: dict[_State, list[_Labels]] = {}
            for state, of_state in states.items():
                for is_recomputed in (False, True) if stage.may_recompute[layer] else (False,):
                    following, tensor_bytes = _following(stage, state, layer, is_recomputed)
                    extended = self._extended(s, of_state, layer, is_recomputed, tensor_bytes)
                    groups.setdefault(following, []).append(extended)
            states = {}
            for state, group in groups.items():
                found = self._best_of(group, s, layer + 1, upper_bound_ns, max_labels)
                if len(found.numbers):
                    states[state] = found
        # A stage of which all layers are recomputed keeps its input instead of the tensors that its layers use.
        yield from (of_state for (all_recomputed, _), of_state in states.items() if not all_recomputed)
        if stage.input_bytes is not None:
            whole = self._recompute_whole(s, labels)
            yield self._best_of([whole], s, len(stage.forward_ns), upper_bound_ns, max_labels)

    def _extended(self, s: int, labels: _Labels, layer: int, is_recomputed: bool, tensor_bytes: int) -> _Labels:
        """Returns the labels extended by a choice for one layer, which makes the stage keep `tensor_bytes` more."""
        stage = self._stages[s]
        saved = labels.saved - stage.kept * tensor_bytes
        numbers = self._numbered(labels, (stage.begin + layer,) if is_recomputed else ())
        if not is_recomputed:
            return _Labels(labels.total_ns, saved, numbers)
        return _Labels(labels.total_ns + stage.forward_ns[layer], saved + self._saves[s][layer], numbers)

    def _recompute_whole(self, s: int, labels: _Labels) -> _Labels:
        """Returns the labels extended by recomputing all of a stage from its input."""
        stage = self._stages[s]
        numbers = self._numbered(labels, tuple(range(stage.begin, stage.begin + len(stage.forward_ns))))
        return _Labels(labels.total_ns + sum(stage.forward_ns), labels.saved + stage.saved_by_whole(), numbers)

    def _numbered(self, labels: _Labels, recomputed: tuple[int, ...]) -> IntArray:
        """Adds a step to the history; returns the numbers of the new labels, one for each of `labels`. [labels]"""
        numbers = np.arange(self._num_labels, self._num_labels + len(labels.numbers))
        self._num_labels += len(numbers)
        self._history.append((labels.numbers, recomputed))
        return numbers

    def _best_of(self, group: Sequence[_Labels], s: int, layer: int, upper_bound_ns: int, max_labels: int) -> _Labels:
        """Returns the Pareto frontier of the labels that can still fit and be faster than a bound.

        Args:
            s, layer: the stage and layer that follow the choices so far.
        """
        labels, bounds_ns = self._promising(_joined(group), s, layer, upper_bound_ns)
        labels, all_kept = _pareto(labels, bounds_ns, max_labels)
        self._is_best &= all_kept
        return labels

    def _promising(self, labels: _Labels, s: int, layer: int, upper_bound_ns: int) -> tuple[_Labels, IntArray]:
        """Returns the labels that can still fit and be faster than a bound, with lower bounds on their final time."""
        lacking = self._needed - labels.saved  # [labels, limits]
        bounds = labels.total_ns.astype(np.float64)
        can_fit = np.ones(len(bounds), dtype=bool)
        for i, (saved, total_ns) in enumerate(self._suffix[s][layer]):
            can_fit &= lacking[:, i] <= saved[-1]
            # Slightly less, because large numbers of bytes that differ by little are equal as floats.
            more = np.interp(lacking[:, i] * (1 - EPSILON), saved, total_ns)
            bounds = np.maximum(bounds, labels.total_ns + more * (1 - EPSILON))
        keep = np.flatnonzero(can_fit & (np.ceil(bounds - EPSILON * bounds) < upper_bound_ns))
        return _Labels(labels.total_ns[keep], labels.saved[keep], labels.numbers[keep]), bounds[keep]

    def _fractional(self, s: int, layer: int) -> list[tuple[IntArray, IntArray]]:
        """Returns for each limit the fractional knapsack of the layers from one on (Dantzig 1957).

        As points (bytes saved, least time) by increasing time; between two points it is linear.
        """
        firsts = [layer, *[0] * (len(self._stages) - s - 1)]
        left = list(zip(self._stages[s:], self._saves[s:], firsts, strict=True))
        forward = np.concatenate([np.array(stage.forward_ns[first:], dtype=np.float64) for stage, _, first in left])
        # Layers that cannot be recomputed alone can be recomputed with their whole stage.
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

    def _recomputed_layers(self, number: int) -> frozenset[int]:
        """Returns the layers that a label recomputes, by following the history back."""
        firsts = np.cumsum([1, *(len(parents) for parents, _ in self._history)])
        layers: set[int] = set()
        while number:
            step = int(np.searchsorted(firsts, number, side="right")) - 1
            parents, recomputed = self._history[step]
            layers.update(recomputed)
            number = int(parents[number - firsts[step]])
        return frozenset(layers)


def _following(stage: StageItems, state: _State, layer: int, is_recomputed: bool) -> tuple[_State, int]:
    """Returns the state after the choice for one layer, and the bytes of tensors that must be kept because of it."""
    all_recomputed, tensors = state
    num_bytes, open_tensors = 0, set()
    for t, by_recomputed in tensors:
        _, size, users = stage.tensors[t]
        # A tensor between a recomputed layer and one that is not has to be kept.
        if layer in users and by_recomputed != is_recomputed:
            num_bytes += size
        elif users[-1] > layer:
            open_tensors.add((t, by_recomputed))
    open_tensors |= {(t, is_recomputed) for t, (producer, _, _) in enumerate(stage.tensors) if producer == layer}
    return (all_recomputed and is_recomputed, frozenset(open_tensors)), num_bytes


def _joined(groups: Iterable[_Labels]) -> _Labels:
    """Returns all labels of some groups."""
    groups = list(groups)
    return _Labels(
        np.concatenate([labels.total_ns for labels in groups]),
        np.concatenate([labels.saved for labels in groups]),
        np.concatenate([labels.numbers for labels in groups]),
    )


def _pareto(labels: _Labels, bounds_ns: IntArray, max_labels: int) -> tuple[_Labels, bool]:
    """Returns the Pareto frontier, at most `max_labels` of its labels, and whether that is all of it.

    A label is left out if another one takes no more time and saves no less under any limit.
    """
    order = np.lexsort((*(-labels.saved.T), labels.total_ns))
    saved = labels.saved[order]
    if saved.shape[1] == 1:
        before = np.concatenate([[-INF], np.maximum.accumulate(saved[:, 0])[:-1]])
        chosen = np.flatnonzero(saved[:, 0] > before)
    else:
        chosen = _maximal(saved)
    all_kept = len(chosen) <= max_labels
    if not all_kept:
        num_saving = max_labels // 4  # the labels that save most, because in the end others may not fit
        by_bound = np.argsort(bounds_ns[order[chosen]], kind="stable")[: max_labels - num_saving]
        by_saved = np.argsort(-saved[chosen].min(axis=1), kind="stable")[:num_saving]
        chosen = chosen[np.union1d(by_bound, by_saved)]
    numbers = order[chosen]
    return _Labels(labels.total_ns[numbers], labels.saved[numbers], labels.numbers[numbers]), all_kept


def _maximal(saved: IntArray) -> IntArray:
    """Returns the indices of the rows that no earlier row dominates: has as much or more in every column.

    [rows, columns] -> [kept]
    """
    kept = np.zeros(0, dtype=np.int64)
    for first in range(0, len(saved), BLOCK):
        block = saved[first : first + BLOCK]
        others = np.concatenate([saved[kept], block])
        is_no_less = np.tri(len(block), len(others), len(kept) - 1, dtype=bool)  # only earlier rows
        for column in range(saved.shape[1]):
            is_no_less &= others[:, column] >= block[:, column, None]
        kept = np.concatenate([kept, first + np.flatnonzero(~is_no_less.any(axis=1))])
    return kept
