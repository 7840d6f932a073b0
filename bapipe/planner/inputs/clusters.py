"""Clusters: what a caller gives in place of one, and this machine's devices, with assumed or measured links."""

from numbers import Integral
from reprlib import repr as shortened

from bapipe._optional import require_torch
from bapipe.device_types import type_of_kind
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.inputs.link_catalogue import cluster_like
from bapipe.planner.inputs.validation import check_num_devices
from bapipe.progress import PartsProgress
from bapipe.torchrun import current_job

ASSUMED_LINK = Bandwidth(bytes_per_s=1_600_000_000, latency_ns=200_000)
"""For plans without a measured link: roughly gloo over loopback with messages of 1 to 10 MB, on a small machine."""


def as_cluster(cluster: Cluster | int, profiles: ProfilesByKind) -> Cluster:
    """Returns a cluster as it is, and in place of a number so many devices, as `homogeneous_cluster` does.

    Raises:
        BapipeError: neither a cluster nor a positive number.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, bool) or not isinstance(cluster, Integral) or cluster < 1:
        raise BapipeError(
            f"`cluster` is {shortened(cluster)}: want a number of devices, at least 1, or what "
            "`bapipe.read(path, bapipe.Cluster)` returns"
        )
    num_devices = int(cluster)
    check_num_devices(num_devices)  # before so many are made
    return homogeneous_cluster(profiles, num_devices)


def homogeneous_cluster(profiles: ProfilesByKind, num_devices: int) -> Cluster:
    """Returns devices like the one profiled, all on one host, with links that are assumed.

    Ranks on a CPU share the machine's memory, and have `ASSUMED_LINK` between them. GPUs have the catalogue's link.
    """
    if len(profiles) > 1:
        raise BapipeError(
            f"profiles of several kinds ({', '.join(sorted(profiles))}) need a cluster file that says which device is "
            "of which kind"
        )
    profile = next(iter(profiles.values()))
    device = profile.device
    driven_as = type_of_kind(device.kind)
    if driven_as == "cuda":
        return cluster_like(profile, num_devices)
    memory_bytes = device.memory_bytes // num_devices if driven_as == "cpu" else device.memory_bytes
    return Cluster(
        devices=tuple(
            Device(name=f"{device.kind}{i}", host="host0", kind=device.kind, memory_bytes=memory_bytes)
            for i in range(num_devices)
        ),
        intra_host=ASSUMED_LINK,
        inter_host=ASSUMED_LINK,
    )


def local_cluster(num_devices: int | None, kind: str) -> Cluster:
    """Returns this machine's devices of a kind, the link between them measured."""
    require_torch()
    from bapipe.profiler.cluster import cluster

    return cluster(num_devices, kind)


def probed_cluster(num_devices: int | None, kind: str, tell: PartsProgress) -> Cluster:
    """Returns this machine's devices, or those of the current torchrun job, with measured links.

    Raises:
        BapipeError: this machine lacks the devices, or `num_devices` was given in a torchrun job.
        RunFailed: the links cannot be measured.
    """
    require_torch()
    from bapipe.profiler.cluster import check_devices
    from bapipe.profiler.probe import probe_here, probe_job

    if (job := current_job()) is None:
        return probe_here(check_devices(num_devices, kind), kind)
    if num_devices is not None:
        raise BapipeError("`num_devices` with torchrun: the job's ranks are the devices; leave it out")
    return probe_job(job, kind, tell)
