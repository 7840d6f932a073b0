"""Stages for tight memory, of any numbers of devices and layers, that fit and minimize the busiest replica's work.

A dynamic programme over devices and boundaries. What a stage holds depends on its devices, its layers and on how many
devices there are in all, and not on other stages.
"""

import numpy as np

from bapipe.planner.device_line.layer_sums import LayerSums
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.line_memory import LineMemory

MAX_TRIED = 100_000_000
"""The maximum number of stages that are tried, in about half a second; with more there is no result."""

REACHED = 1 / 4
"""The approximate part of all stages that is tried, as the others begin where no stage can end."""

MAX_SINGLE, GROWTH = 8, 1.25
"""A stage may have each number of devices up to `MAX_SINGLE`; larger numbers grow by the factor `GROWTH`."""


def fitting_replicas(line: DeviceLine, schedule: str, memory: LineMemory) -> LinePlan | None:
    """Returns stages that fit as far as is known without a table of actions, None if none are found.

    None are searched for if constraints forbid some plan with one stage per device.
    """
    if not line.allows_all:
        return None
    from bapipe.planner.device_line.fitting_programme import fitting_stages

    num_devices, num = len(line.cluster.devices), len(line.cuts)
    sizes = _sizes(min(num_devices, memory.num_microbatches) if line.options.replicas else 1)
    layers = memory.at_boundaries
    alone = memory.room(line, schedule, num_devices, ((device, 1) for device in range(num_devices)))
    held = layers.state + layers.stash
    lengths = np.searchsorted(held, held + alone.limit.max(), side="right") - np.arange(num)
    if num_devices * len(sizes) * int(lengths.sum()) > MAX_TRIED / REACHED:
        return None
    sums = LayerSums(line, schedule, memory.microbatch_size, num_devices)
    origins = np.zeros((num_devices + 1, num, 2), dtype=np.int64)
    at = fitting_stages(
        layers,
        alone,
        line.options.recompute,
        np.ascontiguousarray(sums.least.forward),
        sums.least.work,
        sums.speeds,
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
        microbatch_size=memory.microbatch_size,
    )


def _sizes(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + 1 if sizes[-1] < MAX_SINGLE else int(sizes[-1] * GROWTH)))
    return sizes
