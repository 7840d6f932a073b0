"""The cost of a stage: the sums over its layers on each of its replicas, and the bytes at each of its cuts."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, Protocol

from bapipe.errors import BapipeError, InvalidModel
from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.plan import StagePlan
from bapipe.formats.profile import LayerMeasurement, LayerProfile, ModelProfile
from bapipe.schedules.table import Phase
from bapipe.simulator.groups import check_members, check_replicas, check_tied_weights
from bapipe.simulator.layer_totals import LayerTotals, layer_totals, sum_totals
from bapipe.simulator.tied_weights import TiedGradient, TiedWeightCost, TiedWeights
from bapipe.units import at_speed, round_half_up

BUCKET_BYTES = 25 * 2**20
"""Minimum gradients in an all-reduce, except the last one; the default of torch's DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage on one of its devices, for one micro-batch.

    Attributes:
        forward_ns, input_grad_ns, weight_grad_ns: F, I and W; `input_grad_ns` contains a recomputed F. If the stage
            sends no gradient back, that is all of I, and W all the rest of a backward.
        whole_backward_ns: B, with a recomputed F; None if it is I + W.
        update_ns: the optimizer's update, once a step.
        param_bytes, optimizer_bytes: they live all through the step, as gradients do.
        frozen_bytes: those of `param_bytes` that are not trained, and have no gradients.
        stash_bytes: activations kept from F to the end of the backward of a micro-batch.
        recomputed_bytes: those of the stash that only live during the backward if some layers are recomputed.
        gradient_stash_bytes: what I leaves for W, kept besides from I to the end of W.
        workspace_bytes: the maximum that one of its layers needs while it runs.
        gradient_done_ns: for each bucket, when its last gradient is done after the start of the stage's last B, and
            after the start of its last W.
    """

    forward_ns: int
    input_grad_ns: int
    weight_grad_ns: int
    whole_backward_ns: int | None = None
    update_ns: int = 0
    param_bytes: int = 0
    frozen_bytes: int = 0
    optimizer_bytes: int = 0
    stash_bytes: int = 0
    recomputed_bytes: int = 0
    gradient_stash_bytes: int = 0
    workspace_bytes: int = 0
    gradient_done_ns: tuple[tuple[int, int], ...] = ()

    @property
    def gradient_bytes(self) -> int:
        return self.param_bytes - self.frozen_bytes

    @property
    def backward_ns(self) -> int:
        split_ns = self.input_grad_ns + self.weight_grad_ns
        return split_ns if self.whole_backward_ns is None else self.whole_backward_ns

    @property
    def min_backward_ns(self) -> int:
        """The shorter of B, and I and W."""
        return min(self.backward_ns, self.input_grad_ns + self.weight_grad_ns)

    def ns(self, phase: Phase) -> int:
        """Returns the time of one phase."""
        match phase:
            case Phase.FORWARD:
                return self.forward_ns
            case Phase.BACKWARD:
                return self.backward_ns
            case Phase.INPUT_GRAD:
                return self.input_grad_ns
            case Phase.WEIGHT_GRAD:
                return self.weight_grad_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a pipeline.

    Attributes:
        costs: its cost on each of its replicas, in the order of `Schedule.devices`.
        num_members: the number of members of each of its devices, if they are groups.
        send_bytes, grad_bytes: activations of a micro-batch sent to the next stage, and their gradients sent back; 0
            for the last stage. As all bytes, those of one member.
        input_bytes, input_grad_bytes: activations of a micro-batch that come in, and their gradients sent back, as this
            stage's devices hold them; read only if the stage before has another number of members.
        bucket_bytes: gradients in each all-reduce, in the order in which they are done; empty for a single device.
        group_bucket_bytes: how many of them the members of the devices sum, too; empty for single devices.
        tied_gradients: gradients of tied weights that it sums with other stages.
        recompute: only the stage's input is kept; a whole stash lives during each backward.
        kept_tensor_bytes: if only some layers are recomputed, the tensors that are kept for that; else None.
    """

    costs: tuple[StageCost, ...]
    num_members: int = 1
    send_bytes: int = 0
    grad_bytes: int = 0
    input_bytes: int = 0
    input_grad_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()
    group_bucket_bytes: tuple[int, ...] = ()
    tied_gradients: tuple[TiedGradient, ...] = ()
    recompute: bool = False
    kept_tensor_bytes: int | None = None


def transferred_bytes(before: Stage, after: Stage) -> tuple[int, int]:
    """Returns the activations and the gradients of a micro-batch that one member's link carries between two stages.

    Between groups of unlike sizes it is the larger of what a member sends and what a member receives: the link of the
    smaller group carries it all.
    """
    if before.num_members == after.num_members:
        return before.send_bytes, before.grad_bytes
    return max(before.send_bytes, after.input_bytes), max(before.grad_bytes, after.input_grad_bytes)


def received_bytes(before: Stage, after: Stage) -> int:
    """Returns the activations of a micro-batch that a member of `after` receives from the stage before it."""
    return before.send_bytes if before.num_members == after.num_members else after.input_bytes


def build_stages(
    stages: Sequence[StagePlan], profiles: Mapping[str, ModelProfile], cluster: Cluster, microbatch_size: int
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
    return _with_lanes(costed, devices) if any(d.side_by_side for d in cluster.devices) else costed


def _with_lanes(stages: Sequence[Stage], devices: Sequence[Sequence[Device]]) -> tuple[Stage, ...]:
    """Returns the stages with the costs on the lanes of the devices that run side by side."""
    forward_ns: Counter[str] = Counter()
    backward_ns: Counter[str] = Counter()
    for stage, group in zip(stages, devices, strict=True):
        for device, cost in zip(group, stage.costs, strict=True):
            forward_ns[device.name] += cost.forward_ns
            backward_ns[device.name] += cost.backward_ns

    def on_lanes(device: Device, cost: StageCost) -> StageCost:
        return cost_on_lanes(cost, forward_ns[device.name], backward_ns[device.name]) if device.side_by_side else cost

    return tuple(
        replace(stage, costs=tuple(map(on_lanes, group, stage.costs)))
        for stage, group in zip(stages, devices, strict=True)
    )


def cost_on_lanes(cost: StageCost, forward_ns: int, backward_ns: int) -> StageCost:
    """Returns a cost on a device that shares its compute between two lanes in proportion to these times.

    They are F and B of one micro-batch in all stages of the device. Within a backward, I comes first, then W.
    """
    whole_ns = forward_ns + backward_ns

    def on_lane(ns: int, lane_ns: int) -> int:
        return round_half_up(Fraction(ns * whole_ns, lane_ns)) if lane_ns else ns

    input_grad_ns = on_lane(cost.input_grad_ns, backward_ns)

    def after_input_grad(ns: int) -> int:
        return on_lane(cost.input_grad_ns + ns, backward_ns) - input_grad_ns

    return replace(
        cost,
        forward_ns=on_lane(cost.forward_ns, forward_ns),
        input_grad_ns=input_grad_ns,
        weight_grad_ns=after_input_grad(cost.weight_grad_ns),
        whole_backward_ns=on_lane(cost.backward_ns, backward_ns),
        gradient_done_ns=tuple(
            (on_lane(after_b, backward_ns), after_input_grad(after_w)) for after_b, after_w in cost.gradient_done_ns
        ),
    )


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
    entry: "Cut",
    cut: "Cut",
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


def stage_cost(
    layers: Sequence[tuple[LayerProfile, LayerMeasurement]],
    speed: float,
    recomputed: AbstractSet[str],
    bucket_ends: Sequence[int],
    tied: TiedWeightCost,
    *,
    sends_gradient: bool,
) -> StageCost:
    """Returns the cost of layers on a device of some speed; see `stage_cost_by_speed`."""
    return stage_cost_by_speed(layers, recomputed, bucket_ends, tied, sends_gradient=sends_gradient)(speed)


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
    recomputed_ns = at_speed(recomputed.forward_ns, speed)  # before each B, or before each I
    host_recomputed_ns = at_speed(recomputed.host_forward_ns, speed)
    param_bytes = layers.param_bytes + tied.param_bytes

    # The host enqueues an action's kernels while the device runs them: the action takes as long as the slower of both.
    def backward_ns(of: LayerTotals, again_ns: int = recomputed_ns, host_again_ns: int = host_recomputed_ns) -> int:
        split_ns = at_speed(of.input_grad_ns, speed) + at_speed(of.weight_grad_ns, speed)
        device_ns = at_speed(of.backward_ns, speed) if of.num_measured_backward else split_ns
        return max(again_ns + device_ns, host_again_ns + at_speed(of.host_backward_ns, speed))

    def weight_grad_ns(of: LayerTotals) -> int:
        if not sends_gradient:  # nothing waits for I, so a run leaves the whole backward to W
            return backward_ns(of, 0, 0)
        return at_speed(max(of.weight_grad_ns, of.host_weight_grad_ns), speed)

    input_grad = (layers.input_grad_ns, layers.host_input_grad_ns) if sends_gradient else (0, 0)
    is_measured = layers.num_measured_backward or layers.has_host_times
    return StageCost(
        forward_ns=at_speed(max(layers.forward_ns, layers.host_forward_ns), speed),
        input_grad_ns=max(
            recomputed_ns + at_speed(input_grad[0], speed),
            host_recomputed_ns + at_speed(input_grad[1], speed),
        ),
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


def check_layers(stages: Sequence[StagePlan], profile: ModelProfile) -> None:
    """Raises InvalidModel unless the stages have exactly the profile's layers and no tensor flows backwards."""
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.layers}
    known = {layer.name for layer in profile.layers}
    for name in stage_of:
        if name not in known:
            raise InvalidModel(
                f"the plan's layer '{name}' is not in the profile of {profile.model}: "
                "use the profile that the plan was made from, or plan again"
            )
    for layer in profile.layers:
        if layer.name not in stage_of:
            raise InvalidModel(
                f"the profile's layer '{layer.name}' is in no stage of the plan: "
                "use the profile that the plan was made from, or plan again"
            )
    check_flow(profile.layers, stage_of)


class Layer(Protocol):
    """A layer, profiled or traced, with the tensors that it uses and makes."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


def check_flow(layers: Iterable[Layer], stage_of: Mapping[str, int]) -> None:
    """Raises InvalidModel if a tensor would flow to an earlier stage; layers come in topological order."""
    stage_of_tensor: dict[str, int] = {}
    for layer in layers:
        for tensor in layer.inputs:
            if stage_of_tensor.get(tensor, 0) > stage_of[layer.name]:
                raise InvalidModel(
                    f"tensor '{tensor}' is made in stage {stage_of_tensor[tensor]} but used by '{layer.name}' "
                    f"in stage {stage_of[layer.name]}: stages must follow the flow of the model"
                )
        stage_of_tensor |= dict.fromkeys(layer.outputs, stage_of[layer.name])


class Cut(NamedTuple):
    """What crosses the cut between two stages.

    Attributes:
        send_bytes, grad_bytes: activations of a micro-batch, and their gradients.
        num_gradients: how many of the tensors have a gradient.
    """

    send_bytes: int = 0
    grad_bytes: int = 0
    num_gradients: int = 0


def find_cuts(layers: Sequence[tuple[LayerProfile, LayerMeasurement]], stage_of: Mapping[str, int]) -> list[Cut]:
    """Returns the cut behind each stage; nothing crosses the last one.

    A tensor crosses the cuts between the stage that makes it and the last stage that uses it.
    """
    last_use: dict[str, int] = {}
    for layer, _ in layers:
        for tensor in layer.inputs:
            last_use[tensor] = max(last_use.get(tensor, 0), stage_of[layer.name])
    # What is added at the first cut that a tensor crosses, and taken away behind the last one. [stages]
    send, grad, num_gradients = ([0] * (max(stage_of.values()) + 1) for _ in range(3))
    for layer, measured in layers:
        made = stage_of[layer.name]
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True):
            used = last_use.get(tensor, made)
            if used == made:
                continue
            changes = [(send, num_bytes)]
            if tensor not in layer.no_gradient:
                changes += [(grad, num_bytes), (num_gradients, 1)]
            for change, value in changes:
                change[made] += value
                change[used] -= value
    return [Cut(*values) for values in zip(*map(accumulate, (send, grad, num_gradients)), strict=True)]


def kept_tensor_bytes(
    layers: Sequence[tuple[LayerProfile, LayerMeasurement]], stage: Iterable[str], recomputed: AbstractSet[str]
) -> int:
    """Returns the bytes that a stage keeps of a micro-batch because some of its layers are recomputed.

    They are the tensors that a recomputed layer takes from elsewhere, and those that it makes for the stage's other
    layers, each once. The model's inputs are not counted.
    """
    kept = frozenset(stage) - recomputed
    used_by_recomputed = {tensor for layer, _ in layers if layer.name in recomputed for tensor in layer.inputs}
    used_by_kept = {tensor for layer, _ in layers if layer.name in kept for tensor in layer.inputs}
    return sum(
        num_bytes
        for layer, measured in layers
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True)
        if tensor in (used_by_kept if layer.name in recomputed else used_by_recomputed)
    )
