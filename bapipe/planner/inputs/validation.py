"""Checks of the planner's inputs: profiles that match the cluster and one another, sums that do not overflow."""

from collections.abc import Collection, Sequence

import msgspec

from bapipe.errors import BapipeError, InvalidFile, did_you_mean
from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.host_times import HostTimes
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile, ProfilesByKind, common_settings
from bapipe.graph.layer_graph import check_connected, of_layers
from bapipe.planner.inputs.options import EVERY_SCHEDULE, SEARCH, PlanOptions
from bapipe.schedules import ALL, LOOPED, SCHEDULES
from bapipe.simulator.groups import check_members, check_same_training, check_tied_weights
from bapipe.simulator.layer_totals import NO_HOST_TIMES

MAX_MICROBATCHES = 1024
"""Maximum number of micro-batches in a step; larger schedules are too large to be useful."""

MAX_DEVICES = 4096
"""Maximum number of devices of a cluster."""

MAX_LAYERS = 20_000
"""Maximum number of layers of a model."""

MAX_FORWARDS = 2**21
"""Maximum number of forwards in a step: stages times micro-batches."""

MAX_SAMPLES = 2**31
"""Maximum number of samples in a step."""

MAX_TOTAL = 2**57
"""Maximum sum of nanoseconds or bytes over all layers and samples: 4.5 years, 144 petabytes."""


def named_schedules(options: PlanOptions) -> list[str]:
    """Returns the names of the schedules to plan with; see `PlanOptions`."""
    return [name for name in options.schedules if name != SEARCH] or list(SCHEDULES)


def names_looped(options: PlanOptions) -> bool:
    """Returns whether a schedule to plan with has several stages on each device."""
    return any(name in LOOPED for name in named_schedules(options))


def unknown_schedule(name: str, known: Collection[str]) -> BapipeError:
    """Returns the error for a schedule that is not among those known."""
    hint = did_you_mean(name.lower(), known)
    return BapipeError(f"unknown schedule '{name}'; choose from {', '.join(known)}{hint}")


def check_schedules(options: PlanOptions) -> None:
    """Raises BapipeError for an unknown schedule."""
    for name in named_schedules(options):
        if name not in ALL:
            raise unknown_schedule(name, (*ALL, EVERY_SCHEDULE, SEARCH))


def check_num_devices(num_devices: int) -> None:
    """Raises BapipeError for more devices than can be planned for."""
    if num_devices > MAX_DEVICES:
        raise BapipeError(f"{num_devices:,} devices: want at most {MAX_DEVICES:,}; plan for a part of them")


def check_inputs(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> None:
    """Raises BapipeError for an unknown schedule, or profiles that do not match the cluster or one another.

    Their settings are compared here, too, though plans are the first to need common ones: before anything is searched.
    """
    check_schedules(options)
    for device in cluster.devices:
        if device.kind not in profiles:
            raise BapipeError(
                f"no profile for device '{device.name}' of kind '{device.kind}'; given: "
                f"{', '.join(sorted(profiles)) or 'none'}; profile the model on such a device, or give a cluster of "
                "devices of a kind that it was profiled on"
            )
        check_members(device, profiles[device.kind])
    check_tied_weights(cluster.devices, next(iter(profiles.values())).layers)
    if options.objective == "throughput" and len({device.num_members for device in cluster.devices}) > 1:
        raise BapipeError("`objective` throughput wants groups of one size: plan for the step time, or use such groups")
    check_num_devices(len(cluster.devices))
    num_layers = max(len(profile.layers) for profile in profiles.values())
    if num_layers > MAX_LAYERS:
        raise BapipeError(
            f"{num_layers:,} layers: want at most {MAX_LAYERS:,}; profile with larger layers: name whole blocks with "
            "`leaf_modules`"
        )
    if options.minibatch_size > MAX_SAMPLES:
        raise BapipeError(f"a mini-batch of {options.minibatch_size:,}: want at most {MAX_SAMPLES:,} samples")
    first = next(iter(profiles.values()))
    for profile in profiles.values():
        _check_connected(profile)
    check_figures(profiles, cluster, options.minibatch_size)
    for profile in profiles.values():
        if (profile.model, _shape(profile)) != (first.model, _shape(first)):
            raise BapipeError(
                f"the profiles of {first.device.kind} and {profile.device.kind} are of different models: "
                "their names, layers or tensors differ"
            )
    common_settings(profiles.values())
    check_same_training([profiles[kind] for kind in dict.fromkeys(device.kind for device in cluster.devices)])


def check_figures(profiles: ProfilesByKind, cluster: Cluster, minibatch_size: int) -> None:
    """Raises BapipeError for times, sizes, links or speeds that are too large or too small to add up over a step."""
    for profile in profiles.values():
        _check_sizes(profile, minibatch_size)
    _check_links(profiles, cluster, minibatch_size)
    _check_speeds(profiles, cluster, minibatch_size)


def _check_sizes(profile: ModelProfile, minibatch_size: int) -> None:
    """Raises InvalidFile if values are too large to add up over a step."""
    times = "forward_ns", "input_grad_ns", "weight_grad_ns", "backward_ns"
    fields = (*times, "stash_bytes", "gradient_stash_bytes", "workspace_bytes")
    for i, measurement in enumerate(profile.measurements):
        for name in fields:
            values = [getattr(layer, name) for layer in measurement.layers]
            _check_sum(profile, values, minibatch_size, f"$.measurements[{i}].layers", name)
        for name in HostTimes.__struct_fields__:
            host_ns = [0 if layer.host is msgspec.UNSET else getattr(layer.host, name) for layer in measurement.layers]
            _check_sum(profile, host_ns, minibatch_size, f"$.measurements[{i}].layers", f"host.{name}")
        outputs = [sum(layer.output_bytes) for layer in measurement.layers]
        _check_sum(profile, outputs, minibatch_size, f"$.measurements[{i}].layers", "output_bytes")
    for name in ("param_bytes", "optimizer_state_bytes", "update_ns"):
        values = [getattr(layer, name) for layer in profile.layers]
        _check_sum(profile, values, minibatch_size, "$.layers", name)


def _check_connected(profile: ModelProfile) -> None:
    """Raises InvalidFile if layers share no tensor, parameters or model input with the others."""
    index = {layer.name: i for i, layer in enumerate(profile.layers)}
    tied = [(i, *(index[other] for other in layer.shares)) for i, layer in enumerate(profile.layers)]
    readers: dict[str, list[int]] = {}
    for i, layer in enumerate(profile.layers):
        for tensor in layer.inputs:
            readers.setdefault(tensor, []).append(i)
    check_connected(of_layers(profile), [*tied, *readers.values()])


def _check_links(profiles: ProfilesByKind, cluster: Cluster, minibatch_size: int) -> None:
    """Raises InvalidFile if the transfers of a step would take years on a link."""
    if len(cluster.devices) == 1:
        return
    named: list[tuple[str, Bandwidth]] = [("$.intra_host", cluster.intra_host), ("$.inter_host", cluster.inter_host)]
    for i, link in enumerate(cluster.links):
        named.append((f"$.links[{i}]", Bandwidth(bytes_per_s=link.bytes_per_s, latency_ns=link.latency_ns)))
    bytes_per_sample = [
        sum(num_bytes for layer in m.layers for num_bytes in layer.output_bytes) // m.microbatch_size + 1
        for profile in profiles.values()
        for m in profile.measurements
    ]
    param_bytes = max(sum(layer.param_bytes for layer in profile.layers) for profile in profiles.values())
    num_bytes = 2 * (max(bytes_per_sample) * minibatch_size + param_bytes)
    num_messages = 2 * (minibatch_size + len(cluster.devices))
    for path, bandwidth in named:
        if num_messages * bandwidth.latency_ns + num_bytes * 1_000_000_000 // bandwidth.bytes_per_s >= MAX_TOTAL:
            latency_dominates = num_messages * bandwidth.latency_ns >= MAX_TOTAL // 2
            value = (
                f"a latency of {bandwidth.latency_ns:,} ns"
                if latency_dominates
                else f"a bandwidth of {bandwidth.bytes_per_s:,} bytes/s"
            )
            raise InvalidFile(
                f"the cluster: with {value} a step of {minibatch_size} samples could take more than four years; check "
                "the unit",
                f"{path}.{'latency_ns' if latency_dominates else 'bytes_per_s'}",
            )


def _check_sum(
    profile: ModelProfile, values: Sequence[int | msgspec.UnsetType], minibatch_size: int, path: str, name: str
) -> None:
    """Raises InvalidFile if the sum of some values is too large for a whole mini-batch."""
    known = [0 if value is msgspec.UNSET else value for value in values]
    if sum(known) * minibatch_size >= MAX_TOTAL:
        max_value = max(known)
        raise InvalidFile(
            f"the profile of {profile.model} on {profile.device.kind}: {max_value:,} is too much to add up over a "
            f"mini-batch of {minibatch_size}; check the unit",
            f"{path}[{known.index(max_value)}].{name}",
        )


def _check_speeds(profiles: ProfilesByKind, cluster: Cluster, minibatch_size: int) -> None:
    """Raises BapipeError if a step would take years on a device."""
    longest_ns = {kind: _longest_step_ns(profile, minibatch_size) for kind, profile in profiles.items()}
    for device in cluster.devices:
        if longest_ns.get(device.kind, 0) / device.speed >= MAX_TOTAL:
            raise BapipeError(
                f"device '{device.name}' of speed {device.speed:g} would take more than four years for a step: check "
                "its speed, and the profile's times"
            )


def _longest_step_ns(profile: ModelProfile, minibatch_size: int) -> int:
    """The step time on one device of speed 1, with the measured micro-batch size that takes the longest."""
    update_ns = sum(layer.update_ns for layer in profile.layers)
    return update_ns + max(
        sum(map(_longest_ns, measurement.layers)) * minibatch_size // measurement.microbatch_size
        for measurement in profile.measurements
    )


def _longest_ns(layer: LayerMeasurement) -> int:
    """The time of F and the backward of a layer, as B or as I and W, each on the device or on the host."""
    host = NO_HOST_TIMES if layer.host is msgspec.UNSET else layer.host
    apart_ns = max(layer.input_grad_ns, host.input_grad_ns) + max(layer.weight_grad_ns, host.weight_grad_ns)
    whole_ns = max(layer.whole_backward_ns, host.backward_ns)
    return max(layer.forward_ns, host.forward_ns) + max(apart_ns, whole_ns)


def microbatch_sizes(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> list[int]:
    """Returns the micro-batch sizes to search, ascending.

    Raises:
        BapipeError: no size that divides the mini-batch is within the profiled ones.
    """
    minibatch_size, fixed_size = options.minibatch_size, options.microbatch_size
    used = [profiles[kind] for kind in sorted({device.kind for device in cluster.devices})]
    if fixed_size is not None and minibatch_size % fixed_size:
        raise BapipeError(f"a mini-batch of {minibatch_size} does not divide into micro-batches of {fixed_size}")
    low = max(profile.microbatch_sizes[0] for profile in used)
    high = min(profile.microbatch_sizes[-1] for profile in used)
    divisors = [minibatch_size // num for num in range(1, MAX_MICROBATCHES + 1) if minibatch_size % num == 0]
    sizes = sorted(size for size in divisors if low <= size <= high and fixed_size in (None, size))
    if not sizes:
        too_small = [
            size
            for size in range(low, min(high, minibatch_size // MAX_MICROBATCHES) + 1)
            if minibatch_size % size == 0 and fixed_size in (None, size)
        ]
        if too_small:
            raise BapipeError(
                f"a mini-batch of {minibatch_size} is {minibatch_size // too_small[-1]} micro-batches of "
                f"{too_small[-1]}; want at most {MAX_MICROBATCHES}: choose a smaller `minibatch_size`, or profile "
                "larger micro-batches"
            )
        known = "; ".join(f"{p.device.kind}: {', '.join(map(str, p.microbatch_sizes))}" for p in used)
        if fixed_size is not None:
            raise InvalidFile(
                f"micro-batches of {fixed_size} are not within those profiled ({known}): choose another "
                "`microbatch_size`, or profile more sizes",
                "$.measurements",
            )
        raise InvalidFile(
            f"no micro-batch size divides the mini-batch of {minibatch_size} and lies within those profiled ({known}): "
            "change `minibatch_size`, or profile more sizes",
            "$.measurements",
        )
    num_microbatches = minibatch_size // sizes[-1]
    check_num_forwards(options.num_stages or 1, num_microbatches)
    return sizes


def check_num_forwards(num_stages: int, num_microbatches: int) -> None:
    """Raises BapipeError for a step of more actions than are ordered and simulated."""
    if num_stages * num_microbatches > MAX_FORWARDS:
        raise BapipeError(
            f"{num_stages:,} stages of {num_microbatches:,} micro-batches: want at most {MAX_FORWARDS:,} forwards in a "
            "step; choose fewer stages, or larger micro-batches"
        )


def _shape(profile: ModelProfile) -> object:
    return [(layer.name, layer.inputs, layer.outputs) for layer in profile.layers]
