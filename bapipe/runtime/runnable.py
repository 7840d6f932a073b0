"""Which plans torch can run."""

from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.runtime.lowering import with_transfers
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import Stage, StageCost


def check_runnable(plan: Plan) -> tuple[int, ...]:
    """Returns the ranks of the plan that have a stage.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced or deadlocks.
        BapipeError: a device runs side by side, neighbouring stages share some of their devices only, or a stage has
            devices without micro-batches.
    """
    for device in plan.cluster.devices:
        if device.side_by_side:
            raise BapipeError(
                f"device '{device.name}' runs forward and backward side by side, which torch cannot: plan with a "
                "schedule other than fbp-as, or leave side_by_side out of the cluster"
            )
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > plan.num_microbatches:
            raise BapipeError(
                f"stage {s} has {len(stage.devices)} devices for {plan.num_microbatches} micro-batches: plan with more "
                "micro-batches, or fewer devices"
            )
    schedule = plan.table
    unit = StageCost(forward_ns=1, input_grad_ns=1, weight_grad_ns=1)
    simulate_schedule(schedule, [Stage(costs=(unit,) * len(ranks)) for ranks in schedule.devices], plan.cluster)
    with_transfers(schedule)
    return tuple(sorted({rank for ranks in schedule.devices for rank in ranks}))
