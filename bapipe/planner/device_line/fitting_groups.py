"""Stages for tight memory, of any numbers of devices and layers: of those that fit, with the least busy replica.

A dynamic programme over devices and boundaries. What a stage holds depends on its devices, its layers and on how many
devices there are in all, and not on other stages.
"""

import numpy as np

from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.stage_memory import StageMemory
from bapipe.simulator.interval_costs import prefix_sums

MAX_TRIED = 100_000_000
"""So many stages are tried at most, in half a second or so; otherwise none are known."""

REACHED = 1 / 4
"""Of all that there are, about so many are tried, as the others begin where none can end."""

MAX_SINGLE, GROWTH = 8, 1.25
"""A stage has each number of devices up to the first one, and then those that grow by the second."""


def fitting_groups(line: DeviceLine, schedule: str, memory: StageMemory, microbatch_size: int) -> LinePlan | None:
    """Returns stages that fit as far as is known without a table of actions, None if no such ones are known.

    Where plans with one stage per device are forbidden by constraints, none are known.
    """
    if not line.allows_all:
        return None
    from bapipe.planner.device_line.fitting_programme import fitting_stages

    num_devices, num = len(line.cluster.devices), len(line.cuts)
    sizes = _sizes(min(num_devices, memory.num_microbatches) if line.options.replicas else 1)
    layers = memory.at_boundaries(line)
    alone = memory.room(line, schedule, num_devices, ((device, 1) for device in range(num_devices)))
    held = layers.state + layers.stash
    lengths = np.searchsorted(held, held + alone.limit.max(), side="right") - np.arange(num)
    if num_devices * len(sizes) * int(lengths.sum()) > MAX_TRIED / REACHED:
        return None
    forward, work, speeds = _times(line, microbatch_size)
    origins = np.zeros((num_devices + 1, num, 2), dtype=np.int64)
    at = fitting_stages(
        layers,
        alone,
        line.options.recompute,
        forward,
        work,
        speeds,
        np.array(sizes),
        memory.room(line, schedule, num_devices, [(0, 1)]),
        np.empty((num_devices + 1, num)),
        origins,
        MAX_TRIED,
    )
    if at == 0:
        return None
    ends, counts = [num - 1], list[int]()
    while ends[-1] > 0:
        before, boundary = origins[at, ends[-1]].tolist()
        counts.append(at - before)
        ends.append(boundary)
        at = before
    return LinePlan(
        cuts=tuple(line.cuts[end] for end in reversed(ends)),
        counts=tuple(reversed(counts)),
        schedule=schedule,
        microbatch_size=microbatch_size,
    )


def _sizes(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + 1 if sizes[-1] < MAX_SINGLE else int(sizes[-1] * GROWTH)))
    return sizes


def _times(line: DeviceLine, microbatch_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """F, and F and B, of the layers before each boundary on the first kind of device; and the speeds of all devices."""
    sums = {}
    for kind in {device.kind for device in line.cluster.devices}:
        measured = line.profiles[kind].at(microbatch_size)
        forward = prefix_sums([m.forward_ns for m in measured])[line.cuts].astype(float)
        sums[kind] = forward, forward + prefix_sums([m.whole_backward_ns for m in measured])[line.cuts]
    forward, work = sums[line.cluster.devices[0].kind]
    speeds = [device.speed * work[-1] / sums[device.kind][1][-1] for device in line.cluster.devices]
    return forward, work, np.array(speeds)
