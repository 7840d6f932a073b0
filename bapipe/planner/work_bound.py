"""A lower bound on the step of every plan for a cluster and a mini-batch, from the work alone; no search is needed."""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import floor

from bapipe.formats.cluster import Cluster
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
    kinds = dict.fromkeys(device.kind for device in cluster.devices)
    times_ns = {kind: _layer_times_ns(profiles[kind], size, num_microbatches) for kind in kinds}
    # A device of speed v takes 1/v of the times at speed 1.
    speed = {(device.kind, device.speed): Fraction(str(device.speed)) for device in cluster.devices}
    price = {(kind, v): 1 / max(sum(times_ns[kind]) / speed[kind, v], Fraction(1)) for kind, v in speed}
    # The least price of a nanosecond at speed 1 on a device of each kind.
    least = {kind: min(price[key] / speed[key] for key in speed if key[0] == kind) for kind in kinds}
    if len(kinds) == 1:
        ((kind, times),) = times_ns.items()
        work = sum(times) * least[kind]
    else:
        priced = [[least[kind] * time_ns for time_ns in times] for kind, times in times_ns.items()]
        work = sum((min(of_layer) for of_layer in zip(*priced, strict=True)), start=Fraction(0))
    # Times are rounded once per stage and phase, so each action may be half a nanosecond shorter than its layers.
    lost_ns = Fraction(PHASES_PER_MICROBATCH * num_microbatches * len(next(iter(times_ns.values()))), 2)
    rounded = max((price[kind, v] for kind, v in speed if v != 1.0), default=Fraction(0)) * lost_ns
    num_alike = Counter((device.kind, device.speed) for device in cluster.devices)
    total_price = sum((num * price[key] for key, num in num_alike.items()), start=Fraction(0))
    return (work - rounded) / total_price


def _layer_times_ns(profile: ModelProfile, size: int, num_microbatches: int) -> list[int]:
    """Returns the work of each layer in a step on a device of speed 1: all micro-batches, and one update."""
    measured = zip(profile.layers, profile.at(size), strict=True)
    return [
        num_microbatches * (m.forward_ns + min(m.whole_backward_ns, m.input_grad_ns + m.weight_grad_ns))
        + layer.update_ns
        for layer, m in measured
    ]
