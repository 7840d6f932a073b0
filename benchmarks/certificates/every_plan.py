"""The fastest plan of a small problem, by trying every one."""

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations

from bapipe.planner.inputs.validation import microbatch_sizes
from bapipe.schedules import SCHEDULES
from bapipe.simulator.tied_weights import legal_cuts
from benchmarks.certificates.judge import HandPlan, Judge


def least_step_ns(judge: Judge) -> int | None:
    """Returns the shortest step time, None if no plan fits."""
    return min((ns for plan in every_plan(judge) if (ns := judge.step_ns(plan)) is not None), default=None)


def every_plan(judge: Judge) -> Iterator[HandPlan]:
    """Yields each plan: all cuts, all devices in all orders, the schedules and micro-batch sizes of the options."""
    options = judge.options
    without_replicas = [not layer.allows_replicas for layer in next(iter(judge.profiles.values())).layers]
    boundaries = legal_cuts(next(iter(judge.profiles.values())).layers)
    for size in microbatch_sizes(judge.profiles, judge.cluster, options):
        for schedule in options.schedules:
            for groups in _groups(judge, schedule, options.minibatch_size // size):
                num_stages = judge.num_stages(schedule, groups)
                if options.num_stages not in (None, num_stages):
                    continue
                for inner in combinations(boundaries, num_stages - 1):
                    cuts = (0, *inner, len(judge.names))
                    if schedule in SCHEDULES and any(
                        len(group) > 1 and any(without_replicas[begin:end])
                        for group, (begin, end) in zip(groups, pairwise(cuts), strict=True)
                    ):
                        continue
                    yield HandPlan(schedule=schedule, microbatch_size=size, groups=groups, cuts=cuts)


def _groups(judge: Judge, schedule: str, num_microbatches: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Some devices in some order, cut into stages of at most one device per micro-batch."""
    most = num_microbatches if judge.options.replicas and schedule in SCHEDULES else 1
    for num_devices in range(1, len(judge.cluster.devices) + 1):
        for ranks in permutations(range(len(judge.cluster.devices)), num_devices):
            for num_cuts in range(num_devices):
                for inner in combinations(range(1, num_devices), num_cuts):
                    groups = tuple(ranks[begin:end] for begin, end in pairwise((0, *inner, num_devices)))
                    if max(map(len, groups)) <= most:
                        yield groups
