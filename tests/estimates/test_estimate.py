"""Estimates of groups: three layers worked out by hand for every split in 1D, 2D and 3D, and what never makes them slower.

The layers: two convolutions with windows of 3, the second with a stride of 2, and a linear layer of all their outputs, on
micro-batches of two samples. A link takes 100 ns, and a nanosecond a byte.
"""

import re
from collections.abc import Sequence
from random import Random

import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.estimates import estimate
from bapipe.estimates.split_planes import halo_of
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import ModelProfile, Split, is_estimate
from tests.builders import chain, devices, profile_of

FIRST = LayerShape(in_channels=4, out_channels=4, in_planes=8, out_planes=8, window=3, padding=1)
SECOND = LayerShape(in_channels=4, out_channels=4, in_planes=8, out_planes=4, window=3, stride=2, padding=1)


def network(axes: int) -> ModelProfile:
    """The three layers; a plane of the first tensor has 16 bytes in 1D, and 8 times as many for each further axis."""
    first_bytes, second_bytes = 8 * 16 * 8 ** (axes - 1), 4 * 16 * 4 ** (axes - 1)
    linear = LayerShape(in_channels=second_bytes // 4, out_channels=10)
    rows = [
        ("first", FIRST, ("x",), 400, (800, 400, 400), first_bytes),
        ("second", SECOND, ("first",), 200, (80, 40, 20), second_bytes),
        ("linear", linear, ("second",), 800, (60, 30, 30), 40),
    ]
    return profile_of(
        "by hand",
        [
            LayerProfile(
                name=name,
                kind="Layer",
                inputs=inputs,
                outputs=(name,),
                param_bytes=params,
                optimizer_state_bytes=2 * params,
                update_ns=params,
                shape=shape,
            )
            for name, shape, inputs, params, _, _ in rows
        ],
        [
            LayerMeasurement(
                forward_ns=f,
                input_grad_ns=i,
                weight_grad_ns=w,
                stash_bytes=num_bytes,
                workspace_bytes=100,
                output_bytes=(num_bytes,),
            )
            for _, _, _, _, (f, i, w), num_bytes in rows
        ],
        microbatch_size=2,
    )


def hosts(num: int = 4, bytes_per_s: int = 10**9, latency_ns: int = 100) -> Cluster:
    return devices(num, bytes_per_s=bytes_per_s, latency_ns=latency_ns)


Row = tuple[tuple[int, int, int], tuple[int, int], int, int, int]
"""F, I and W; of these in F and in B, exchange; bytes of parameters, of gradients that members sum, of the output."""


def by_hand(split: Split, axes: int) -> list[Row]:
    """What two members take and hold of each layer."""
    plane = 16 * 8 ** (axes - 1)
    t, u = 8 * plane, 4 * 16 * 4 ** (axes - 1)  # the bytes of the first and of the second tensor
    half, quarter = 100 + t // 2, 100 + u // 2  # a message with half of either, which gathers it from two members
    match split:
        case "spatial":  # the second reads a plane before its own; the linear layer is whole, of gathered planes
            halo = 100 + plane
            return [
                ((400, 200, 200), (0, 0), 400, 400, t // 2),
                ((40 + halo, 20 + halo, 10), (halo, halo), 200, 200, u // 2),
                ((60 + quarter, 30, 30), (quarter, 0), 800, 0, 40),
            ]
        case "filter":  # each layer gathers its inputs, and each member keeps the sum of its channels' gradients
            return [
                ((400, 200, 200), (0, 0), 200, 0, t // 2),
                ((40 + half, 20 + half, 10), (half, half), 100, 0, u // 2),
                ((30 + quarter, 15 + quarter, 15), (quarter, quarter), 400, 0, 20),
            ]
        case "channel":  # each layer sums its outputs, of which each member keeps a part, and gathers their gradients
            return [
                ((400 + half, 200 + half, 200), (half, half), 200, 0, t // 2),
                ((40 + quarter, 20 + quarter, 10), (quarter, quarter), 100, 0, u // 2),
                ((30 + 120, 15 + 120, 15), (120, 120), 400, 0, 20),
            ]
        case "tensor":  # filters, then channels whose sum every member has, then filters again
            return [
                ((400, 200, 200), (0, 0), 200, 0, t // 2),
                ((40 + 2 * quarter, 20, 10), (2 * quarter, 0), 100, 0, u),
                ((30, 15 + 2 * quarter, 15), (0, 2 * quarter), 400, 0, 20),
            ]
        case "sharded":  # parameters are gathered for F and for the backward, and their gradients summed
            return [
                ((400 + 300, 200 + 300, 200 + 300), (300, 600), 200, 0, t // 2),
                ((40 + 200, 20 + 200, 10 + 200), (200, 400), 100, 0, u // 2),
                ((30 + 500, 15 + 500, 15 + 500), (500, 1000), 400, 0, 20),
            ]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("split", ["tensor", "filter", "channel", "spatial", "sharded"])
def test_estimates_are_those_worked_out_by_hand(split: Split, axes: int) -> None:
    estimated = estimate(network(axes), split, 2, hosts())
    assert (estimated.device.members, estimated.device.split) == (2, split)
    for layer, m, row in zip(estimated.layers, estimated.measurements[0].layers, by_hand(split, axes), strict=True):
        times, exchange, param_bytes, group_bytes, output_bytes = row
        assert (m.forward_ns, m.input_grad_ns, m.weight_grad_ns) == times, layer.name
        assert (m.forward_exchange_ns, m.backward_exchange_ns) == exchange, layer.name
        assert (layer.param_bytes, layer.group_sum_bytes) == (param_bytes, group_bytes), layer.name
        assert (layer.optimizer_state_bytes, layer.update_ns) == (2 * param_bytes, param_bytes), layer.name
        assert m.output_bytes == (output_bytes,), layer.name


@pytest.mark.parametrize(("split", "param_bytes", "buffer_bytes"), [("sharded", 300, 100), ("filter", 250, 50)])
def test_buffers_of_members_that_share_samples_are_whole_and_not_gathered(
    split: Split, param_bytes: int, buffer_bytes: int
) -> None:
    """Of 400 bytes of parameters and 100 of buffers over two members; as with 400 of parameters alone otherwise."""
    profile = network(1)
    first = replace(profile.layers[0], param_bytes=500, trained_bytes=400, buffer_bytes=100)
    made = estimate(replace(profile, layers=(first, *profile.layers[1:])), split, 2, hosts())
    assert (made.layers[0].param_bytes, made.layers[0].buffer_bytes) == (param_bytes, buffer_bytes)
    assert made.layers[0].trained_bytes == 200
    assert made.measurements == estimate(profile, split, 2, hosts()).measurements


def test_memory_of_a_member_that_gathers_its_parameters() -> None:
    """A half, rounded up, of what is kept of the samples, and all 400 bytes of parameters and their gradients."""
    profile = network(1)
    measured = profile.measurements[0]
    first = replace(measured.layers[0], stash_bytes=31, gradient_stash_bytes=17, workspace_bytes=440, backward_ns=701)
    profile = replace(profile, measurements=(replace(measured, layers=(first, *measured.layers[1:])),))
    made = estimate(profile, "sharded", 2, hosts()).measurements[0].layers[0]
    assert (made.stash_bytes, made.gradient_stash_bytes) == (16, 9)
    assert made.workspace_bytes == 400 + 20 + 400
    assert made.backward_exchange_ns == 600  # as by hand above
    assert made.backward_ns == 351 + 600


@pytest.mark.parametrize(("size", "members", "most"), [(5, 4, 2), (3, 2, 2), (5, 2, 3), (8, 4, 2)])
def test_members_that_share_samples_take_as_long_as_the_one_with_the_most(size: int, members: int, most: int) -> None:
    measured = replace(network(1).measurements[0], microbatch_size=size)
    layers = tuple(
        replace(layer, forward_ns=120 * size, stash_bytes=64 * size, output_bytes=(16 * size,))
        for layer in measured.layers
    )
    profile = replace(network(1), measurements=(replace(measured, layers=layers),))
    for layer in estimate(profile, "sharded", members, hosts(members)).measurements[0].layers:
        assert layer.forward_exchange_ns is not UNSET
        assert layer.forward_ns - layer.forward_exchange_ns == 120 * most
        assert (layer.stash_bytes, layer.output_bytes) == (64 * most, (16 * most,))


@pytest.mark.parametrize(("split", "gathered"), [("spatial", 0), ("sharded", 1)])
def test_what_does_not_grow_with_the_samples_is_whole_where_members_split_samples_or_planes(
    split: Split, gathered: int
) -> None:
    """Stashes of 50 bytes and 64 a sample, workspaces of 1,300 and 16: more than one new gradient.

    Micro-batches of 16, listed first, have 4,000 bytes more: those of 2 and 4 count.
    """
    measured = network(1).measurements[0]
    profile = replace(
        network(1),
        measurements=tuple(
            replace(
                measured,
                microbatch_size=size,
                layers=tuple(
                    replace(
                        layer,
                        stash_bytes=50 + 64 * size,
                        workspace_bytes=1300 + 16 * size + 4000 * (size == 16),
                    )
                    for layer in measured.layers
                ),
            )
            for size in (16, 2, 4, 8)
        ),
    )
    made = estimate(profile, split, 2, hosts())
    for layer, member in zip(profile.layers[:2], made.at(8)[:2], strict=True):
        assert member.stash_bytes == 50 + 64 * 4
        assert member.workspace_bytes == 1300 + 16 * 4 + gathered * layer.param_bytes


@pytest.mark.parametrize(
    ("split", "want"),
    [
        ("spatial", (64 + 400, 32 + 64 + 200, 40 + 64 + 800)),  # gradients of the parameters are whole
        ("sharded", (64 + 400 + 400, 32 + 64 + 200 + 200, 20 + 32 + 800 + 800)),  # and gathered parameters
        (
            "filter",
            (64 + 200, 32 + 128 + 100, 20 + 64 + 400),
        ),  # each has a part of the sum that is the inputs' gradient
        ("channel", (128 + 200, 64 + 64 + 100, 40 + 32 + 400)),  # the outputs' gradient is gathered
        (
            "tensor",
            (64 + 200, 64 + 64 + 100, 20 + 64 + 400),
        ),  # the second's outputs are whole, the third's inputs summed
    ],
)
def test_the_workspace_has_the_gradients_that_a_member_makes_and_gets(split: Split, want: tuple[int, ...]) -> None:
    """Tensors of 128, 64 and 40 bytes and parameters of 400, 200 and 800: the gradients of outputs, inputs, parameters."""
    profile = network(1)
    whole = 128 + 400, 64 + 128 + 200, 40 + 64 + 800
    measured = profile.measurements[0]
    layers = tuple(
        replace(layer, workspace_bytes=num_bytes) for layer, num_bytes in zip(measured.layers, whole, strict=True)
    )
    made = estimate(replace(profile, measurements=(replace(measured, layers=layers),)), split, 2, hosts())
    assert tuple(layer.workspace_bytes for layer in made.measurements[0].layers) == want


def test_what_else_is_in_a_workspace_is_shared_as_the_stash_is() -> None:
    """150 bytes beside the gradients of 128, 64 and 200; a workspace that is smaller than these is mostly the whole ones."""
    profile = network(1)
    for workspace_bytes, want in ((392 + 150, 228 + 75), (100, 64 + 18)):
        layers = tuple(replace(layer, workspace_bytes=workspace_bytes) for layer in profile.measurements[0].layers)
        changed = replace(profile, measurements=(replace(profile.measurements[0], layers=layers),))
        assert estimate(changed, "channel", 2, hosts()).measurements[0].layers[1].workspace_bytes == want


def test_members_that_split_samples_gather_the_weights_that_a_layer_shares_and_sum_their_gradients() -> None:
    """A last layer with the 400 bytes of the first one, of which 200 are trained, and none of its own."""
    profile = network(1)
    first = replace(profile.layers[0], shares=("linear",), trained_bytes=200)
    tied = replace(
        profile.layers[2], param_bytes=0, shares=("first",), shared_bytes=400, shared_trained_bytes=200, update_ns=0
    )
    made = estimate(replace(profile, layers=(first, profile.layers[1], tied)), "sharded", 2, hosts())
    layer, measured = made.layers[2], made.measurements[0].layers[2]
    assert (layer.param_bytes, layer.shared_bytes, layer.shared_gradient_bytes) == (0, 200, 100)
    # Messages of 200 bytes for F and for the backward, and one of 100 bytes of gradients.
    assert (measured.forward_exchange_ns, measured.backward_exchange_ns) == (300, 300 + 200)
    # Its workspace of 100 bytes is part of a new gradient.
    assert measured.workspace_bytes == 100 + 400


def test_parts_that_are_rounded_up_are_no_more_than_their_sum() -> None:
    profile = network(1)
    first = replace(profile.layers[0], param_bytes=5, trained_bytes=2, buffer_bytes=2)
    made = estimate(replace(profile, layers=(first, *profile.layers[1:])), "filter", 4, hosts()).layers[0]
    assert (made.param_bytes, made.trained_bytes, made.buffer_bytes) == (2, 1, 1)


def test_members_between_two_others_send_to_one_after_the_other() -> None:
    wide = replace(SECOND, stride=1, out_planes=8)
    profile = network(1)
    layers = (profile.layers[0], replace(profile.layers[1], shape=wide), profile.layers[2])
    two, four = (estimate(replace(profile, layers=layers), "spatial", members, hosts()) for members in (2, 4))
    # A plane of 16 bytes to either side: two members have one neighbour, those in the middle of four have two.
    assert two.measurements[0].layers[1].forward_exchange_ns == 116
    assert four.measurements[0].layers[1].forward_exchange_ns == 2 * 116


@pytest.mark.parametrize(
    ("shape", "members", "want"),
    [
        (LayerShape(in_planes=8, out_planes=8, window=3, padding=1), 4, (1, 1)),
        (LayerShape(in_planes=8, out_planes=4, window=3, stride=2, padding=1), 4, (1, 0)),
        (LayerShape(in_planes=8, out_planes=4, window=2, stride=2), 4, (0, 0)),
        # Seven output planes are three and four: the second member reads from plane 6 on, or 5, and holds 7 to 13.
        (LayerShape(in_planes=14, out_planes=7, window=2, stride=2), 2, (1, 0)),
        (LayerShape(in_planes=14, out_planes=7, window=3, stride=2, padding=1), 2, (2, 0)),
        # Without padding the outputs are fewer: three of six from planes 0 to 4, and from 3 to 7.
        (LayerShape(in_planes=8, out_planes=6, window=3), 2, (1, 1)),
    ],
)
def test_a_member_needs_the_planes_that_it_reads_and_does_not_hold(
    shape: LayerShape, members: int, want: tuple[int, int]
) -> None:
    assert shape.in_planes
    assert shape.out_planes
    assert halo_of(shape, shape.in_planes, shape.out_planes, members) == want


def test_a_batch_norm_sums_over_the_members() -> None:
    norm = LayerShape(in_channels=4, out_channels=4, mixes_channels=False, in_planes=8, out_planes=8, sums_samples=True)
    profile = network(1)
    layers = (profile.layers[0], replace(profile.layers[1], shape=norm), profile.layers[2])
    measured = estimate(replace(profile, layers=layers), "spatial", 2, hosts()).measurements[0].layers[1]
    # Two sums of 4 bytes for each of 4 channels: a ring of two sends two messages of 16 bytes.
    assert (measured.forward_exchange_ns, measured.backward_exchange_ns) == (232, 232)


@pytest.mark.parametrize("split", ["tensor", "filter", "channel", "spatial", "sharded"])
def test_faster_links_fewer_bytes_and_smaller_halos_never_make_an_estimate_slower(split: Split) -> None:
    for seed in range(40):
        random = Random(seed)
        profile, members = network(random.randint(1, 3)), random.choice([2, 4])
        if split == "sharded":
            profile = replace(profile, measurements=(replace(profile.measurements[0], microbatch_size=4),))
        rate, latency = random.randint(10**6, 10**9), random.randrange(1000)
        before = times_of(estimate(profile, split, members, hosts(4, rate, latency)))
        faster = hosts(4, rate + random.randrange(10**9), random.randint(0, latency))
        assert no_slower(times_of(estimate(profile, split, members, faster)), before)
        fewer = with_bytes_divided(profile, random.randint(2, 5))
        assert no_slower(times_of(estimate(fewer, split, members, hosts(4, rate, latency))), before)
        narrow = replace(profile.layers[1], shape=replace(SECOND, window=2, padding=0))
        smaller = replace(profile, layers=(profile.layers[0], narrow, profile.layers[2]))
        assert no_slower(times_of(estimate(smaller, split, members, hosts(4, rate, latency))), before)


def with_bytes_divided(profile: ModelProfile, by: int) -> ModelProfile:
    def fewer(m: LayerMeasurement) -> LayerMeasurement:
        return replace(m, output_bytes=tuple(num_bytes // by for num_bytes in m.output_bytes))

    layers = tuple(replace(layer, param_bytes=layer.param_bytes // by) for layer in profile.layers)
    measurements = tuple(replace(each, layers=tuple(map(fewer, each.layers))) for each in profile.measurements)
    return replace(profile, layers=layers, measurements=measurements)


def times_of(profile: ModelProfile) -> list[int]:
    return [ns for m in profile.measurements[0].layers for ns in (m.forward_ns, m.input_grad_ns, m.weight_grad_ns)]


def no_slower(times_ns: list[int], than_ns: list[int]) -> bool:
    return all(a <= b for a, b in zip(times_ns, than_ns, strict=True))


def test_an_estimate_says_that_it_is_one() -> None:
    profile = network(2)
    estimated = estimate(profile, "spatial", 4, hosts(), kind="four")
    assert is_estimate(estimated)
    assert not is_estimate(profile)
    assert estimated.device.kind == "four"
    assert estimated.environment["estimate"] == "estimated, not measured: spatial split of the profile of one a over 4"


def test_the_links_are_those_among_the_members() -> None:
    cluster = replace(hosts(), inter_host=Bandwidth(bytes_per_s=1, latency_ns=10**9))
    assert estimate(network(1), "filter", 4, cluster) == estimate(network(1), "filter", 4, hosts())


def linked(slow: Sequence[tuple[str, str]], *groups: Device, num_devices: int = 0) -> Cluster:
    """Single devices d0, d1, ... on one host, groups on others, links as in `hosts`, but for some ten times slower."""
    cluster = hosts()
    links = tuple(Link(source=a, target=b, bytes_per_s=10**8, latency_ns=1000) for a, b in slow)
    return replace(cluster, devices=cluster.devices[:num_devices] + groups, links=links)


def group(name: str, kind: str, *members: str) -> Device:
    return Device(name=name, host=name, kind=kind, memory_bytes=10**9, members=members)


FAST, SLOW = (estimate(network(1), "filter", 2, hosts(2, 10**9 // by, 100 * by)).measurements for by in (1, 10))


def test_the_links_are_those_of_the_groups_of_the_kind() -> None:
    a, b = group("A", "a2", "a0", "a1"), group("B", "b2", "b0", "b1")
    for groups in ((a, b), (b, a)):
        cluster = linked([("b1", "b0")], *groups)
        assert estimate(network(1), "filter", 2, cluster, kind="a2").measurements == FAST
        assert estimate(network(1), "filter", 2, cluster, kind="b2").measurements == SLOW
        # Of no kind that the cluster has: the slowest counts.
        assert estimate(network(1), "filter", 2, cluster, kind="c2").measurements == SLOW


def test_the_slowest_link_of_all_groups_of_a_kind_counts() -> None:
    first, second = group("A", "a2", "a0", "a1"), group("B", "a2", "b0", "b1")
    for slow in (("a0", "a1"), ("b0", "b1")):
        assert estimate(network(1), "filter", 2, linked([slow], first, second), kind="a2").measurements == SLOW
    # Groups of single devices: those that follow one another.
    assert estimate(network(1), "filter", 2, linked([("d2", "d3")], num_devices=4)).measurements == SLOW
    assert estimate(network(1), "filter", 2, linked([("d1", "d2")], num_devices=4)).measurements == FAST
    assert estimate(network(1), "filter", 2, linked([("a0", "a1")], first, num_devices=2)).measurements == FAST


def test_layers_that_cannot_be_split_are_named() -> None:
    few = replace(FIRST, in_channels=3)
    profile = network(1)
    rgb = replace(profile, layers=(replace(profile.layers[0], shape=few), *profile.layers[1:]))
    with pytest.raises(BapipeError) as error:
        estimate(rgb, "channel", 4, hosts())
    assert str(error.value) == (
        "layer 'first' has 3 input channels for 4 members: use at most 3 members, or let every member compute it whole, "
        "with `whole` first"
    )
    whole = estimate(rgb, "channel", 4, hosts(), whole=["first"])
    assert (whole.layers[0].param_bytes, whole.measurements[0].layers[0].forward_ns) == (400, 800)
    wide = replace(FIRST, window=7, padding=3)
    with pytest.raises(BapipeError, match=re.escape("its window of 7 needs 3 of a neighbour, which has 2")):
        estimate(with_second(profile, wide), "spatial", 4, hosts())
    with pytest.raises(BapipeError, match="layer 'second' has 2 planes for 4 members: use at most 2 members"):
        estimate(with_second(profile, replace(SECOND, out_planes=2)), "spatial", 4, hosts())
    with pytest.raises(BapipeError, match="micro-batches of at most 2 samples, fewer than the 4 members"):
        estimate(profile, "sharded", 4, hosts())


def with_second(profile: ModelProfile, shape: LayerShape) -> ModelProfile:
    return replace(profile, layers=(profile.layers[0], replace(profile.layers[1], shape=shape), profile.layers[2]))


def test_an_older_profile_is_told_what_it_lacks() -> None:
    with pytest.raises(BapipeError) as error:
        estimate(chain([1, 2]), "filter", 2, hosts())
    assert str(error.value) == (
        "the profile of chain lacks `shape`, the planes, channels and windows of its layers, which a filter split needs: "
        "profile the model again, or use the split 'sharded'"
    )


@pytest.mark.parametrize(
    ("members", "num_devices", "message"),
    [
        (1, 4, "a group of 1: want two or more members"),
        (8, 4, "no host of the `cluster` has 8 devices of kind 'a': h has 4; use fewer members"),
    ],
)
def test_impossible_groups_are_refused(members: int, num_devices: int, message: str) -> None:
    with pytest.raises(BapipeError, match=re.escape(message)):
        estimate(network(1), "spatial", members, hosts(num_devices))


def test_unknown_layers_are_computed_whole() -> None:
    profile = network(1)
    unknown = replace(profile, layers=(profile.layers[0], replace(profile.layers[1], shape=UNSET), profile.layers[2]))
    second = estimate(unknown, "spatial", 2, hosts()).measurements[0].layers[1]
    assert (second.forward_ns, second.input_grad_ns) == (80 + 100 + 64, 40)


def rows_of(
    *rows: tuple[str, tuple[str, ...], LayerShape | UnsetType, tuple[int, int, int], int, int, int],
) -> ModelProfile:
    """A profile from (name, inputs, shape, (F, I, W), bytes of parameters, of the stash, of the output)."""
    template = network(1)
    return replace(
        template,
        layers=tuple(
            replace(template.layers[0], name=name, inputs=inputs, outputs=(name,), shape=shape, param_bytes=params)
            for name, inputs, shape, _, params, _, _ in rows
        ),
        measurements=(
            Measurement(
                microbatch_size=2,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=f, input_grad_ns=i, weight_grad_ns=w, stash_bytes=stash, output_bytes=(output,)
                    )
                    for _, _, _, (f, i, w), _, stash, output in rows
                ),
            ),
        ),
    )


def linear(in_channels: int, out_channels: int, *elementwise: str) -> LayerShape:
    return LayerShape(in_channels=in_channels, out_channels=out_channels, elementwise_inputs=elementwise)


NORM = LayerShape(in_planes=2, out_planes=2)
SUM_64 = 2 * (100 + 32)
"""A sum of 64 bytes over two members: two messages of half of them."""


def test_a_block_of_a_transformer_worked_out_by_hand() -> None:
    """GPT-2's: four sums of the hidden states for each micro-batch, as in Megatron-LM (arXiv:1909.08053, figure 4)."""
    act = LayerShape(in_channels=64, out_channels=64, mixes_channels=False)
    profile = rows_of(
        ("embedding", ("tokens",), UNSET, (10, 0, 10), 640, 0, 64),
        ("norm", ("embedding",), NORM, (10, 20, 6), 8, 64, 64),
        ("qkv", ("norm",), replace(linear(16, 16), heads=4, attends=True), (400, 500, 300), 192, 320, 64),
        ("projection", ("qkv",), linear(16, 16), (100, 60, 40), 64, 64, 64),
        ("residual", ("projection", "embedding"), replace(act, elementwise_inputs=("embedding",)), (4, 2, 0), 0, 0, 64),
        ("up", ("residual",), linear(16, 64), (400, 300, 200), 256, 64, 256),
        ("act", ("up",), act, (8, 4, 0), 0, 256, 256),
        ("down", ("act", "residual"), linear(64, 16, "residual"), (400, 200, 300), 256, 256, 64),
    )
    group = estimate(profile, "tensor", 2, hosts())
    found = {
        layer.name: (
            (m.forward_ns, m.input_grad_ns, m.weight_grad_ns),
            layer.param_bytes,
            m.stash_bytes,
            *m.output_bytes,
        )
        for layer, m in zip(group.layers, group.measurements[0].layers, strict=True)
    }
    assert found == {
        "embedding": ((10, 0, 10), 640, 0, 64),
        "norm": ((10, 20, 6), 8, 64, 64),
        "qkv": ((200, 250 + SUM_64, 150), 96, 64 + 128, 32),  # the input is kept whole, the rest of two heads
        "projection": ((50 + SUM_64, 30, 20), 32, 32, 64),
        "residual": ((4, 2, 0), 0, 0, 64),
        "up": ((200, 150 + SUM_64, 100), 128, 64, 128),
        "act": ((4, 2, 0), 0, 128, 128),
        "down": ((200 + SUM_64, 100, 150), 128, 128, 64),
    }


ACT = LayerShape(in_channels=16, out_channels=16, mixes_channels=False)


def gpt2(num_blocks: int) -> ModelProfile:
    """GPT-2 with 16 hidden channels, 40 words and 8 positions; every tensor has 64 bytes but the scores, 160."""
    times = 40, 40, 40
    rows: list[tuple[str, tuple[str, ...], LayerShape | UnsetType, tuple[int, int, int], int, int, int]] = [
        ("words", ("tokens",), LayerShape(in_channels=40, out_channels=16), times, 2560, 0, 64),
        ("positions", ("words", "tokens"), linear(8, 16, "words", "tokens"), times, 512, 0, 64),
        ("x0", ("positions",), ACT, times, 0, 0, 64),
    ]
    for i in range(num_blocks):
        x, attention, up, norm = f"x{i}", f"attention{i}", f"up{i}", f"norm{i}"
        rows += [
            (norm, (x,), NORM, times, 8, 0, 64),
            (attention, (norm,), replace(linear(16, 16), heads=4, attends=True), times, 192, 0, 64),
            (f"projection{i}", (attention,), linear(16, 16), times, 64, 0, 64),
            (f"middle{i}", (f"projection{i}", x), replace(ACT, elementwise_inputs=(x,)), times, 0, 0, 64),
            (f"dense_{norm}", (f"middle{i}",), NORM, times, 8, 0, 64),
            (up, (f"dense_{norm}",), linear(16, 16), times, 256, 0, 64),
            (f"down{i}", (up,), linear(16, 16), times, 256, 0, 64),
            (
                f"x{i + 1}",
                (f"down{i}", f"middle{i}"),
                replace(ACT, elementwise_inputs=(f"middle{i}",)),
                times,
                0,
                0,
                64,
            ),
        ]
    rows += [
        ("norm", (f"x{num_blocks}",), NORM, times, 8, 0, 64),
        ("head", ("norm",), linear(16, 40), times, 0, 0, 160),
        ("loss", ("head", "target"), UNSET, times, 0, 0, 0),
    ]
    profile = rows_of(*rows)
    words, positions, *others, head, loss = profile.layers
    tied = replace(head, shares=("words",), shared_bytes=2560)
    words, positions = (replace(each, kind="Embedding") for each in (words, positions))
    return replace(profile, layers=(replace(words, shares=("head",)), positions, *others, tied, loss))


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_transformer_exchanges_what_megatron_lm_does(num_blocks: int, members: int) -> None:
    """Shoeybi et al. 2019 (arXiv:1909.08053), section 3: two sums of the hidden states in F and in B for each block.

    Besides them one for the embedding and one for the last layer, whose scores are gathered for a loss of any kind.
    """
    group = estimate(gpt2(num_blocks), "tensor", members, hosts())
    measured = dict(zip((layer.name for layer in group.layers), group.measurements[0].layers, strict=True))

    def ring_ns(num_bytes: int) -> int:
        return (members - 1) * (100 + num_bytes // members)

    hidden_ns = 2 * ring_ns(64)
    in_forward = {"words", *(f"{name}{i}" for name in ("projection", "down") for i in range(num_blocks))}
    in_backward = {"head", *(f"{name}{i}" for name in ("attention", "up") for i in range(num_blocks))}
    assert {name: m.forward_exchange_ns for name, m in measured.items()} == {
        name: ring_ns(160) if name == "loss" else hidden_ns * (name in in_forward) for name in measured
    }
    assert {name: m.backward_exchange_ns for name, m in measured.items()} == {
        name: hidden_ns * (name in in_backward) for name in measured
    }
    words, positions = group.layers[:2]
    assert (words.param_bytes, group.layers[-2].shared_bytes) == (2560 // members, 2560 // members)
    assert positions.param_bytes == 512  # whole, as in Megatron-LM: a part of it would need a sum of its own
    assert measured["words"].output_bytes == (64,)


def test_a_shared_table_is_split_as_the_last_layer_is_also_if_it_is_added_to_another() -> None:
    profile = rows_of(
        ("positions", ("tokens",), linear(8, 16, "tokens"), (40, 0, 40), 512, 0, 64),
        ("words", ("tokens", "positions"), linear(40, 16, "positions"), (40, 0, 40), 2560, 0, 64),
        ("head", ("words",), linear(16, 40), (40, 40, 40), 0, 0, 160),
    )
    positions, words, head = profile.layers
    layers = (
        replace(positions, kind="Embedding"),
        replace(words, kind="Embedding", shares=("head",)),
        replace(head, shares=("words",), shared_bytes=2560),
    )
    group = estimate(replace(profile, layers=layers), "tensor", 2, hosts())
    assert [layer.param_bytes + layer.shared_bytes for layer in group.layers] == [256, 1280, 1280]
    assert [m.forward_exchange_ns for m in group.measurements[0].layers] == [SUM_64, SUM_64, 0]


def test_a_table_with_fewer_rows_than_members_is_whole() -> None:
    profile = rows_of(
        ("kinds", ("x",), LayerShape(in_channels=3, out_channels=16), (40, 0, 40), 192, 0, 64),
        ("head", ("kinds",), linear(16, 16), (40, 40, 40), 64, 0, 64),
    )
    table = replace(profile.layers[0], kind="Embedding")
    group = estimate(replace(profile, layers=(table, profile.layers[1])), "tensor", 4, hosts())
    kinds = group.measurements[0].layers[0]
    assert (group.layers[0].param_bytes, kinds.forward_ns, kinds.forward_exchange_ns) == (192, 40, 0)


def test_queries_keys_and_gates_of_own_layers_stay_apart() -> None:
    """Llama's: queries and keys are read by the layer that attends, and one half of the dense layer by the other.

    As in Megatron-LM, the first layer that reads a tensor sums its gradient, to which the others have added theirs.
    """
    attending = LayerShape(in_channels=16, out_channels=16, heads=2, attends=True)
    profile = rows_of(
        ("x", ("tokens",), UNSET, (10, 0, 10), 640, 0, 64),
        ("q", ("x",), LayerShape(in_channels=16, out_channels=16, heads=2), (40, 40, 40), 64, 64, 64),
        ("k", ("x",), LayerShape(in_channels=16, out_channels=8, heads=2), (20, 20, 20), 32, 64, 32),
        ("v", ("x", "q", "k"), attending, (60, 60, 60), 32, 264, 64),
        ("o", ("v", "x"), linear(16, 16, "x"), (40, 40, 40), 64, 64, 64),
        ("gate", ("o",), linear(16, 24), (40, 40, 40), 96, 64, 96),
        ("up", ("o", "gate"), linear(16, 24, "gate"), (40, 40, 40), 96, 64, 96),
        ("down", ("up", "o"), linear(24, 16, "o"), (40, 40, 40), 96, 96, 64),
    )
    by_tensor = estimate(profile, "tensor", 2, hosts()).measurements[0].layers
    assert [(m.forward_ns, m.input_grad_ns, m.stash_bytes) for m in by_tensor[1:]] == [
        (20, 20 + SUM_64, 64),
        (10, 10, 64),
        (30, 30, 64 + 100),
        (20 + SUM_64, 20, 32),
        (20, 20 + SUM_64, 64),
        (20, 20, 64),
        (20 + SUM_64, 20, 48),
    ]
    by_channel = estimate(profile, "channel", 2, hosts()).measurements[0].layers
    assert [m.forward_ns for m in by_channel[1:4]] == [40, 20, 60]  # each head needs all channels: computed whole


def test_three_heads_between_two_members() -> None:
    attending = LayerShape(in_channels=12, out_channels=12, heads=3, attends=True)
    profile = rows_of(
        ("qkv", ("x",), attending, (90, 0, 90), 36, 0, 48),
        ("projection", ("qkv",), linear(12, 12), (30, 30, 30), 48, 0, 64),
    )
    qkv, projection = estimate(profile, "tensor", 2, hosts()).measurements[0].layers
    assert (qkv.forward_ns, qkv.output_bytes, projection.forward_ns) == (60, (32,), 20 + SUM_64)
    with pytest.raises(BapipeError, match="layer 'qkv' has 3 heads of attention for 4 members: use at most 3"):
        estimate(profile, "tensor", 4, hosts())
