"""What a certificate says of searches for partitions: which schedules, orders of devices and so on they cover."""

from collections.abc import Mapping, Sequence

from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.profiles import num_layers
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules
from bapipe.planner.results.searched_space import GIVEN_ORDER, PartitionSpace, on_first_devices


def partition_space(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    stage_counts: tuple[int, int],
    device_counts: tuple[int, int],
    device_order: str,
    has_unlike_cuts: bool = False,
) -> PartitionSpace:
    """Returns the space of some options; see `PartitionSpace`."""
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
    )


def disagree_at_cuts(profiles: Mapping[str, ModelProfile], cluster: Cluster, sizes: Sequence[int]) -> bool:
    """Returns whether kinds of a cluster's devices have other bytes of outputs at one of some micro-batch sizes."""
    used = [profiles[kind] for kind in dict.fromkeys(device.kind for device in cluster.devices)]
    outputs = (tuple(tuple(m.output_bytes for m in profile.at(size)) for profile in used) for size in sizes)
    return len(used) > 1 and any(len(set(each)) > 1 for each in outputs)


def line_space(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions, orders: Sequence[str] = (GIVEN_ORDER,)
) -> PartitionSpace:
    """Returns the space of plans whose stages take the first devices of a cluster in some orders, given in words."""
    from bapipe.planner.branch_and_bound.space import has_sorted_devices  # these load numpy
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
