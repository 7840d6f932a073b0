"""The plans that one would try first: equal shares of the time, or of the bytes, for stages of equally many devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.inputs.scalable_times import scalable_times
from bapipe.planner.stages.equal_replicas import doublings, halves
from bapipe.planner.stages.intervals import IntArray
from bapipe.planner.stages.nearest_cuts import nearest_cuts
from bapipe.planner.stages.placements import num_stages_on, positions_of_stages
from bapipe.schedules import SCHEDULES
from bapipe.simulator.interval_costs import prefix_sums

ROUNDED = 1 - 1e-6
"""Times are rounded once per action, so a step may be a little shorter than the sums over its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NaiveShape:
    """A plan without its cuts: its schedule, micro-batch size and the number of devices of its stages."""

    schedule: str
    microbatch_size: int
    num_devices: int
    num_replicas: int


def naive_plans(
    line: DeviceLine, schedules: Sequence[str], sizes: Sequence[int], *, for_other_cuts: bool = False
) -> list[tuple[int, LinePlan]]:
    """Returns the naive plans, each with a lower bound of its step time; the smallest bounds first.

    They use all devices, half of them, a quarter and so on, or as many as there are layers or micro-batches: in one
    stage, or in stages of 1, 2, 4 ... devices each. And there are 1, 2, 4 ... stages with as many devices each as all
    devices allow; for a given number of stages also with half as many and so on.

    Args:
        for_other_cuts: whether the caller moves their cuts: then plans by equal shares of the bytes are left out, plans
            whose parameters do not fit are kept, and there are also plans on all devices with each number of stages, as
            far as that makes a difference.
    """
    wanted, max_stages = line.options.num_stages, len(line.cuts) - 1
    plans: dict[LinePlan, int] = {}
    for size in sizes:
        sums = _LayerSums(line, size)
        for shape in (shape for name in schedules for shape in _shapes(line, name, size, is_fine=for_other_cuts)):
            num_stages = _num_stages(shape)
            if num_stages > max_stages or wanted not in (None, num_stages):
                continue
            shares = _shares(line, shape, num_stages)
            of_work = sums.work_of[line.cluster.devices[0].kind]
            for weights in (of_work,) if for_other_cuts else (of_work, sums.held):
                plan = LinePlan(
                    cuts=_even_cuts(line, weights, shares),
                    counts=(shape.num_replicas,) * (shape.num_devices // shape.num_replicas),
                    schedule=shape.schedule,
                    microbatch_size=size,
                )
                if plan not in plans and (for_other_cuts or sums.may_fit(plan)):
                    plans[plan] = sums.bound_ns(plan)
    return sorted(((bound_ns, plan) for plan, bound_ns in plans.items()), key=lambda each: each[0])


class _LayerSums:
    """Sums over the layers before each one, for one micro-batch size. All [layers + 1]

    Attributes:
        work_of: F and B of one micro-batch, by kind of device.
        held: bytes of the layers' state and of what one micro-batch stashes.
    """

    def __init__(self, line: DeviceLine, size: int) -> None:
        self.line, self._num_microbatches = line, line.options.minibatch_size // size
        profiles = {device.kind: line.profiles[device.kind] for device in line.cluster.devices}
        times = {kind: scalable_times(profile, size, line.cluster) for kind, profile in profiles.items()}
        self.work_of = {
            kind: prefix_sums([m.forward_ns + m.min_backward_ns for m in of_kind]) for kind, of_kind in times.items()
        }
        forward = [prefix_sums([m.forward_ns for m in of_kind]) for of_kind in times.values()]
        self._forward = np.min(forward, axis=0) / max(device.speed for device in line.cluster.devices)
        layers = [profile.layers for profile in profiles.values()]
        state = [[x.param_bytes + x.gradient_bytes + x.optimizer_state_bytes for x in of_kind] for of_kind in layers]
        static = np.min(state, axis=0).tolist()  # groups of devices share the layers' bytes
        stashes = [m.stash_bytes for m in profiles[line.cluster.devices[0].kind].at(size)]
        self._static = prefix_sums(static)
        self.held = prefix_sums([own + stash for own, stash in zip(static, stashes, strict=True)])
        gradients = [[layer.gradient_bytes for layer in of_kind] for of_kind in layers]
        self._gradients = prefix_sums(np.min(gradients, axis=0).tolist())
        cluster = line.cluster
        rates = [cluster.intra_host.bytes_per_s, cluster.inter_host.bytes_per_s]
        self._ns_per_byte = 1e9 / max(*rates, *(link.bytes_per_s for link in cluster.links))
        self._speeds = np.array([device.speed for device in line.cluster.devices])
        self._kinds = np.array([device.kind for device in line.cluster.devices])

    def may_fit(self, plan: LinePlan) -> bool:
        """Returns whether parameters, gradients and the optimizer's state fit, if each device has one stage."""
        if plan.schedule not in SCHEDULES:
            return True
        static = np.repeat(np.diff(self._static[list(plan.cuts)]), plan.counts)  # [devices]
        return bool((static <= np.array(self.line.limits[: len(static)])).all())

    def bound_ns(self, plan: LinePlan) -> int:
        """Returns a lower bound on the plan's step: by its work and, with replicas, its all-reduces."""
        stages = None if plan.schedule in SCHEDULES else positions_of_stages(plan.schedule, len(plan.counts))
        begins, ends = np.array(plan.cuts[:-1]), np.array(plan.cuts[1:])
        ranks = np.arange(sum(plan.counts)).reshape(len(plan.counts), -1)  # [stages, replicas]
        if stages is not None:
            ranks = ranks[list(stages)]
        num, replicas = self._num_microbatches, ranks.shape[1]
        per_microbatch = np.zeros(ranks.shape)
        for kind, sums in self.work_of.items():
            is_kind = self._kinds[ranks] == kind
            per_microbatch[is_kind] = ((sums[ends] - sums[begins])[:, None] / self._speeds[ranks])[is_kind]
        busiest = np.maximum(
            -(-num // replicas) * per_microbatch.min(axis=1), num // replicas * per_microbatch.max(axis=1)
        )
        if stages is not None:
            return int(np.bincount(ranks[:, 0], weights=busiest).max() * ROUNDED)
        arrival = self._forward[begins]
        gradients = (
            2 * (replicas - 1) / replicas * (self._gradients[ends] - self._gradients[begins]) * self._ns_per_byte
        )
        last_backward = per_microbatch.max(axis=1)  # all-reduces may run meanwhile
        synced = arrival + np.maximum(busiest, busiest - last_backward + gradients)
        return int(synced.max() * ROUNDED)


def _shapes(line: DeviceLine, schedule: str, size: int, *, is_fine: bool) -> Iterator[NaiveShape]:
    num_microbatches = line.options.minibatch_size // size
    every, max_stages, wanted = len(line.cluster.devices), len(line.cuts) - 1, line.options.num_stages
    if wanted is not None and wanted <= every and schedule in SCHEDULES:
        most = min(every // wanted, num_microbatches) if line.options.replicas else 1
        for num_replicas in halves(most):
            yield NaiveShape(
                schedule=schedule,
                microbatch_size=size,
                num_devices=num_replicas * wanted,
                num_replicas=num_replicas,
            )
    if wanted is None and line.options.replicas and schedule in SCHEDULES:
        every_number = sorted({every // number for number in range(1, every + 1)})
        for num_stages in every_number if is_fine else doublings(min(every, max_stages)):
            num_replicas = min(every // num_stages, num_microbatches)
            yield NaiveShape(
                schedule=schedule,
                microbatch_size=size,
                num_devices=num_replicas * num_stages,
                num_replicas=num_replicas,
            )
    # As many as there are layers, and as there are micro-batches for replicas.
    has_replicas = schedule in SCHEDULES and line.options.replicas
    fewer = _fewer(every) if is_fine and not has_replicas else halves(every)
    for_wanted = (
        [] if wanted is None else [num for num in range(1, every + 1) if num_stages_on(schedule, num) == wanted]
    )
    for num_devices in sorted({*fewer, min(every, max_stages), min(every, num_microbatches), *for_wanted}):
        for num_replicas in doublings(num_devices) if has_replicas else [1]:
            if num_replicas <= num_microbatches and num_devices % num_replicas == 0:
                yield NaiveShape(
                    schedule=schedule, microbatch_size=size, num_devices=num_devices, num_replicas=num_replicas
                )


def _fewer(number: int) -> list[int]:
    """Returns the number, nine tenths of it, nine tenths of that, and so on, down to one."""
    return [number] if number <= 1 else [number, *_fewer(number * 9 // 10)]


def _num_stages(shape: NaiveShape) -> int:
    if shape.schedule in SCHEDULES:
        return shape.num_devices // shape.num_replicas
    return num_stages_on(shape.schedule, shape.num_devices)


def _shares(line: DeviceLine, shape: NaiveShape, num_stages: int) -> IntArray:
    """Returns the relative amount of work that each stage can do in the same time. [stages]"""
    if shape.schedule not in SCHEDULES:
        return np.ones(num_stages)
    speeds = np.array([device.speed for device in line.cluster.devices[: shape.num_devices]])
    slowest: IntArray = speeds.reshape(num_stages, shape.num_replicas).min(axis=1)  # it limits the stage
    return slowest


def _even_cuts(line: DeviceLine, sums: IntArray, shares: IntArray) -> tuple[int, ...]:
    """Returns the allowed cuts closest to those that give each stage its share of a sum; every stage gets a layer."""
    at_cuts = sums[line.cuts]
    targets = np.cumsum(shares)[:-1] / shares.sum() * at_cuts[-1]
    return (line.cuts[0], *(line.cuts[boundary] for boundary in nearest_cuts(at_cuts, targets)), line.cuts[-1])
