"""What the orders of schedules with one stage per device say about the forwards and backwards of a device."""

from collections.abc import Callable, Mapping

from bapipe.errors import BapipeError
from bapipe.schedules import SCHEDULES, splits_backwards
from bapipe.simulator.in_flight import InFlight

FORWARDS_FIRST = ("gpipe", "gpipe-2bp")
"""Schedules in which all F of a device come before its first backward."""

IN_FLIGHT: Mapping[str, Callable[[int], int]] = {
    "1f1b": lambda behind: behind,
    "1f1b-2bp": lambda behind: behind,
    "zb-h1": lambda behind: behind,
    "1f1b+1": lambda behind: min(behind + 1, 2 * behind - 1),
    "1f1b+2": lambda behind: min(behind + 2, 2 * behind - 1),
    "eager-1f1b": lambda behind: 2 * behind - 1,
    "fbp-as": lambda behind: 2 * behind - 1,
    "zb-h2": lambda behind: 2 * behind - 1,
    "2f2b": lambda behind: 2 * behind,
}
"""The micro-batches in flight at a stage, if there are so many, by the number of stages from it on. With d in flight, F
of micro-batch m + d runs after r of m, which is its B or I; on the first stage, if W is separate, also after W of m."""

WEIGHTS_BEHIND_FORWARDS = ("1f1b-2bp",)
"""Of these, schedules in which all W of a device run after its last F instead."""

IN_PAIRS = ("2f2b",)
"""Of these, schedules in which F and r of a device do not take turns after its first r."""

LATE: Mapping[str, Callable[[int, int], int]] = {
    "zb-h1": lambda before, num_microbatches: before,
    "zb-h2": lambda before, num_microbatches: 2 * before,
    "1f1b-2bp": lambda before, num_microbatches: num_microbatches,
}
"""Of these, how many W wait while F are left, by the number of stages before a stage and that of micro-batches."""

WEIGHTS_LAST = ("gpipe-2bp",)
"""Schedules in which all I of a device come before its first W."""


def check_is_described(schedule: str) -> None:
    """Raises BapipeError for a schedule with one stage per device of which the tables of this module say nothing."""
    if schedule in SCHEDULES and schedule not in FORWARDS_FIRST and schedule not in IN_FLIGHT:
        raise BapipeError(
            f"planning does not know how many micro-batches are in flight under the schedule '{schedule}': add it to "
            "FORWARDS_FIRST or IN_FLIGHT in bapipe/planner/device_line/in_flight.py"
        )


def most_held(schedule: str, num_before: int, num_behind: int, num_microbatches: int, num_replicas: int) -> InFlight:
    """Returns the micro-batches that a replica of a stage holds at most, all numbers at the same time.

    Args:
        num_before: the devices before the stage.
        num_behind: the devices from the stage on.
    """
    if schedule in FORWARDS_FIRST:
        kept, in_backward = num_microbatches, num_microbatches if schedule in WEIGHTS_LAST else 1
    else:
        depth = min(num_microbatches, IN_FLIGHT[schedule](num_behind))
        late = LATE[schedule](num_before, num_microbatches) if schedule in LATE else 0
        late = min(late, num_microbatches - depth)
        kept, in_backward = depth + late, late + 1
    kept, in_backward = -(-kept // num_replicas), -(-in_backward // num_replicas)
    return InFlight(kept, in_backward, in_backward if splits_backwards(schedule) else 0)
