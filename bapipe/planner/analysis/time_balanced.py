"""A plan's stages with cuts that balance compute alone: the classic min-max dynamic programme over (stage, cut)."""

from itertools import pairwise
from math import inf

import msgspec

from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.stages.chain import Chain
from bapipe.simulator.tied_weights import legal_cuts

MAX_LAYERS_TO_BALANCE = 400
"""Maximum number of layers: with more, the dynamic programme takes too long for a comparison."""


def time_balanced_plan(plan: Plan, profiles: ProfilesByKind, deadline: Deadline = UNLIMITED) -> Plan | None:
    """Returns the plan with the cuts that minimize the slowest stage's compute; transfers and memory are ignored.

    None if devices have several stages, if there are more layers than `MAX_LAYERS_TO_BALANCE`, or if the profile's
    order cannot be cut so often, though another one of a branching model can. O(stages * layers**2) at most.

    Raises:
        OutOfTime: the deadline has passed.
    """
    # With several stages on a device, its load is the sum of theirs, which this programme does not handle.
    devices = [device for stage in plan.stages for device in stage.devices]
    index, layers = plan.cluster.index, next(iter(profiles.values())).layers
    if len(set(devices)) < len(devices) or len(layers) > MAX_LAYERS_TO_BALANCE:
        return None
    used = [plan.cluster.devices[index[stage.devices[0]]] for stage in plan.stages]
    unlike = {(device.kind, device.speed) for device in used}
    chain_of = {(kind, speed): Chain(profiles[kind], plan.microbatch_size, speed) for kind, speed in sorted(unlike)}
    chains = [chain_of[device.kind, device.speed] for device in used]
    legal = [0, *legal_cuts(layers), len(layers)]
    # By the cut after the stages so far: the minimal largest time per micro-batch and device, and its cuts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for s, (stage, chain) in enumerate(zip(plan.stages, chains, strict=True)):
        ends = legal[-1:] if s + 1 == len(chains) else legal[1:-1]
        extended = {}
        for stop in ends:
            deadline.check()
            candidate: tuple[float, tuple[int, ...]] | None = None
            for start in sorted((start for start in best if start < stop), reverse=True):
                (load, cuts), own = best[start], _work_ns(chain, start, stop) / len(stage.devices)
                if candidate is not None and own > candidate[0] + 1:
                    break  # stages that begin earlier take longer, but for a nanosecond of rounding
                candidate = min(candidate or (inf, ()), (max(load, own), (*cuts, stop)))
            if candidate is not None:
                extended[stop] = candidate
        best = extended
    # The stages may be along another order, which has more cuts.
    if len(layers) not in best:
        return None
    (_, cuts) = best[len(layers)]
    stages = tuple(
        msgspec.structs.replace(
            stage, layers=tuple(layer.name for layer in layers[start:stop]), recompute_layers=msgspec.UNSET
        )
        for stage, (start, stop) in zip(plan.stages, pairwise(cuts), strict=True)
    )
    return msgspec.structs.replace(plan, stages=stages)


def _work_ns(chain: Chain, start: int, stop: int) -> int:
    cost = chain.cost(start, stop)
    return cost.forward_ns + cost.backward_ns
