"""The profile of a group, estimated from that of a single device: compute is shared, and exchanges are added."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.estimates.exchange import Members, Part
from bapipe.estimates.member_layer import MemberLayer
from bapipe.estimates.member_memory import LayerMemory, layer_memories, stash_bytes, workspace_bytes
from bapipe.estimates.split_layers import split_layers, with_samples
from bapipe.formats.cluster import Bandwidth, Cluster
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import ESTIMATE, ModelProfile, Split
from bapipe.units import round_half_up


def estimate(
    profile: ModelProfile,
    split: Split,
    num_members: int,
    cluster: Cluster,
    *,
    whole: Collection[str] = (),
    kind: str | None = None,
) -> ModelProfile:
    """Returns the profile of groups of `num_members` devices that split the layers of a profile of single devices.

    Args:
        cluster: groups of that kind, or single devices of the profile's kind, whose slowest link counts.
        whole: names of layers that every member computes whole.
        kind: the kind of the groups, if it is another than that of the devices.

    Raises:
        BapipeError: the profile or the cluster is not of single devices, a layer cannot be split so, or the profile
            lacks the shapes of its layers.
    """
    _check(profile, split, num_members, whole)
    name = profile.device.kind if kind is None else kind
    members = Members(num=num_members, links=_links(cluster, profile.device.kind, name, num_members))
    layers = split_layers(profile.layers, split, num_members, whole)
    memories = layer_memories(profile)
    measurements = tuple(
        _measurement(profile.layers, shares, memories, measurement, members)
        for measurement in profile.measurements
        if (size := measurement.microbatch_size) >= num_members or split != "sharded"
        for shares in [with_samples(layers, size, num_members) if split == "sharded" else layers]
    )
    if not measurements:
        raise BapipeError(
            f"the profile has micro-batches of at most {profile.microbatch_sizes[-1]} samples, fewer than the "
            f"{num_members} members that share them: profile larger micro-batches, or use fewer members"
        )
    text = f"estimated, not measured: {split} split of the profile of one {profile.device.kind} over {num_members}"
    return replace(
        profile,
        device=replace(profile.device, kind=name, members=num_members, split=split),
        environment=profile.environment | {ESTIMATE: text},
        layers=tuple(map(_layer, profile.layers, layers, _shared_shares(profile.layers, layers))),
        measurements=measurements,
    )


def check_whole(profile: ModelProfile, whole: Collection[str]) -> None:
    """Raises BapipeError if a name of those that every member computes whole is of no layer."""
    names = {layer.name for layer in profile.layers}
    for name in whole:
        if name not in names:
            raise BapipeError(f"`whole` names '{name}', which is no layer of {profile.model}")


def _check(profile: ModelProfile, split: Split, num_members: int, whole: Collection[str]) -> None:
    if profile.device.num_members > 1:
        raise BapipeError("the profile is of a group already: estimate from a profile of single devices")
    if num_members < 2:
        raise BapipeError(f"a group of {num_members}: want two or more members")
    check_whole(profile, whole)
    if split == "sharded" and whole:
        raise BapipeError("members that share samples compute no layer `whole`: leave it out, or use another split")
    if split != "sharded" and all(layer.shape is UNSET for layer in profile.layers):
        raise BapipeError(
            f"the profile of {profile.model} lacks `shape`, the planes, channels and windows of its layers, which a "
            f"{split} split needs: profile the model again, or use the split 'sharded'"
        )


def _links(cluster: Cluster, device_kind: str, kind: str, num_members: int) -> tuple[Bandwidth, ...]:
    """The distinct links among the members of every group that an estimate of groups of a kind may stand for.

    These are the cluster's groups of that kind; else those that single devices form, on each host as many as follow one
    another; else the cluster's groups of as many members.
    """
    groups = [rank for rank, device in enumerate(cluster.devices) if device.num_members == num_members]
    of_kind = [rank for rank in groups if cluster.devices[rank].kind == kind]
    if of_kind:
        return _distinct(cluster.member_links(rank) for rank in of_kind)
    ranks_on: dict[str, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        if device.kind == device_kind and device.num_members == 1:
            ranks_on.setdefault(device.host, []).append(rank)
    together = [
        ranks[begin : begin + num_members]
        for ranks in ranks_on.values()
        for begin in range(0, len(ranks) - num_members + 1, num_members)
    ]
    if together:
        return _distinct(cluster.links_among(ranks) for ranks in together)
    if groups:
        return _distinct(cluster.member_links(rank) for rank in groups)
    counted = ", ".join(f"{host} has {len(ranks)}" for host, ranks in ranks_on.items()) or "there is none"
    raise BapipeError(
        f"the members of a group are on one host, and no host of the `cluster` has {num_members} devices of kind "
        f"'{device_kind}': {counted}; use fewer members"
    )


def _distinct(links: Iterable[Sequence[Bandwidth]]) -> tuple[Bandwidth, ...]:
    return tuple(dict.fromkeys(link for each in links for link in each))


def _layer(layer: LayerProfile, member: MemberLayer, shared: Fraction) -> LayerProfile:
    """What a member holds of a layer's parameters and buffers; `shared`: its share of what another layer counts."""
    gradient_bytes = _part(layer.gradient_bytes, member.weight_share)
    param_bytes = _part(layer.param_bytes - member.whole_bytes, member.weight_share) + member.whole_bytes
    return replace(
        layer,
        param_bytes=param_bytes,
        trained_bytes=_part_if_set(layer.trained_bytes, member.weight_share),
        # What is left beside the parameters, so that parts that are rounded up are no more than their sum.
        buffer_bytes=UNSET
        if layer.buffer_bytes is UNSET
        else param_bytes - _part(layer.weight_bytes, member.weight_share),
        optimizer_state_bytes=_part(layer.optimizer_state_bytes, member.weight_share),
        update_ns=round_half_up(layer.update_ns * member.weight_share),
        shared_bytes=_part(layer.shared_bytes, shared),
        shared_trained_bytes=_part_if_set(layer.shared_trained_bytes, shared),
        group_sum_bytes=gradient_bytes if member.sums_gradients else 0,
    )


def _shared_shares(layers: Sequence[LayerProfile], members: Sequence[MemberLayer]) -> list[Fraction]:
    """For each layer, the share of the weights of the layer that counts those it shares."""
    index = {layer.name: i for i, layer in enumerate(layers)}
    shares = []
    for layer in layers:
        owners = [index[name] for name in layer.shares if not layers[index[name]].shared_bytes]
        shares.append(members[min(owners)].weight_share if layer.shared_bytes and owners else Fraction(1))
    return shares


def _measurement(
    layers: Sequence[LayerProfile],
    members: Sequence[MemberLayer],
    memories: Sequence[LayerMemory],
    measurement: Measurement,
    group: Members,
) -> Measurement:
    tensor_bytes = {
        tensor: num_bytes
        for layer, measured in zip(layers, measurement.layers, strict=True)
        for tensor, num_bytes in zip(layer.outputs, measured.output_bytes, strict=True)
    }
    return replace(
        measurement,
        layers=tuple(
            _measured(measured, member, memory, group, tensor_bytes)
            for measured, member, memory in zip(measurement.layers, members, memories, strict=True)
        ),
    )


def _measured(
    measured: LayerMeasurement,
    member: MemberLayer,
    memory: LayerMemory,
    group: Members,
    tensor_bytes: Mapping[str, int],
) -> LayerMeasurement:
    """What a member does of a layer for a micro-batch, with what it exchanges."""

    def share_ns(ns: int) -> int:
        return round_half_up(ns * member.share)

    exchange_ns: dict[Part, int] = {"forward": 0, "input_grad": 0, "weight_grad": 0}
    for exchange in member.exchanges:
        exchange_ns[exchange.part] += group.exchange_ns(exchange, tensor_bytes)
    backward_ns = exchange_ns["input_grad"] + exchange_ns["weight_grad"]
    whole_ns = measured.backward_ns
    return replace(
        measured,
        forward_ns=share_ns(measured.forward_ns) + exchange_ns["forward"],
        input_grad_ns=share_ns(measured.input_grad_ns) + exchange_ns["input_grad"],
        weight_grad_ns=share_ns(measured.weight_grad_ns) + exchange_ns["weight_grad"],
        backward_ns=UNSET if whole_ns is UNSET else share_ns(whole_ns) + backward_ns,
        stash_bytes=stash_bytes(measured, memory, member, tensor_bytes),
        gradient_stash_bytes=_part_if_set(measured.gradient_stash_bytes, member.stash_share),
        workspace_bytes=workspace_bytes(measured, memory, member, tensor_bytes),
        output_bytes=tuple(_part(num_bytes, member.output_share) for num_bytes in measured.output_bytes),
        spread=UNSET,
        forward_exchange_ns=exchange_ns["forward"],
        backward_exchange_ns=backward_ns,
    )


def _part(num_bytes: int, share: Fraction) -> int:
    """The bytes of a share, rounded up."""
    return ceil(num_bytes * share)


def _part_if_set(num_bytes: int | UnsetType, share: Fraction) -> int | UnsetType:
    return UNSET if num_bytes is UNSET else _part(num_bytes, share)
