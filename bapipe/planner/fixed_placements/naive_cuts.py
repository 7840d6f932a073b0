"""The first cuts of a pipeline, before any search: equal times and equal numbers of layers."""

from collections.abc import Iterator, Sequence

import numpy as np

from bapipe.planner.branch_and_bound.problem import Problem
from bapipe.planner.stages.nearest_cuts import nearest_cuts
from bapipe.planner.stages.placements import StagePlacement

Cuts = tuple[int, ...]
"""The boundaries (not layers) at which stages begin and end, from 0 to the last one. [stages + 1]"""


def naive_cuts(problem: Problem, placements: Sequence[StagePlacement]) -> Iterator[Cuts]:
    """Yields cuts into equal times, by the speeds of each stage's devices, then cuts into equal numbers of layers."""
    intervals = problem.lower_bound.costs.intervals
    from_start = np.arange(intervals.num_boundaries - 1)  # indices of the intervals [0, j)
    rates, work = [], np.zeros(intervals.num_boundaries)
    for placement in placements:
        of_device = [problem.lower_bound.costs.times[c].at(from_start) for c in placement.device_classes]
        until = [np.append(0, t.forward_ns + t.backward_ns) for t in of_device]
        rates.append(sum(1 / max(float(each[-1]), 1.0) for each in until))
        work += sum(each / max(float(each[-1]), 1.0) for each in until)
    equal_time = nearest_cuts(work / max(work[-1], 1.0), np.cumsum(rates[:-1]) / sum(rates))
    layers = np.array(intervals.cuts) / intervals.cuts[-1]
    equal_layers = nearest_cuts(layers, np.arange(1, len(placements)) / len(placements))
    for inner in dict.fromkeys((equal_time, equal_layers)):
        yield 0, *inner, intervals.num_boundaries - 1
