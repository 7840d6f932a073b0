"""Whether devices with two stages each can have all layers within a time, by dynamic programmes, compiled.

For `device_loads.py`, which has the limit of a device and its proof. Each device in turn takes a first stage of some
layers in the order of the first stages, and a second one in the order of the second ones. A state behind the first k
devices is how many units (layers between boundaries) each kind of stage has by then, all together.
"""

from typing import NamedTuple

from bapipe.planner.compute.arrays import Ints
from bapipe.planner.compute.compiled import compiled, inlined


class Loads(NamedTuple):
    """What devices do in a step, in ns.

    Attributes:
        first_work, second_work: all work of so many units of first stages, and of second ones, on each device.
            [devices, units + 1]
        first_updates, second_updates: their updates. [devices, units + 1]
        first_late, second_late: their work without the F that run before the device's first backward.
            [devices, units + 1]
        before: what passes before a device acts, by the units of the first stages before its own. [devices, units + 1]
        behind: what follows its last action, by the same. [devices, units + 1]
        trips: what passes before its first backward, but for the backwards of later stages. [devices]
        later_begin, later_end: these, by the units of second stages before the device, and up to it. [units + 1]
        stalls: what else each device must do. [devices]
        num_units: the units that there are.
        most_first, most_second: the most units that all first stages have, and all second ones.
    """

    first_work: Ints
    second_work: Ints
    first_updates: Ints
    second_updates: Ints
    first_late: Ints
    second_late: Ints
    before: Ints
    behind: Ints
    trips: Ints
    later_begin: Ints
    later_end: Ints
    stalls: Ints
    num_units: int
    most_first: int
    most_second: int


@inlined
def _is_within(loads: Loads, limit: int, k: int, a: int, to_a: int, b: int, to_b: int) -> bool:
    """Returns whether device k with first stages from a to `to_a` units, second ones from b, is within a limit."""
    work_ns = loads.first_work[k, to_a] - loads.first_work[k, a] + loads.second_work[k, to_b] - loads.second_work[k, b]
    late_ns = loads.first_late[k, to_a] - loads.first_late[k, a] + loads.second_late[k, to_b] - loads.second_late[k, b]
    update_ns = loads.first_updates[k, to_a] - loads.first_updates[k, a]
    update_ns += loads.second_updates[k, to_b] - loads.second_updates[k, b]
    acted_ns = loads.before[k, a] + loads.stalls[k] + work_ns
    returned_ns = loads.trips[k] + loads.later_begin[b] + loads.later_end[to_b] + late_ns
    is_within: bool = max(acted_ns, returned_ns) + max(update_ns, loads.behind[k, a]) <= limit
    return is_within


@inlined
def _most(loads: Loads, limit: int, k: int, a: int, to_a: int, b: int, to_b: int) -> int:
    """Returns the most units, from b to `to_b`, up to which the second stage of a device can go; `b` must be some."""
    low = b
    while low < to_b:
        middle = (low + to_b + 1) // 2
        if _is_within(loads, limit, k, a, to_a, b, middle):
            low = middle
        else:
            to_b = middle - 1
    return low


@compiled
def reach_every_state(loads: Loads, limit: int, is_open: Ints) -> bool:
    """Returns whether all devices can be within a limit, each of their stages with a unit or more.

    Args:
        is_open: filled: 1 for the states behind each number of devices that can be reached, else 0.
            [devices + 1, most_first + 1, most_second + 1]
    """
    num = len(loads.first_work)
    is_open[:] = 0
    is_open[0, 0, 0] = 1
    for k in range(num):
        left = num - 1 - k  # devices behind, whose stages need a unit each
        for a in range(k, loads.most_first - left):
            for b in range(k, loads.most_second - left):
                if not is_open[k, a, b]:
                    continue
                to_b = min(loads.most_second - left, loads.num_units - 2 * left - a - 1)
                if to_b <= b or not _is_within(loads, limit, k, a, a + 1, b, b + 1):
                    continue
                to_b = _most(loads, limit, k, a, a + 1, b, to_b)
                for to_a in range(a + 1, loads.most_first - left + 1):
                    to_b = min(to_b, loads.num_units - 2 * left - to_a)
                    while to_b > b and not _is_within(loads, limit, k, a, to_a, b, to_b):
                        to_b -= 1
                    if to_b <= b:
                        break
                    # From b + 1 to `to_b`: first as differences, which are summed below.
                    is_open[k + 1, to_a, b + 1] += 1
                    if to_b < loads.most_second:
                        is_open[k + 1, to_a, to_b + 1] -= 1
        for a in range(loads.most_first + 1):
            num_ways = 0
            for b in range(loads.most_second + 1):
                num_ways += is_open[k + 1, a, b]
                is_open[k + 1, a, b] = 1 if num_ways > 0 else 0
    is_reached = False
    for a in range(loads.num_units - loads.most_second, loads.most_first + 1):
        is_reached |= is_open[num, a, loads.num_units - a] > 0
    return is_reached


@compiled
def trace_states(loads: Loads, limit: int, is_open: Ints, states: Ints) -> None:
    """Finds the states behind each number of devices, of some plan within the limit that was asked about last.

    Args:
        is_open: as `reach_every_state` has filled it.
        states: filled. [devices + 1, 2]
    """
    num = len(loads.first_work)
    for a in range(loads.num_units - loads.most_second, loads.most_first + 1):
        if is_open[num, a, loads.num_units - a]:
            states[num, 0], states[num, 1] = a, loads.num_units - a
    for k in range(num - 1, -1, -1):
        to_a, to_b = states[k + 1]
        for a in range(k, to_a):
            for b in range(k, to_b):
                if is_open[k, a, b] and _is_within(loads, limit, k, a, to_a, b, to_b):
                    states[k, 0], states[k, 1] = a, b


@compiled
def reach_furthest(loads: Loads, limit: int, missing: int, furthest: Ints, origin: Ints) -> bool:
    """Returns whether all devices can be within a limit if stages may have no units, and some units may be missing.

    Then of two states with equal first stages the one with more units of second stages leaves a part of what the other
    leaves, so one number for each end of first stages is enough.

    Args:
        furthest: filled with the most units of second stages; -1 where a state cannot be reached.
            [devices + 1, most_first + 1]
        origin: filled with the units of first stages before. [devices + 1, most_first + 1]
    """
    num = len(loads.first_work)
    furthest[:] = -1
    furthest[0, 0] = 0
    for k in range(num):
        for a in range(loads.most_first + 1):
            b = furthest[k, a]
            if b < 0 or not _is_within(loads, limit, k, a, a, b, b):
                continue
            to_b = _most(loads, limit, k, a, a, b, loads.most_second)
            for to_a in range(a, loads.most_first + 1):
                while to_b >= b and not _is_within(loads, limit, k, a, to_a, b, to_b):
                    to_b -= 1
                if to_b < b:
                    break
                if to_b > furthest[k + 1, to_a]:
                    furthest[k + 1, to_a] = to_b
                    origin[k + 1, to_a] = a
    is_reached = False
    for a in range(loads.most_first + 1):
        is_reached |= furthest[num, a] >= 0 and a + furthest[num, a] >= loads.num_units - missing
    return is_reached
