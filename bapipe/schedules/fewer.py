"""A table for fewer micro-batches, by leaving the others out of a larger table."""

from bapipe.schedules.table import Schedule


def first_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Returns the schedule without the micro-batches from `num_microbatches` on.

    Micro-batches need nothing of one another, so what is legal stays so, and no action starts later.
    """
    return Schedule(
        devices=schedule.devices,
        num_microbatches=num_microbatches,
        order=tuple(
            tuple(action for action in actions if action.microbatch < num_microbatches) for actions in schedule.order
        ),
    )
