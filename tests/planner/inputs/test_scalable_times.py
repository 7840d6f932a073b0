"""Times for lower bounds, against the simulator's times of each layer on devices of every speed."""

from random import Random

from msgspec.structs import replace

from bapipe.formats.cluster import Cluster
from bapipe.planner.inputs.scalable_times import scalable_times, scales_exchange
from bapipe.simulator.stage_cost import stage_cost_by_speed
from bapipe.simulator.tied_weights import TiedWeightCost
from tests.builders import devices
from tests.random_profiles import random_profile, with_exchanges


def of_speeds(*speeds: float) -> Cluster:
    alike = devices(len(speeds))
    return replace(alike, devices=tuple(replace(d, speed=v) for d, v in zip(alike.devices, speeds, strict=True)))


def test_no_device_takes_less_than_its_speed_says() -> None:
    speeds, num_equal = (0.3, 0.5, 1.0, 1.5, 4.0), 0
    for seed in range(30):
        profile = with_exchanges(Random(seed), random_profile(Random(seed), 4, splits_badly=seed % 2 == 1))
        least = scalable_times(profile, 3, of_speeds(*speeds))
        for layer, measured, bound in zip(profile.layers, profile.at(3), least, strict=True):
            cost_at = stage_cost_by_speed([(layer, measured)], set(), (), TiedWeightCost(), sends_gradient=True)
            for speed in speeds:
                cost = cost_at(speed)
                for least_ns, ns in (
                    (bound.forward_ns, cost.forward_ns),
                    (bound.input_grad_ns, cost.input_grad_ns),
                    (bound.weight_grad_ns, cost.weight_grad_ns),
                    (bound.whole_backward_ns, cost.backward_ns + 0.5),  # I and W are rounded, each by itself
                ):
                    assert least_ns / speed <= ns + 0.5
                    num_equal += speed == 0.3 and abs(least_ns / speed - ns) < 4
    assert num_equal > 300


def test_times_are_the_profile_s_unless_a_slower_device_exchanges_data() -> None:
    alone = random_profile(Random(1), 4)
    exchanging = with_exchanges(Random(1), alone)
    assert scalable_times(alone, 2, of_speeds(0.5)) == alone.at(2)
    assert scalable_times(exchanging, 2, of_speeds(1.0, 2.0)) == exchanging.at(2)
    assert scalable_times(exchanging, 2, of_speeds(0.5)) != exchanging.at(2)
    assert not scales_exchange(alone, of_speeds(0.5))
    assert not scales_exchange(exchanging, of_speeds(1.0))
    assert scales_exchange(exchanging, of_speeds(2.0))
