"""The dynamic programme of `prefix_programme.py` backwards and without delays, compiled.

A state is a number of devices and of cuts; its value is the first boundary after which the other devices can do all
work. Prefixes that do not reach it are pruned.
"""

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.compiled import compiled
from bapipe.planner.device_line.early_waits import Waits
from bapipe.planner.device_line.plan_kind import PlanKind
from bapipe.planner.device_line.stage_arrays import Boundaries, BoundInputs
from bapipe.planner.device_line.stage_limits import first_within, is_passed, start_behind


@compiled
def extend_backwards(
    problem: BoundInputs,
    kind: PlanKind,
    waits: Waits,
    limit: float,
    first: Boundaries,
    begin: int,
    end: int,
    num_tried: Ints,
) -> None:
    """Adds a stage before all suffixes that begin after `begin` to `end` devices, the last ones first.

    Args:
        first: the last boundary where nothing is known. If cuts are not counted, it has one column.
            [devices + 1, cuts + 2]
        num_tried: counts (class of stages, suffix) pairs. [1]
    """
    (num, num_classes), last = problem.stages.shape, problem.layers.shape[1] - 1
    counts_cuts = first.shape[1] > 1
    num_cuts = min(kind.most_cuts, max(0, first.shape[1] - 2))
    for p in range(end - 1, begin - 1, -1):
        for c in range(min(num_cuts, p) + 1):
            following = c + 1 if counts_cuts else 0
            may_be_empty = (counts_cuts and c < kind.fewest_cuts) or not problem.is_alike
            # Devices may stay idle, but not before the first stage.
            best = first[p + 1, c] if problem.is_alike and p > 0 else last
            for g in range(num_classes):
                stage = problem.stages[p, g]
                if stage.few > num - p:
                    break
                num_tried[0] += 1
                most = stage.few if problem.is_alike else min(stage.most, num - p)
                j = last
                for to in range(p + stage.few, p + most + 1):
                    j = min(j, first[to, following])
                if may_be_empty or j == 0:  # nothing is left for the stage
                    best = min(best, j)
                if p == 0:
                    j = max(j, kind.earliest_end)
                    if j > kind.latest_end or stage.few > kind.first_most or stage.most < kind.first_fewest:
                        continue
                if j == last and not (stage.few <= kind.last_most and stage.most >= kind.last_fewest):
                    continue
                high = min(best, j) - 1
                if high < 0 or not is_passed(problem, kind, limit, p, c, g, high, counts_cuts):
                    continue
                start = start_behind(problem, kind, waits, limit, p, c, g, counts_cuts, 0.0, 0.0)
                i = first_within(problem, start, p, g, high, j)
                if i >= 0:
                    best = i
            first[p, c] = best
