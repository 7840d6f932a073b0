"""Whether torch can run a plan, and on which devices."""

from bapipe.device_types import DeviceType, type_of_kind
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.stage_plan import check_replicas
from bapipe.runtime.lowering import lower_schedule
from bapipe.schedules.table import Schedule, check


def check_runnable(plan: Plan) -> tuple[int, ...]:
    """Returns the ranks of the plan that have a stage.

    Raises:
        InvalidSchedule: the plan's order is incomplete, misplaced or deadlocks.
        BapipeError: a device overlaps forward and backward, neighbouring stages share only some of their devices, or a
            stage has devices without micro-batches.
    """
    for device in plan.cluster.devices:
        if device.side_by_side:
            raise BapipeError(
                f"device '{device.name}' runs forward and backward side by side, which torch cannot: plan with a "
                "schedule other than fbp-as, or leave side_by_side out of the cluster"
            )
    check_replicas(plan.stages, plan.minibatch_size, plan.microbatch_size)
    schedule = plan.table
    check(schedule)
    lower_schedule(schedule)
    return ranks_with_stage(schedule)


def ranks_with_stage(schedule: Schedule) -> tuple[int, ...]:
    """Returns the ranks of a schedule that have a stage, ascending: process i of a group runs the i-th of them."""
    return tuple(sorted({rank for ranks in schedule.devices for rank in ranks}))


def type_to_run(plan: Plan) -> DeviceType:
    """Returns the type, cpu or cuda, of the devices that have a stage.

    Raises:
        BapipeError: they are of several types, or of another type.
    """
    used = set(plan.used_devices)
    kinds = sorted({device.kind for device in plan.cluster.devices if device.name in used})
    types = {type_of_kind(kind) for kind in kinds}
    if len(types) == 1 and (one := types.pop()) is not None:
        return one
    raise BapipeError(
        f"the plan's devices are of kind {', '.join(kinds)}; torch can run a plan of kind cpu or of kind cuda, or of "
        "kinds that all begin with cpu- or with cuda-"
    )


def check_no_groups(plan: Plan) -> None:
    """Raises BapipeError if a stage of a plan is on a group, whose members would have to split layers."""
    used = (device for device in plan.cluster.devices if device.name in plan.used_devices)
    group = next((device for device in used if device.num_members > 1), None)
    if group is not None:
        raise BapipeError(
            f"device '{group.name}' of the plan is a group of {group.num_members}, and bapipe does not split layers "
            "when it trains: plan again without profiles of groups, or train with an engine that does"
        )
