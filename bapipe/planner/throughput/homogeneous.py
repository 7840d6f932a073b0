"""The least largest load where all devices are alike: the fewest devices that do, for a falling limit.

With devices alike, a stage asks nothing of what runs before it, and of what runs after it only on how many devices it
does: the more, the more micro-batches the stage must keep meanwhile. So of all ways to run what lies after a boundary,
one with the fewest devices is as good as any, and one number a boundary is the whole table of the dynamic programme.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from bapipe.planner.throughput.problem import LeastLoad, StagePath

if TYPE_CHECKING:
    from bapipe.planner.throughput.problem import Indices, Numbers

BLOCK = 1 << 21
"""Most stages priced at once; bounds the memory."""

GROWTH = (1.0, 1.02, 1.1, 1.3, 2.0, 4.0, 16.0, 256.0)
"""How far above the bound a plan is looked for, in turn; a low limit leaves few stages to look at."""

Tell = Callable[[float, float], None]
"""(best load found, or the limit that none was found below; bound)"""


class AlikeProblem(Protocol):
    """What a stage asks for. States of its `StagePath` are numbers of devices."""

    @property
    def num_boundaries(self) -> int: ...

    @property
    def num_devices(self) -> int: ...

    @property
    def looks_ahead(self) -> bool:
        """Whether `fewest` depends on `after`."""
        ...

    def fewest(self, begin: "Indices", end: "Indices", after: "Numbers", room: "Numbers", limit: float) -> "Numbers":
        """On how many devices, at least, stages from each of `begin` to each of `end` have loads below the limit.

        More than there are where `room` devices will not do. `after[e]` devices run what follows `end[e]`.
        """
        ...

    def devices_around(self, limit: float) -> "tuple[Numbers, Numbers]":
        """On how many devices, at least, what lies before and what lies after each boundary must run."""
        ...

    def load(self, devices: int, begin: int, end: int) -> float:
        """The load of one stage."""
        ...


def least_load_alike(
    problem: AlikeProblem, *, bound: float, ceiling: float, best: StagePath | None = None, tell: Tell | None = None
) -> LeastLoad:
    """Returns the plan of least largest load, proven.

    Args:
        bound: a load that no plan is below.
        ceiling: a load that every plan is below.
        best: a plan that is known already.
    """
    for limit in sorted({min(ceiling, bound * growth * (1 + 1e-9)) for growth in GROWTH} | {ceiling}):
        if best is not None:
            break
        best = below(problem, limit)
        if best is None:
            bound = limit
            if tell:
                tell(limit, bound)
    halves = True
    while best is not None and bound < best.load:  # below the middle, and below the best load, in turn
        limit = (best.load + bound) / 2 if halves else best.load
        found = below(problem, limit)
        if found is None:
            bound = limit
        else:
            best = found
        halves = not halves
        if tell:
            tell(best.load, bound)
    return LeastLoad(best=best, bound=bound)


def below(problem: AlikeProblem, limit: float) -> StagePath | None:
    """Returns a plan with every load below the limit, None where there is none. O(boundaries**2) stages."""
    if limit <= 0:
        return None
    last, most = problem.num_boundaries - 1, problem.num_devices
    before, after = problem.devices_around(limit)
    places = np.nonzero((before + after <= most) & (before < most))[0]
    fewest = np.full(last + 1, most + 1, dtype=np.int64)
    fewest[last] = after[last] = 0
    devices_at = np.zeros(last + 1, dtype=np.int64)
    end_at = np.zeros(last + 1, dtype=np.int64)
    rows = 1 if problem.looks_ahead else max(1, BLOCK // (last + 1))
    position = places.size
    while position > 0:
        some = places[max(0, position - rows) : position]
        position -= some.size
        ends = np.concatenate([places[places > some[0]], [last]])
        follow = fewest[ends] if problem.looks_ahead else after[ends]
        room = most - before[some][:, None] - follow[None, :]
        asked = problem.fewest(some, ends, follow, room, limit)
        for row in np.nonzero((asked <= most).any(axis=1))[0][::-1].tolist():
            begin = int(some[row])
            total = asked[row] + fewest[ends]
            choice = int(total.argmin())
            if total[choice] <= most - before[begin]:
                fewest[begin] = total[choice]
                devices_at[begin], end_at[begin] = asked[row, choice], ends[choice]
    if fewest[0] > most:
        return None
    boundaries, states, load = [0], [], 0.0
    while boundaries[-1] < last:
        begin = boundaries[-1]
        states.append(int(devices_at[begin]))
        boundaries.append(int(end_at[begin]))
        load = max(load, problem.load(states[-1], begin, boundaries[-1]))
    return StagePath(load=load, boundaries=tuple(boundaries), states=tuple(states))
