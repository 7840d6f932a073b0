"""Chooses the layers that the best plan recomputes: in each stage those with the minimum forward time that make it fit.

During the search plans for many devices recompute nearly the best layers only (`recomputed_layers.py`).
"""

from itertools import pairwise

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.line import TimedPlan
from bapipe.planner.stages.recomputation import LayerChoice


def with_fewer_recomputed(timed: TimedPlan, deadline: Deadline) -> TimedPlan:
    """Returns the plan with the recomputed layers of each stage chosen exactly, if that is faster.

    The stages that are left at the deadline keep their layers.
    """
    if not any(timed.recompute) or deadline.is_over:
        return timed
    line, plan = timed.line, timed.plan
    choice = LayerChoice(line.profiles, line.cluster, plan.microbatch_size, deadline)
    chosen, limits = list(timed.recompute), line.stash_limits(timed)
    for stage, (begin, end) in enumerate(pairwise(plan.cuts)):
        if chosen[stage] and not deadline.is_over:
            kind = line.cluster.devices[sum(plan.counts[:stage])].kind
            # `whole_fits` need not be true: if the stage does not fit even so, `time_with` rejects the plan below.
            chosen[stage] = choice.best(begin, end, limits[stage], kind, whole_fits=True).layers
    return min(timed, line.time_with(plan, chosen) or timed, key=lambda each: each.step_ns)
