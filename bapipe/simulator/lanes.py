"""Stages of devices that run forwards and backwards side by side, on two lanes that share their compute."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from bapipe.formats.cluster import Device
from bapipe.simulator.stage import Stage, StageCost
from bapipe.units import round_half_up


def with_lanes(stages: Sequence[Stage], devices: Sequence[Sequence[Device]]) -> tuple[Stage, ...]:
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
