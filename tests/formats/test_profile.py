"""Profiles between measured micro-batch sizes, and times on devices of other speeds."""

from random import Random
from typing import Any

import numpy
import pytest
from msgspec import UNSET, UnsetType
from msgspec.json import encode
from msgspec.structs import replace

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Bandwidth
from bapipe.formats.host_times import HostTimes
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.simulator.layer_totals import LayerTotals, sum_totals
from bapipe.simulator.stage import StageCost
from bapipe.simulator.stage_cost import cost_of_totals
from bapipe.simulator.tied_weights import TiedWeightCost
from bapipe.units import at_speed
from tests.random_profiles import random_profile


def one_layer(*measured: tuple[int, int]) -> ModelProfile:
    layer = LayerProfile(name="l", kind="Linear", inputs=("x",), outputs=("l",), param_bytes=4, optimizer_state_bytes=4)
    return ModelProfile(
        model="m",
        device=DeviceKind(kind="cpu", name="none", memory_bytes=0),
        dtype="float32",
        optimizer="sgd-momentum",
        layers=(layer,),
        measurements=tuple(
            Measurement(
                microbatch_size=size,
                layers=(
                    LayerMeasurement(
                        forward_ns=ns, input_grad_ns=ns, weight_grad_ns=ns, stash_bytes=ns, output_bytes=(ns,)
                    ),
                ),
            )
            for size, ns in measured
        ),
    )


@pytest.mark.parametrize(("size", "want"), [(1, 10), (2, 13), (3, 17), (4, 20), (6, 15), (8, 10)])
def test_sizes_between_two_measured_ones_are_interpolated(size: int, want: int) -> None:
    """10 to 20 over three steps: 10, 13.33, 16.67, 20; then down to 10 over four."""
    (measured,) = one_layer((4, 20), (1, 10), (8, 10)).at(size)
    assert measured.forward_ns == measured.stash_bytes == measured.output_bytes[0] == want


def test_a_half_is_rounded_up() -> None:
    assert one_layer((1, 10), (3, 11)).at(2)[0].forward_ns == 11
    assert one_layer((1, 11), (3, 10)).at(2)[0].forward_ns == 11


def test_a_size_is_interpolated_once_which_neither_the_file_nor_equality_shows() -> None:
    profile = one_layer((1, 10), (3, 11))
    assert profile.at(2) is profile.at(2)
    assert profile.microbatch_sizes == (1, 3)
    assert profile == one_layer((1, 10), (3, 11))
    assert encode(profile) == encode(one_layer((1, 10), (3, 11)))


@pytest.mark.parametrize("size", [1, 9])
def test_sizes_outside_the_measured_ones_are_refused(size: int) -> None:
    with pytest.raises(BapipeError) as caught:
        one_layer((2, 1), (8, 2)).at(size)
    assert str(caught.value) == (
        f"the profile of m on cpu holds micro-batch sizes 2 to 8, not {size}: choose one of those, or profile again "
        f"with `microbatch_sizes` {size}"
    )


@pytest.mark.parametrize(
    ("ns", "speed", "want"), [(10, 1.0, 10), (10, 2.0, 5), (5, 2.0, 3), (1, 0.4, 3), (10, 0.3, 33), (10**18, 3.0, 333333333333333333)]
)  # fmt: skip
def test_speed_divides_and_rounds_half_up(ns: int, speed: float, want: int) -> None:
    assert at_speed(ns, speed) == want


def test_a_transfer_takes_latency_and_the_bandwidths_share_rounded_up() -> None:
    link = Bandwidth(bytes_per_s=3 * 10**9, latency_ns=100)
    assert [link.transfer_ns(n) for n in (0, 1, 3, 4, 6)] == [100, 101, 101, 102, 102]
    narrow: Any = numpy.int32(2_000_000_000)
    assert link.transfer_ns(narrow) == link.transfer_ns(2_000_000_000)


def test_layers_of_a_stage_add_up() -> None:
    from bapipe.planner.stages.chain import Chain

    profile = random_profile(Random(3), 6)
    chain = Chain(profile, 2, 1.0)
    measured = profile.at(2)
    assert chain.cost(1, 4).forward_ns == sum(m.forward_ns for m in measured[1:4])
    assert chain.cost(1, 4).workspace_bytes == max(m.workspace_bytes for m in measured[1:4])


def with_host(profile: ModelProfile, host_of: dict[int, HostTimes]) -> ModelProfile:
    """The profile with times of the host at some sizes."""
    measurements = [
        replace(m, layers=(replace(m.layers[0], host=host_of.get(m.microbatch_size, UNSET)),))
        for m in profile.measurements
    ]
    return replace(profile, measurements=tuple(measurements))


@pytest.mark.parametrize(
    ("backward_ns", "both_ns", "least_ns", "least_input_ns"),
    [(UNSET, 17, 7, 3), (5, 15, 5, 3), (2, 12, 2, 2), (30, 40, 7, 3)],
)
def test_bounds_count_the_shorter_of_b_and_its_halves(
    backward_ns: int | UnsetType, both_ns: int, least_ns: int, least_input_ns: int
) -> None:
    """F takes 10, I 3 and W 4: together 7, which may be more or less than B."""
    layer = LayerMeasurement(
        forward_ns=10, input_grad_ns=3, weight_grad_ns=4, backward_ns=backward_ns, stash_bytes=0, output_bytes=(0,)
    )
    assert layer.forward_backward_ns == both_ns
    assert (layer.min_backward_ns, layer.min_input_grad_ns) == (least_ns, least_input_ns)


def test_times_of_the_host_are_interpolated_and_stay_where_one_size_has_none() -> None:
    few = HostTimes(forward_ns=10, input_grad_ns=10, weight_grad_ns=20, backward_ns=0)
    many = HostTimes(forward_ns=13, input_grad_ns=10, weight_grad_ns=21, backward_ns=4)
    profile = one_layer((1, 10), (3, 10))
    assert profile.at(2)[0].host is UNSET
    (between,) = with_host(profile, {1: few, 3: many}).at(2)
    assert between.host == HostTimes(forward_ns=12, input_grad_ns=10, weight_grad_ns=21, backward_ns=2)
    assert with_host(profile, {3: many}).at(2)[0].host == many
    assert with_host(profile, {1: few}).at(2)[0].host == few


def test_an_action_takes_the_longer_of_the_sums_of_device_and_host() -> None:
    """Two layers: F 30 + 10 on the device, 5 + 50 on the host; recomputation repeats F on both.

    The device is twice as fast as the one that was measured, its host is not.
    """

    def layer(forward_ns: int, host_ns: int) -> LayerTotals:
        return LayerTotals(
            forward_ns=forward_ns,
            input_grad_ns=40,
            weight_grad_ns=20,
            backward_ns=60,
            host_forward_ns=host_ns,
            host_input_grad_ns=30,
            host_weight_grad_ns=30,
            host_backward_ns=40,
        )

    first, second = layer(30, 5), layer(10, 50)

    def cost(recomputed: LayerTotals, *, sends_gradient: bool = True) -> StageCost:
        return cost_of_totals(
            sum_totals([first, second]),
            0,
            [second],
            speed=2.0,
            recomputed=recomputed,
            tied=TiedWeightCost(),
            sends_gradient=sends_gradient,
        )

    plain, again = cost(LayerTotals()), cost(second)
    assert (plain.forward_ns, plain.input_grad_ns, plain.weight_grad_ns, plain.backward_ns) == (55, 60, 60, 80)
    # I: 40 + 5 on the device, 60 + 50 on the host; B: 60 + 5, 80 + 50.
    assert (again.forward_ns, again.input_grad_ns, again.weight_grad_ns, again.backward_ns) == (55, 110, 60, 130)
    # The last layer alone: B 30 and 40, W 10 and 30; with its F repeated, B 35 and 90.
    assert (plain.gradient_done_ns, again.gradient_done_ns) == (((40, 30),), ((90, 30),))
    # Of a stage that sends no gradient back, I is only the F of `second` again, and W all of B.
    plain, again = cost(LayerTotals(), sends_gradient=False), cost(second, sends_gradient=False)
    assert (plain.input_grad_ns, plain.weight_grad_ns, plain.backward_ns) == (0, 80, 80)
    assert (again.input_grad_ns, again.weight_grad_ns, again.backward_ns) == (50, 80, 130)
    assert (plain.gradient_done_ns, again.gradient_done_ns) == (((40, 40),), ((90, 40),))
