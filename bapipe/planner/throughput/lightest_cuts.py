"""The cuts of a layer graph whose fullest stage needs the least memory, one device a stage.

    L(b, k) = min over boundaries e > b of  max(bytes(b, e, k), L(e, k - 1)),     L(last, 0) = 0

where bytes(b, e, k) is what the stage [b, e) needs if it is the k-th from the end, so that it has k micro-batches in
flight: a dynamic programme over all pairs of boundaries, for each k. It ranks cuts only. Workspaces are left out, and
there are as many micro-batches as stages.
"""

from typing import NamedTuple

import numpy as np

from bapipe.formats.profile import ModelProfile
from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.throughput.loads import Boundaries
from bapipe.simulator.interval_costs import IntervalCosts, cut_bytes

MORE_THAN_ANY = 1 << 62
"""Bytes: no stage needs so many."""


class LightestCuts(NamedTuple):
    """Boundaries from the first to the last one, and the bytes of the fullest stage between them."""

    boundaries: tuple[int, ...]
    num_bytes: int


def lightest_cuts(
    boundaries: Boundaries, profile: ModelProfile, max_stages: int, *, recompute: bool, deadline: Deadline
) -> LightestCuts:
    """Returns the cuts into some stages, `max_stages` at most, at the smallest micro-batch size.

    Args:
        recompute: whether stages recompute all of their layers, or none.

    Raises:
        OutOfTime: the deadline passed before.
    """
    size, last = profile.microbatch_sizes[0], boundaries.num_boundaries - 1
    costs = IntervalCosts(profile, size, 1.0, inside=boundaries.inside)
    sent, returned = cut_bytes(profile, size, boundaries.inside)  # [boundaries]
    begin, end = np.arange(last + 1)[:, None], np.arange(last + 1)[None, :]
    received = sent[begin] + returned[end]  # [begins, ends]
    held = costs.param_bytes(begin, end) + costs.gradient_bytes(begin, end) + costs.optimizer_bytes(begin, end)
    stash = costs.stash_bytes(begin, end)
    once, in_flight = (stash, sent[begin]) if recompute else (np.zeros_like(stash), stash)
    constant: Ints = held + max_stages * received + once
    least: list[Ints] = [np.where(np.arange(last + 1) == last, 0, MORE_THAN_ANY)]
    ends: list[Ints] = []
    for k in range(1, min(max_stages, last) + 1):
        deadline.check()
        stage = np.where(boundaries.nested, constant + k * in_flight, MORE_THAN_ANY)
        worst = np.maximum(stage, least[-1])
        ends.append(worst.argmin(axis=1))
        least.append(worst.min(axis=1))
    k = int(np.argmin([of_k[0] for of_k in least[1:]])) + 1
    path, num_bytes = [0], int(least[k][0])
    while path[-1] != last:
        k -= 1
        path.append(int(ends[k][path[-1]]))
    return LightestCuts(tuple(path), num_bytes)
