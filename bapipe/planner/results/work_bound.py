"""Lower bounds on the step of every plan for a cluster and a mini-batch; no search is needed."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import floor, isqrt

from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.planner.inputs.options import SEARCH, PlanOptions
from bapipe.planner.inputs.profiles import num_layers
from bapipe.planner.inputs.scalable_times import scalable_times
from bapipe.planner.inputs.validation import microbatch_sizes, named_schedules
from bapipe.schedules import splits_backwards
from bapipe.units import decimal

PHASES_PER_MICROBATCH = 3
"""F, I and W: how often a stage's time for a micro-batch is rounded."""

WORK_BOUND = "all work of a step shared by all devices"
"""How a certificate names this bound."""


def work_bound_ns(profiles: ProfilesByKind, cluster: Cluster, minibatch_size: int) -> int:
    """Returns a time that no step can beat, of any stages, schedule, replicas and micro-batch size of the profiles.

    Let t(l, d) be the time of layer l's work of a step on device d, and let each device have a price p(d) > 0. A step
    of T nanoseconds has at most T on each device, so T * sum_d p(d) >= sum_l min_d p(d) t(l, d), whatever runs where.
    The prices are the devices' speeds, which makes the bound total work / total speed for devices of one kind.
    Recomputation, transfers and waiting only add to it. It is the smallest over the micro-batch sizes, also of those
    that a search leaves out: small ones that make many micro-batches, and those that some kinds of devices only have.
    """
    of_kind = {kind: profiles[kind].microbatch_sizes for kind in dict.fromkeys(d.kind for d in cluster.devices)}
    bounds = []
    small = [size for size in range(1, isqrt(minibatch_size) + 1) if minibatch_size % size == 0]
    for size in {*small, *(minibatch_size // size for size in small)}:
        devices = tuple(d for d in cluster.devices if of_kind[d.kind][0] <= size <= of_kind[d.kind][-1])
        if devices:
            bounds.append(floor(_bound_at(profiles, cluster, devices, size, minibatch_size // size)))
    return max(0, min(bounds, default=0))


def step_bound_ns(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> int:
    """Returns a time that no step can beat, of any stages, replicas and order of the layers that some options allow.

    It is the work as above, on as many devices as a plan can have, or, if that is longer, the trip of one micro-batch
    through all layers and back, each on the device that is fastest for it; the smallest over the micro-batch sizes.
    docs/algorithm.md, "Any plan", has the proof.
    """
    splits = SEARCH in options.schedules or any(map(splits_backwards, named_schedules(options)))
    waited_for = _layers_waited_for(profiles, cluster) if splits else None
    bounds = []
    for size in microbatch_sizes(profiles, cluster, options):
        num_microbatches = options.minibatch_size // size
        # Every stage has a layer, and every replica a micro-batch.
        most = num_layers(profiles) * (num_microbatches if options.replicas else 1)
        work_ns = _bound_at(profiles, cluster, cluster.devices, size, num_microbatches, most)
        bounds.append(max(work_ns, _trip_at(profiles, cluster, size, waited_for)))
    return max(0, floor(min(bounds)))


def _trip_at(profiles: ProfilesByKind, cluster: Cluster, size: int, waited_for: Sequence[bool] | None) -> Fraction:
    """Returns the least time from the start of a micro-batch's first F to the end of its last backward.

    Args:
        waited_for: whether the I of each layer is certainly on the way back, if some schedule has I and W in place of
            B; None if none has.
    """
    fastest: dict[str, float] = {}
    for device in cluster.devices:
        fastest[device.kind] = max(device.speed, fastest.get(device.kind, 0.0))
    times: list[list[int]] = []  # [kinds, layers]
    for kind in fastest:
        measured = scalable_times(profiles[kind], size, cluster)
        if waited_for is None:
            times.append([m.forward_backward_ns for m in measured])
        else:
            times.append([m.forward_ns + w * m.min_input_grad_ns for m, w in zip(measured, waited_for, strict=True)])
    # A device of speed v takes at least 1/v of these times.
    speeds = [decimal(speed) for speed in fastest.values()]
    if len(times) == 1:
        trip_ns = sum(times[0]) / speeds[0]
    else:
        at_speeds = [[time_ns / speed for time_ns in of_kind] for of_kind, speed in zip(times, speeds, strict=True)]
        trip_ns = sum(map(min, zip(*at_speeds, strict=True)), start=Fraction(0))
    # As in the bound below, each action may be half a nanosecond shorter than its layers.
    is_rounded = any(device.speed != 1.0 for device in cluster.devices)
    return trip_ns - Fraction(PHASES_PER_MICROBATCH * len(times[0]) * is_rounded, 2)


def _layers_waited_for(profiles: ProfilesByKind, cluster: Cluster) -> list[bool]:
    """Returns for each layer whether, by the profiles of all kinds, a gradient goes back from any stage it is in."""
    kinds = sorted({device.kind for device in cluster.devices})
    of_kinds = [has_gradient_to_the_end(profiles[kind].layers) for kind in kinds]
    return [all(of_layer) for of_layer in zip(*of_kinds, strict=True)]


def has_gradient_to_the_end(layers: Sequence[LayerProfile]) -> list[bool]:
    """Returns for each layer whether gradients come to it from every layer whose outputs no other layer uses.

    No such layer lies before a cut that no gradient crosses, in any order of the layers: before that cut would lie
    what its outputs with gradients lead to, and so one of the last layers, of each of which some are behind every cut.
    """
    users: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        for tensor in layer.inputs:
            users.setdefault(tensor, []).append(i)
    ends = [i for i, layer in enumerate(layers) if not any(tensor in users for tensor in layer.outputs)]
    from_ends = [0] * len(layers)  # a bit for each of the ends
    for number, i in enumerate(ends):
        from_ends[i] = 1 << number
    for i in reversed(range(len(layers))):
        for tensor in layers[i].outputs:
            if tensor not in layers[i].no_gradient:
                for user in users.get(tensor, ()):
                    from_ends[i] |= from_ends[user]
    return [bits == (1 << len(ends)) - 1 for bits in from_ends]


def _bound_at(
    profiles: ProfilesByKind,
    cluster: Cluster,
    devices: Sequence[Device],
    size: int,
    num_microbatches: int,
    max_devices: int | None = None,
) -> Fraction:
    """Returns the bound for micro-batches of one size on any `max_devices` of some devices of a cluster, or on all."""
    kinds = dict.fromkeys(device.kind for device in devices)
    times_ns = {kind: _layer_times_ns(profiles[kind], cluster, size, num_microbatches) for kind in kinds}
    # A device of speed v takes at least 1/v of these times.
    speed = {(device.kind, device.speed): decimal(device.speed) for device in devices}
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
    num_alike = Counter((device.kind, device.speed) for device in devices)
    total_price, left = Fraction(0), len(devices) if max_devices is None else max_devices
    for key in sorted(num_alike, key=price.__getitem__, reverse=True):  # no devices have more than the dearest ones
        num = min(num_alike[key], left)
        total_price, left = total_price + num * price[key], left - num
    return (work - rounded) / total_price


def _layer_times_ns(profile: ModelProfile, cluster: Cluster, size: int, num_microbatches: int) -> list[int]:
    """Returns the work of each layer in a step on a device of speed 1: all micro-batches, and one update."""
    measured = zip(profile.layers, scalable_times(profile, size, cluster), strict=True)
    return [num_microbatches * (m.forward_ns + m.min_backward_ns) + layer.update_ns for layer, m in measured]
