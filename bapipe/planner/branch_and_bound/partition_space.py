"""Describes for the certificate what searches for partitions cover: schedules, orders of devices and so on."""

from collections.abc import Sequence

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import num_layers
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules
from bapipe.planner.results.searched_space import GIVEN_ORDER, PartitionSpace, on_first_devices
from bapipe.simulator.tied_weights import inseparable_layers


def partition_space(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    *,
    stage_counts: tuple[int, int],
    device_counts: tuple[int, int],
    device_order: str,
    has_unlike_cuts: bool = False,
) -> PartitionSpace:
    """Returns the space that a search with some options covers.

    Args:
        stage_counts, device_counts: the minimum and the maximum number; `options.num_stages` takes precedence.
        device_order: in which orders devices are taken, in words.
        has_unlike_cuts: whether profiles disagree about the bytes at cuts; see `disagree_at_cuts`.
    """
    stages = options.num_stages
    return PartitionSpace(
        num_layers=num_layers(profiles),
        num_devices=len(cluster.devices),
        stage_counts=(stages, stages) if stages else stage_counts,
        device_counts=device_counts,
        device_order=device_order,
        microbatch_sizes=tuple(microbatch_sizes(profiles, cluster, options)),
        schedules=tuple(named_schedules(options)),
        replicas=options.replicas,
        recompute=options.recompute,
        constraints=tuple(options.constraints),
        memory=options.memory,
        has_unlike_cuts=has_unlike_cuts,
        has_inseparable=has_inseparable(profiles),
    )


def has_inseparable(profiles: ProfilesByKind) -> bool:
    """Returns whether there are layers that no cut may part."""
    return any(True for _ in inseparable_layers(next(iter(profiles.values())).layers))


def disagree_at_cuts(profiles: ProfilesByKind, cluster: Cluster, sizes: Sequence[int]) -> bool:
    """Returns whether the profiles of the cluster's kinds of devices have unequal output bytes at any of some sizes."""
    used = [profiles[kind] for kind in dict.fromkeys(device.kind for device in cluster.devices)]
    outputs = (tuple(tuple(m.output_bytes for m in profile.at(size)) for profile in used) for size in sizes)
    return len(used) > 1 and any(len(set(each)) > 1 for each in outputs)


def line_space(
    profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions, orders: Sequence[str] = (GIVEN_ORDER,)
) -> PartitionSpace:
    """Returns the space of plans on the first devices of some orders, described in words.

    Each stage of such a plan takes consecutive devices.
    """
    from bapipe.planner.branch_and_bound.space import has_sorted_devices  # not at the top: these load numpy
    from bapipe.planner.stages.placements import most_stages

    are_sorted = has_sorted_devices(profiles, cluster, options)
    num_devices = len(cluster.devices)
    return partition_space(
        profiles,
        cluster,
        options,
        stage_counts=(1, min(most_stages(named_schedules(options), num_devices), num_layers(profiles))),
        device_counts=(1, num_devices),
        device_order=on_first_devices(orders, are_sorted=are_sorted) if num_devices > 1 else "",
    )
