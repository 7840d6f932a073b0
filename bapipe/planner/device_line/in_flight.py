"""What the orders of schedules with one stage per device say about the forwards and backwards of a device."""

from collections.abc import Callable, Mapping

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
"""The micro-batches in flight at a stage, if there are so many, by the number of stages from it on. The F of as many
later comes behind the r of each."""

IN_PAIRS = ("2f2b",)
"""Of these, schedules in which F and r of a device do not take turns behind its first r."""
