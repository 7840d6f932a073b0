"""The cost of a stage: the sums over its layers on each of its replicas."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import accumulate, chain, pairwise

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement
from bapipe.formats.profile import ModelProfile, ProfilesByKind
from bapipe.formats.stage_plan import StagePlan
from bapipe.simulator.cuts import Cut, check_layers, find_cuts, kept_tensor_bytes
from bapipe.simulator.groups import check_members, check_replicas, check_tied_weights
from bapipe.simulator.lanes import with_lanes
from bapipe.simulator.layer_totals import LayerTotals, layer_totals, sum_totals
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.tied_weights import TiedWeightCost, TiedWeights
from bapipe.units import at_speed

BUCKET_BYTES = 25 * 2**20
"""Minimum gradients in an all-reduce, except the last one; the default of torch's DistributedDataParallel."""


def build_stages(
    stages: Sequence[StagePlan], profiles: ProfilesByKind, cluster: Cluster, microbatch_size: int
) -> tuple[Stage, ...]:
    """Returns the cost of every stage, from the profiles by device kind.

    Sizes of tensors and of buckets come from the profile of the stage's first device.

    Raises:
        InvalidModel: the stages do not have exactly the profiles' layers, or a tensor would flow to an earlier stage.
        BapipeError: a device kind without a profile, or with one of another number of members; a micro-batch size
            outside the measured ones; groups of unlike sizes as replicas, or with tied weights.
    """
    index = cluster.index
    devices = [[cluster.devices[index[name]] for name in stage.devices] for stage in stages]
    views: dict[str, _ProfileView] = {}
    for device in (device for group in devices for device in group):
        if device.kind not in profiles:
            raise BapipeError(
                f"no profile for devices of kind '{device.kind}'; given: {', '.join(sorted(profiles)) or 'none'}"
            )
        check_members(device, profiles[device.kind])
        if device.kind not in views:
            check_layers(stages, profiles[device.kind])
            views[device.kind] = _ProfileView(profiles[device.kind], microbatch_size)
    for s, replicas in enumerate(devices):
        check_replicas(s, replicas)
        check_tied_weights(chain.from_iterable(devices), profiles[replicas[0].kind].layers)
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.layers}
    # The cuts before and behind each stage; nothing is sent to the first one. [stages + 1]
    cuts = {kind: [Cut(), *find_cuts(view.layers, stage_of)] for kind, view in views.items()}
    costed = tuple(
        _stage(stage, group, views, *cuts[group[0].kind][s : s + 2])
        for s, (stage, group) in enumerate(zip(stages, devices, strict=True))
    )
    return with_lanes(costed, devices) if any(d.side_by_side for d in cluster.devices) else costed


class _ProfileView:
    """A profile at one micro-batch size."""

    def __init__(self, profile: ModelProfile, microbatch_size: int) -> None:
        self.layers = tuple(zip(profile.layers, profile.at(microbatch_size), strict=True))
        self.by_name = {layer.name: (layer, measured) for layer, measured in self.layers}
        self.position = {name: i for i, name in enumerate(self.by_name)}
        self.tied_weights = TiedWeights(profile.layers)


def _stage(
    stage: StagePlan,
    devices: Sequence[Device],
    views: Mapping[str, _ProfileView],
    entry: Cut,
    cut: Cut,
) -> Stage:
    """Returns a stage; `entry` and `cut` are the cuts before and behind it."""
    names = sorted(stage.layers, key=lambda name: -views[devices[0].kind].position[name])
    layers = [views[devices[0].kind].by_name[name][0] for name in names]
    buckets = fill_buckets([layer.summed_bytes(has_replicas=len(devices) > 1) for layer in layers])
    recomputed = frozenset(stage.recomputed)
    ends = tuple(end for end, _ in buckets)
    kinds = list(dict.fromkeys(device.kind for device in devices))
    tied = {kind: views[kind].tied_weights.cost_of(set(stage.layers)) for kind in kinds}
    cost_of = {
        kind: stage_cost_by_speed(
            [views[kind].by_name[name] for name in names],
            recomputed,
            ends,
            tied[kind],
            sends_gradient=entry.num_gradients > 0,
        )
        for kind in kinds
    }
    return Stage(
        costs=tuple(cost_of[device.kind](device.speed) for device in devices),
        num_members=devices[0].num_members,
        send_bytes=cut.send_bytes,
        grad_bytes=cut.grad_bytes,
        input_bytes=entry.send_bytes,
        input_grad_bytes=entry.grad_bytes,
        bucket_bytes=tuple(num_bytes for _, num_bytes in buckets),
        group_bucket_bytes=group_bucket_bytes(ends, [layer.group_gradient_bytes for layer in layers]),
        tied_gradients=tied[devices[0].kind].gradients,
        recompute=stage.recompute,
        kept_tensor_bytes=None
        if len(recomputed) in (0, len(names))
        else kept_tensor_bytes(views[devices[0].kind].layers, names, recomputed),
    )


def fill_buckets(gradient_bytes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns (end, bytes) of each all-reduce bucket, for layers given last to first.

    The bucket is full when the first `end` of the given layers have their gradients.
    """
    buckets: list[tuple[int, int]] = []
    end = filled = 0
    for num_layers, num_bytes in enumerate(gradient_bytes, start=1):
        if num_bytes:
            end, filled = num_layers, filled + num_bytes
        if filled >= BUCKET_BYTES:
            buckets.append((end, filled))
            filled = 0
    return (*buckets, (end, filled)) if filled else tuple(buckets)


def group_bucket_bytes(bucket_ends: Sequence[int], group_gradient_bytes: Sequence[int]) -> tuple[int, ...]:
    """Returns the bytes of each bucket that the members of a group sum; empty if there are none.

    `group_gradient_bytes` are those of the layers, last to first, as in `fill_buckets`.
    """
    if not any(group_gradient_bytes):
        return ()
    return tuple(sum(group_gradient_bytes[begin:end]) for begin, end in pairwise([0, *bucket_ends]))


def stage_cost_by_speed(
    layers: Sequence[tuple[LayerProfile, LayerMeasurement]],
    recomputed: AbstractSet[str],
    bucket_ends: Sequence[int],
    tied: TiedWeightCost,
    *,
    sends_gradient: bool,
) -> Callable[[float], StageCost]:
    """Returns the cost of layers, given last to first, on a device of any speed; O(layers), then O(buckets) a speed.

    Args:
        recomputed: the names of the layers that are recomputed.
        bucket_ends: `bucket_ends[b]` layers, from the last one, have their gradients when bucket b is full.
        sends_gradient: whether a tensor with a gradient crosses the cut before the layers.
    """
    totals = [layer_totals(layer, measured) for layer, measured in layers]
    again = [of for (layer, _), of in zip(layers, totals, strict=True) if layer.name in recomputed]
    in_buckets = [sum_totals(totals[begin:end]) for begin, end in pairwise([0, *bucket_ends])]
    last_layers = tuple(accumulate(in_buckets, lambda before, bucket: sum_totals((before, bucket))))
    every, recomputed_layers = sum_totals(totals), sum_totals(again)
    workspace_bytes = max(measured.workspace_bytes for _, measured in layers)

    @cache
    def cost_of(speed: float) -> StageCost:
        return cost_of_totals(
            every,
            workspace_bytes,
            last_layers,
            speed=speed,
            recomputed=recomputed_layers,
            tied=tied,
            sends_gradient=sends_gradient,
        )

    return cost_of


def cost_of_totals(
    layers: LayerTotals,
    workspace_bytes: int,
    last_layers: Iterable[LayerTotals],
    *,
    speed: float,
    recomputed: LayerTotals,
    tied: TiedWeightCost,
    sends_gradient: bool,
) -> StageCost:
    """Returns the cost of layers on a device of some speed. Times are rounded once per stage, not per layer.

    Args:
        workspace_bytes: the maximum over the layers.
        last_layers: for each bucket of gradients, the layers from which on all gradients before it are done.
        recomputed: the sums over the layers that are recomputed.
        sends_gradient: whether a tensor with a gradient crosses the cut before the layers.
    """

    # Only the device's own work depends on its speed, neither its host nor the links among the members of a group do.
    def device_ns(total_ns: int, exchange_ns: int) -> int:
        return at_speed(total_ns - exchange_ns, speed) + exchange_ns

    def input_grad_ns(of: LayerTotals) -> int:
        return device_ns(of.input_grad_ns, of.input_grad_exchange_ns)

    def own_weight_grad_ns(of: LayerTotals) -> int:
        return device_ns(of.weight_grad_ns, of.weight_grad_exchange_ns)

    recomputed_ns = device_ns(recomputed.forward_ns, recomputed.forward_exchange_ns)  # before each B, or before each I
    param_bytes = layers.param_bytes + tied.param_bytes

    # The host enqueues an action's kernels while the device runs them: the action takes as long as the slower of both.
    def backward_ns(
        of: LayerTotals, again_ns: int = recomputed_ns, host_again_ns: int = recomputed.host_forward_ns
    ) -> int:
        split_ns = input_grad_ns(of) + own_weight_grad_ns(of)
        whole_ns = device_ns(of.backward_ns, of.backward_exchange_ns) if of.num_measured_backward else split_ns
        return max(again_ns + whole_ns, host_again_ns + of.host_backward_ns)

    def weight_grad_ns(of: LayerTotals) -> int:
        if not sends_gradient:  # nothing waits for I, so a run leaves the whole backward to W
            return backward_ns(of, 0, 0)
        return max(own_weight_grad_ns(of), of.host_weight_grad_ns)

    sent = layers if sends_gradient else LayerTotals()
    is_measured = layers.num_measured_backward or layers.has_host_times
    return StageCost(
        forward_ns=max(device_ns(layers.forward_ns, layers.forward_exchange_ns), layers.host_forward_ns),
        input_grad_ns=max(recomputed_ns + input_grad_ns(sent), recomputed.host_forward_ns + sent.host_input_grad_ns),
        weight_grad_ns=weight_grad_ns(layers),
        whole_backward_ns=backward_ns(layers) if is_measured else None,
        update_ns=at_speed(layers.update_ns + tied.update_ns, speed),
        param_bytes=param_bytes,
        frozen_bytes=param_bytes - layers.gradient_bytes - tied.gradient_bytes,
        optimizer_bytes=layers.optimizer_bytes + tied.optimizer_bytes,
        stash_bytes=layers.stash_bytes,
        recomputed_bytes=recomputed.stash_bytes,
        gradient_stash_bytes=layers.gradient_stash_bytes if sends_gradient else 0,
        workspace_bytes=workspace_bytes,
        gradient_done_ns=tuple((backward_ns(last), weight_grad_ns(last)) for last in last_layers),
    )
