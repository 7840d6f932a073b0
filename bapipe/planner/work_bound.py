"""A lower bound on the step of every plan for a cluster and a mini-batch, from the work alone; no search is needed."""

from collections.abc import Mapping
from fractions import Fraction
from math import floor

from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.profile import ModelProfile
from bapipe.planner.options import PlanOptions
from bapipe.planner.validation import microbatch_sizes

PHASES_PER_MICROBATCH = 3
"""F, I and W: how often a stage's time for a micro-batch is rounded."""

WORK_BOUND = "all work of a step shared by all devices"
"""How a certificate names this bound."""


def work_bound_ns(profiles: Mapping[str, ModelProfile], cluster: Cluster, minibatch_size: int) -> int:
    """Returns a time that no step can beat, of any stages, schedule, replicas and micro-batch size of the profiles.

    Let t(l, d) be the time of layer l's work of a step on device d, and let each device have a price p(d) > 0. A step
    of T nanoseconds has at most T on each device, so T * sum_d p(d) >= sum_l min_d p(d) t(l, d), whatever runs where.
    The prices are the devices' speeds, which makes the bound total work / total speed for devices of one kind.
    Recomputation, transfers and waiting only add to it. It is the smallest over the micro-batch sizes.
    """
    sizes = microbatch_sizes(profiles, cluster, PlanOptions(minibatch_size=minibatch_size))
    return max(0, min(floor(_bound_at(profiles, cluster, size, minibatch_size // size)) for size in sizes))


def _bound_at(profiles: Mapping[str, ModelProfile], cluster: Cluster, size: int, num_microbatches: int) -> Fraction:
    """Returns the bound for micro-batches of one size."""
    devices = {(device.kind, device.speed): device for device in cluster.devices}  # the distinct ones
    times_ns = {key: _layer_times_ns(profiles[d.kind], d, size, num_microbatches) for key, d in devices.items()}
    price: dict[tuple[str, float], Fraction] = {
        key: 1 / max(sum(times, start=Fraction(0)), Fraction(1)) for key, times in times_ns.items()
    }
    priced = [[price[key] * time_ns for time_ns in times] for key, times in times_ns.items()]
    # Times are rounded once per stage and phase, so each action may be half a nanosecond shorter than its layers.
    lost_ns = Fraction(PHASES_PER_MICROBATCH * num_microbatches * len(next(iter(times_ns.values()))), 2)
    rounded = max((price[key] for key, d in devices.items() if d.speed != 1.0), default=Fraction(0)) * lost_ns
    total_price: Fraction = sum((price[device.kind, device.speed] for device in cluster.devices), start=Fraction(0))
    work: Fraction = sum((min(of_layer) for of_layer in zip(*priced, strict=True)), start=Fraction(0))
    return (work - rounded) / total_price


def _layer_times_ns(profile: ModelProfile, device: Device, size: int, num_microbatches: int) -> list[Fraction]:
    """Returns the work of each layer in a step on a device: all micro-batches, and one update."""
    measured = zip(profile.layers, profile.at(size), strict=True)
    speed = Fraction(str(device.speed))
    return [
        (num_microbatches * (m.forward_ns + min(m.whole_backward_ns, split_ns)) + layer.update_ns) / speed
        for layer, m in measured
        for split_ns in [m.input_grad_ns + m.weight_grad_ns]
    ]
