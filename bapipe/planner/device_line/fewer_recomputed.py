"""Which layers of the best plan are recomputed: of each stage those of the least forward time with which it fits.

While plans for many devices are searched for, they recompute nearly the best layers (`recomputed_layers.py`).
"""

from itertools import pairwise

from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.device_line.line import TimedPlan
from bapipe.planner.stages.recomputation import LayerChoice


def with_fewer_recomputed(timed: TimedPlan, deadline: Deadline) -> TimedPlan:
    """Returns a plan with the layers that its stages recompute chosen one by one, if that is faster.

    After the deadline the stages that are left recompute what they did.
    """
    if not any(timed.recompute) or deadline.is_over:
        return timed
    line, plan = timed.line, timed.plan
    choice = LayerChoice(line.profiles, line.cluster, plan.microbatch_size, deadline)
    chosen, limits = list(timed.recompute), line.memory_limits(timed)
    for stage, (begin, end) in enumerate(pairwise(plan.cuts)):
        if chosen[stage] and not deadline.is_over:
            kind = line.cluster.devices[sum(plan.counts[:stage])].kind
            # If a stage does not fit with all of its layers, neither does the plan below, if nothing better is found.
            best = choice.best(begin, end, limits[stage], kind, whole_fits=True)
            chosen[stage] = chosen[stage] if best is None else best.layers
    return min(timed, line.time_with(plan, chosen) or timed, key=lambda each: each.step_ns)
