"""Compiled: the delays of `ring_bound.py`, which follow the way back of later stages."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Floats
from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.stage_arrays import Boundaries, BoundInputs
from bapipe.planner.device_line.stage_limits import rings_ns, until_first_bucket


class Delays(NamedTuple):
    """What follows the way back of later stages, by level; see `ring_bound.py`. In ns.

    Attributes:
        from_ns: the lower end of each level. [levels]
        least_ns, level_ns: the lower end of the first level, and the width of each.
        left: what the micro-batches that end together with the last one of a stage count for, by density. [classes]
        rounds: how many of the maximum number of such micro-batches each replica of an earlier stage runs. [classes]
        filler: what the micro-batches count for, negative, besides the backwards of no round, all rounds but one, and
            all rounds. [classes, 3]
        back: an upper bound on the transfers back over each number of cuts. [cuts]
    """

    from_ns: Floats
    least_ns: float
    level_ns: float
    left: Floats
    rounds: Floats
    filler: Floats
    back: Floats


def without_delays() -> Delays:
    """Returns delays of a single level, in which nothing follows the way back of a stage."""
    return Delays(np.zeros(1), 0.0, 1.0, np.zeros(0), np.zeros(0), np.zeros((0, 0)), np.zeros(0))


@compiled
def place(
    problem: BoundInputs,
    delays: Delays,
    first: Boundaries,
    furthest: NDArray[np.int32],
    level: int,
    p: int,
    column: int,
    num_cuts: int,
    g: int,
    i: int,
    lowest: int,
    end: int,
) -> None:
    """Stores in `furthest` the last end of a stage in [lowest, end] for each level of the longest delay so far.

    Args:
        num_cuts: the maximum number of cuts before the stage.
    """
    num, num_levels, stage = problem.stages.shape[0], furthest.shape[0], problem.stages[p, g]
    most = stage.few if problem.is_alike else min(stage.most, num - p)
    # By how much one boundary less can shorten the rings of a stage at most, apart from one bucket's latency.
    drop = problem.max_gradients * (stage.ring_latency / problem.max_bucket + stage.ring_rate)
    shortest = _filler(problem.layers, stage, delays, g, i, lowest) - stage.ring_latency
    above, j = num_levels, end
    while j >= lowest:
        at, skipped = level, 1
        if j > i:
            first_full, others = _delay(problem.layers, stage, problem.max_bucket, delays, num_cuts, i, j)
            ns = max(0.0, first_full + others) + _filler(problem.layers, stage, delays, g, i, j)
            at = max(level, min(num_levels - 1, int(max(0.0, (ns - delays.least_ns) / delays.level_ns))))
            # Levels in which others reach as far are of no use. Shorter stages stay above a level for some boundaries.
            below = min(at, above)
            while problem.is_alike and below > level + 1 and furthest[below - 1, p + most, column] >= j - 1:
                below -= 1
            room = others + shortest - delays.least_ns - delays.level_ns * below
            skipped = 1 if room <= 0 else 1 + int(min(room / max(drop, 1e-9), 1e6))
        if at < above:
            for to in range(p + stage.few, p + most + 1):
                if j >= first[to, column] and j > furthest[at, to, column]:
                    furthest[at, to, column] = j
            above = at
            if at == level:
                return
        j = max(j - skipped, lowest) if j > lowest else lowest - 1


@inlined
def _delay(
    layers: NDArray[Any], stage: Any, max_bucket: float, delays: Delays, num_cuts: int, i: int, j: int
) -> tuple[float, float]:
    """Returns a lower bound, in ns, on what follows a stage's last backward, less the way back from the stage's end.

    For the stage of the layers [i, j): the time until the first bucket is full, and the rest.
    """
    begin, end = layers[stage.own, i], layers[stage.own, j]
    ring = rings_ns(stage, max_bucket, end.gradients - begin.gradients)
    first_full = until_first_bucket(begin, end) * stage.fastest
    way_back = layers[stage.before, j].backward * stage.until + delays.back[min(num_cuts, delays.back.size - 1)]
    return float(first_full), float(ring - way_back)


@inlined
def _filler(layers: NDArray[Any], stage: Any, delays: Delays, g: int, i: int, j: int) -> float:
    """Returns a stage's backwards before that, less what the micro-batches count for; it rises with the stage."""
    b = (layers[stage.own, j].backward - layers[stage.own, i].backward) * stage.fastest
    rounds, filler = delays.rounds[g], delays.filler[g]
    if rounds < 1:
        return float(filler[0])
    return float(min(filler[0], min((rounds - 1) * b + filler[1], rounds * b + filler[2])))
