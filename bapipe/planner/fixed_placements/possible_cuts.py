"""Sets of cuts of a pipeline: where each cut may lie, and which intervals each stage may hold.

The boundaries at which a cut may lie are its *positions*. An interval that a stage may hold is an *arc* from a position
of the cut before the stage to one of the cut after it. Cuts are possible if all their intervals are arcs. Two dynamic
programmes over the arcs, forwards and backwards, give the minimum of weights @ times over all possible cuts, and over
the possible cuts with each arc. Arcs that no cuts faster than a limit have are removed (as reduced costs fix variables
in integer programming).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.fixed_placements.naive_cuts import Cuts
from bapipe.planner.fixed_placements.placed_pipeline import PlacedPipeline
from bapipe.planner.stages.intervals import BoolArray, IntArray

MAX_EXACT = 1 << 53
"""Integers up to this are exact in floating point."""


@dataclass(frozen=True, slots=True)
class PossibleCuts:
    """A set of cuts of a pipeline.

    Attributes:
        positions: the boundaries at which each cut may lie, ascending; the first and the last cut are the ends of the
            chain. [stages + 1][positions]
        arcs: whether each stage may hold the interval between two positions. [stages][positions of the cut before,
            positions of the cut after]
    """

    positions: tuple[IntArray, ...]
    arcs: tuple[BoolArray, ...]

    @property
    def is_empty(self) -> bool:
        """Whether a cut has no position left."""
        return not all(map(len, self.positions))

    @property
    def size(self) -> int:
        """The number of pairs of positions through which a dynamic programme goes."""
        return sum(arcs.size for arcs in self.arcs)

    @property
    def num_arcs(self) -> int:
        """The number of arcs of all stages."""
        return sum(int(np.count_nonzero(arcs)) for arcs in self.arcs)

    def count(self) -> float:
        """Returns the number of possible cuts, approximate if it is very large."""
        ways = np.ones(1)
        for arcs in self.arcs:
            ways = ways @ arcs
        return float(ways.sum())

    def contains(self, cuts: Cuts) -> bool:
        """Returns whether every cut lies at one of its positions; its intervals are not checked."""
        return all(cut in positions for cut, positions in zip(cuts, self.positions, strict=True))

    def every(self) -> IntArray:
        """Returns all possible cuts. [n, stages + 1]"""
        at = np.zeros((len(self.positions[0]), 1), dtype=np.int64)
        for arcs in self.arcs:
            row, following = np.nonzero(arcs[at[:, -1]])
            at = np.concatenate([at[row], following[:, None]], axis=1)
        return np.stack([positions[at[:, s]] for s, positions in enumerate(self.positions)], axis=1)

    def split(self, cut: int, at: int) -> tuple["PossibleCuts", "PossibleCuts"]:
        """Returns the cuts in which one cut lies at one of its first `at` positions, and all others."""
        return self._between(cut, slice(None, at)), self._between(cut, slice(at, None))

    def _between(self, cut: int, part: slice) -> "PossibleCuts":
        """Returns the cuts in which one cut lies at some of its positions."""
        positions, arcs = list(self.positions), list(self.arcs)
        positions[cut] = positions[cut][part]
        arcs[cut - 1], arcs[cut] = arcs[cut - 1][:, part], arcs[cut][part]
        return PossibleCuts(tuple(positions), tuple(arcs))

    def with_arcs(self, arcs: Sequence[BoolArray]) -> "PossibleCuts":
        """Returns the set with fewer arcs, without positions that have no arc before or after them."""
        keep = [np.ones(len(positions), dtype=bool) for positions in self.positions]
        for s, of_stage in enumerate(arcs):
            keep[s] &= of_stage.any(axis=1)
            keep[s + 1] &= of_stage.any(axis=0)
        return PossibleCuts(
            tuple(positions[kept] for positions, kept in zip(self.positions, keep, strict=True)),
            tuple(of_stage[np.ix_(keep[s], keep[s + 1])] for s, of_stage in enumerate(arcs)),
        )


def all_cuts(pipeline: PlacedPipeline) -> PossibleCuts:
    """Returns all cuts of a pipeline whose stages fit by the memory check of the search."""
    last, num_stages = pipeline.intervals.num_boundaries - 1, len(pipeline.placements)
    positions = [np.array([0]), *[np.arange(1, last)] * (num_stages - 1), np.array([last])]
    arcs = []
    for s in range(num_stages):
        is_interval, at = _intervals(pipeline, positions[s], positions[s + 1])
        arcs.append(is_interval & pipeline.stage_fits(s)[at])
    return PossibleCuts(tuple(positions), tuple(arcs))


def _intervals(pipeline: PlacedPipeline, begins: IntArray, ends: IntArray) -> tuple[BoolArray, IntArray]:
    """Returns which pairs of a begin and an end are intervals, and their indices, 0 for other pairs. [begins, ends]"""
    numbers = (pipeline.intervals.row_offset[begins] - begins - 1)[:, None] + ends
    is_interval = begins[:, None] < ends
    return is_interval, np.where(is_interval, numbers, 0)


@dataclass(frozen=True, slots=True)
class Minimum:
    """The result of `minimize`.

    Attributes:
        bounds: for each row of weights, the minimum of weights @ times, divided by the total: lower bounds on the step
            of all cuts, in ns. [rows]
        cuts: possible cuts that attain the minimum of the last row; None if there are none.
        possible: the cuts that may be faster than the limit.
    """

    bounds: IntArray
    cuts: Cuts | None
    possible: PossibleCuts


def minimize(
    pipeline: PlacedPipeline, weights: IntArray, totals: IntArray, possible: PossibleCuts, limit_ns: int
) -> Minimum:
    """Returns the minimum of several rows of weights over possible cuts, and the cuts that may be below a limit.

    Exact if all sums are below `MAX_EXACT`. O(rows * arcs).

    Args:
        weights: in each row the sum of the weights of some paths, `totals` their number. [rows, entries], [rows]
    """
    stage_sums = [_stage_sums(pipeline, weights, s, possible) for s in range(len(possible.arcs))]
    to_go = [np.zeros((len(weights), 1))]
    for sums in reversed(stage_sums):
        to_go.append((sums + to_go[-1][:, None, :]).min(axis=2))
    to_go.reverse()
    bounds = to_go[0][:, 0] / totals
    cuts = _argmin([sums[-1] for sums in stage_sums], [each[-1] for each in to_go], possible)
    if bounds.max() >= limit_ns:
        return Minimum(bounds, None, possible)
    so_far, arcs = np.zeros((len(weights), 1)), []
    limits = (totals * float(limit_ns))[:, None, None]
    for s, sums in enumerate(stage_sums):
        through = so_far[:, :, None] + sums
        so_far = through.min(axis=1)
        through += to_go[s + 1][:, None, :]
        arcs.append(possible.arcs[s] & (through < limits).all(axis=0))
    return Minimum(bounds, cuts, possible.with_arcs(arcs))


def _stage_sums(pipeline: PlacedPipeline, weights: IntArray, s: int, possible: PossibleCuts) -> IntArray:
    """Returns the part of weights @ times of a stage and the transfers at its end; infinite where there is no arc.

    [rows, positions of the cut before, positions of the cut after]
    """
    begins, ends = possible.positions[s], possible.positions[s + 1]
    _, at = _intervals(pipeline, begins, ends)
    entries, columns = pipeline.stage_entries(s)
    sums: IntArray = (weights[:, columns] @ entries[:, at.ravel()].astype(float)).reshape(len(weights), *at.shape)
    transfers, channels = pipeline.transfers_after(s)
    sums += (weights[:, channels] @ transfers[:, ends].astype(float))[:, None, :]
    sums[:, ~possible.arcs[s]] = np.inf
    return sums


def _argmin(stage_sums: Sequence[IntArray], to_go: Sequence[IntArray], possible: PossibleCuts) -> Cuts | None:
    """Returns the cuts with the least sum, None if there are none.

    Args:
        stage_sums: what each stage adds. [stages][positions of the cut before, of the cut after]
        to_go: the least sum of all stages from each position on. [stages + 1][positions]
    """
    if not np.isfinite(to_go[0][0]):
        return None
    at, cuts = 0, [int(possible.positions[0][0])]
    for s, sums in enumerate(stage_sums):
        at = int(np.argmin(sums[at] + to_go[s + 1]))
        cuts.append(int(possible.positions[s + 1][at]))
    return tuple(cuts)
