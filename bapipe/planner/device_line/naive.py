"""The plans that everybody would try first: equal shares of the time, or of the bytes, for equal groups of devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.branch_and_bound.intervals import IntArray
from bapipe.planner.deadline import Deadline
from bapipe.planner.device_line.line import DeviceLine, LinePlan, TimedPlan
from bapipe.schedules import ALL, SCHEDULES
from bapipe.simulator.interval_costs import prefix_sums

MIN_TRIED = 3
"""So many plans are tried even after the deadline, those with the fewest actions first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveShape:
    """A plan without its cuts: its schedule, micro-batch size and equal groups of devices."""

    schedule: str
    microbatch_size: int
    num_devices: int
    num_replicas: int


def best_naive(
    line: DeviceLine, schedules: Sequence[str], sizes: Sequence[int], deadline: Deadline
) -> TimedPlan | None:
    """Returns the fastest naive plan that fits of those that the deadline leaves time for, None if there is none."""
    best: TimedPlan | None = None
    for number, plan in enumerate(naive_plans(line, schedules, sizes)):
        if number >= MIN_TRIED and deadline.is_over:
            break
        timed = line.time(plan)
        if timed is not None and (best is None or timed.step_ns < best.step_ns):
            best = timed
    return best


def naive_plans(line: DeviceLine, schedules: Sequence[str], sizes: Sequence[int]) -> Iterator[LinePlan]:
    """Yields the naive plans, those with the fewest actions first.

    On all devices, and half, a quarter and so on: one stage on all, or stages of 1, 2, 4 ... devices each.
    """
    shapes = {shape: _num_stages(shape) for size in sizes for name in schedules for shape in _shapes(line, name, size)}
    wanted, max_stages = line.options.num_stages, len(line.cuts) - 1
    seen = set()

    def num_actions(shape: NaiveShape) -> int:
        return shapes[shape] * (line.options.minibatch_size // shape.microbatch_size)

    for shape in sorted(shapes, key=num_actions):
        if shapes[shape] > max_stages or wanted not in (None, shapes[shape]):
            continue
        for weights in (_time_sums(line, shape.microbatch_size), _byte_sums(line, shape.microbatch_size)):
            plan = LinePlan(
                cuts=_even_cuts(line, weights, _shares(line, shape, shapes[shape])),
                counts=(shape.num_replicas,) * (shape.num_devices // shape.num_replicas),
                schedule=shape.schedule,
                microbatch_size=shape.microbatch_size,
            )
            if plan not in seen:
                seen.add(plan)
                yield plan


def _shapes(line: DeviceLine, schedule: str, size: int) -> Iterator[NaiveShape]:
    num_microbatches = line.options.minibatch_size // size
    every, max_stages = len(line.cluster.devices), len(line.cuts) - 1
    numbers = {every >> halvings for halvings in range(every.bit_length())} - {0} | {min(every, max_stages)}
    for num_devices in sorted(numbers):
        replicas = {1}
        if schedule in SCHEDULES and line.options.replicas:
            replicas |= {1 << power for power in range(num_devices.bit_length())} | {num_devices}
        for num_replicas in sorted(replicas):
            if num_replicas <= num_microbatches and num_devices % num_replicas == 0:
                yield NaiveShape(
                    schedule=schedule, microbatch_size=size, num_devices=num_devices, num_replicas=num_replicas
                )


def _num_stages(shape: NaiveShape) -> int:
    if shape.schedule in SCHEDULES:
        return shape.num_devices // shape.num_replicas
    return ALL[shape.schedule](shape.num_devices, 1).num_stages


def _shares(line: DeviceLine, shape: NaiveShape, num_stages: int) -> IntArray:
    """What each stage can do in the same time, relative to the others. [stages]"""
    if shape.schedule not in SCHEDULES:
        return np.ones(num_stages)
    speeds = np.array([device.speed for device in line.cluster.devices[: shape.num_devices]])
    slowest: IntArray = speeds.reshape(num_stages, shape.num_replicas).min(axis=1)  # it decides how fast a stage is
    return slowest


def _time_sums(line: DeviceLine, size: int) -> IntArray:
    """F and B of one micro-batch before each layer, on the first device's kind. [layers + 1]"""
    profile = line.profiles[line.cluster.devices[0].kind]
    return prefix_sums([m.forward_ns + m.whole_backward_ns for m in profile.at(size)])


def _byte_sums(line: DeviceLine, size: int) -> IntArray:
    """Bytes that layers hold for themselves and one micro-batch, before each layer. [layers + 1]"""
    profile = line.profiles[line.cluster.devices[0].kind]
    return prefix_sums(
        [
            layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes + m.stash_bytes
            for layer, m in zip(profile.layers, profile.at(size), strict=True)
        ]
    )


def _even_cuts(line: DeviceLine, sums: IntArray, shares: IntArray) -> tuple[int, ...]:
    """Returns allowed cuts nearest to those that give each stage its share of a sum; every stage gets a layer."""
    at_cuts = sums[line.cuts].astype(float)
    targets = np.cumsum(shares)[:-1] / shares.sum() * at_cuts[-1]
    nearest = np.searchsorted((at_cuts[1:] + at_cuts[:-1]) / 2, targets)
    # At least one boundary apart, from the left and then from the right. [stages - 1]
    steps = np.arange(len(nearest))
    apart = np.maximum.accumulate(np.maximum(nearest - steps, 1)) + steps
    apart = np.minimum(apart, len(line.cuts) - 1 - len(nearest) + steps)
    return (line.cuts[0], *(line.cuts[boundary] for boundary in apart.tolist()), line.cuts[-1])
