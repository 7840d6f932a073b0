"""Estimates the step of a plan on a line of devices without a table of its actions, and walks along plans by estimates.

The estimate ignores rounding, links that several pairs of devices share, individual links between two devices,
all-reduces that take compute, and tied weights. The loops are compiled (`step_programme.py`, `walk.py`).
"""

from collections.abc import Callable
from math import inf

import numpy as np

from bapipe.formats.profile import ModelProfile
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.line_memory import LineMemory
from bapipe.planner.device_line.neighbourhood import Neighbourhood
from bapipe.planner.device_line.recomputed_layers import layer_items
from bapipe.planner.device_line.search_arrays import (
    DEVICE,
    ESTIMATED_STAGE,
    LAYER,
    RECOMPUTED,
    Costs,
    Notes,
    Records,
    Replicas,
)
from bapipe.simulator.interval_costs import prefix_sums, transfer_ns
from bapipe.simulator.stage_cost import BUCKET_BYTES

ESTIMATED = ("1f1b", "gpipe")
"""The schedules whose steps are estimated."""

FIRST_TEMPERATURE, LAST_TEMPERATURE = 5e-4, 3e-5
"""The temperatures at the start and the end of a walk, as parts of the step at its start."""

MIN_TEMPERATURES, MAX_ACTIONS_OF_EACH = 200, 500_000
"""The minimum number of temperatures of a walk; and the maximum number of actions estimated at each, in a few
milliseconds, before it looks at the clock again."""

NUM_KNOWN = 4096
"""How many choices of recomputed layers are cached."""


class StepEstimate:
    """Estimates the step times of plans with one schedule and micro-batch size."""

    def __init__(self, line: DeviceLine, schedule: str, microbatch_size: int) -> None:
        from bapipe.planner.device_line.step_programme import estimate_ns
        from bapipe.planner.device_line.walk import walk

        self._run_estimate, self._run_walk = estimate_ns, walk
        self._neighbourhood = Neighbourhood(line, schedule, microbatch_size)
        costs = self._costs = _costs(line, schedule, microbatch_size)
        num_layers = costs.workspace_bytes.size
        self._notes = _notes(self._neighbourhood.most_stages, costs.devices.size, costs.num_microbatches, num_layers)

    def step_ns(self, plan: LinePlan) -> float:
        """Returns the step time of a plan, infinite if it does not fit."""
        return self._estimate_ns(plan, inf)[1]

    def score_ns(self, plan: LinePlan, below_ns: float = inf) -> float:
        """Returns the step time of a plan plus a small part of the mean end of its stages; infinite if it does not fit.

        Args:
            below_ns: the result is infinite if the score is above it.
        """
        return self._estimate_ns(plan, below_ns)[0]

    def _estimate_ns(self, plan: LinePlan, below_ns: float) -> tuple[float, float]:
        arrays = self._neighbourhood.arrays(plan)
        score_ns, step_ns, _ = self._run_estimate(self._costs, arrays, self._notes, float(below_ns))
        return score_ns, step_ns

    def walk(self, plan: LinePlan, max_actions: int, part_done: Callable[[], float], seed: int) -> LinePlan:
        """Returns the plan with the shortest step of a random walk at falling temperatures (simulated annealing).

        Args:
            max_actions: the walk ends once this many actions have been estimated.
            part_done: returns the part of its time that is over: 1 ends it, 0 if time does not matter.
        """
        near = self._neighbourhood
        plans = near.arrays(plan), near.arrays(plan), near.arrays(plan)
        random, scores = near.random(seed), np.array(self._estimate_ns(plan, inf))
        start_ns, num_actions = scores[1], 0
        num_each = max(1, min(MAX_ACTIONS_OF_EACH, max_actions // MIN_TEMPERATURES))
        while True:
            part = max(num_actions / max_actions, part_done())
            if part >= 1 or start_ns == inf:
                return near.plan(plans[1])
            temperature = start_ns * FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** part
            num_actions += self._run_walk(
                self._costs, near.moves, self._notes, plans, scores, random, temperature, num_each
            )


def _costs(line: DeviceLine, schedule: str, microbatch_size: int) -> Costs:
    profiles = [line.profiles[kind] for kind in line.kinds]
    memory, inside, between = LineMemory(line, microbatch_size), line.cluster.intra_host, line.cluster.inter_host
    return Costs(
        num_microbatches=line.options.minibatch_size // microbatch_size,
        is_gpipe=schedule == "gpipe",
        may_recompute=line.options.recompute,
        boundaries=np.array(line.cuts, dtype=np.int64),
        layers=_layers(line, profiles[0], memory),
        items=layer_items(profiles, microbatch_size),
        backward=np.array(
            [prefix_sums([m.whole_backward_ns for m in profile.at(microbatch_size)]) for profile in profiles],
            dtype=float,
        ),
        workspace_bytes=memory.workspace,
        devices=_devices(line),
        latency=np.array([inside.latency_ns, between.latency_ns], dtype=float),
        ns_per_byte=np.array([1e9 / inside.bytes_per_s, 1e9 / between.bytes_per_s]),
    )


def _layers(line: DeviceLine, profile: ModelProfile, memory: LineMemory) -> Records:
    gradients = prefix_sums([layer.summed_bytes(has_replicas=True) for layer in profile.layers])
    layers = np.zeros(gradients.size, dtype=LAYER)
    layers["update"] = prefix_sums([layer.update_ns for layer in profile.layers])
    layers["state_bytes"], layers["gradient_bytes"] = memory.state, gradients
    layers["bucket_begin"] = np.searchsorted(gradients, gradients - BUCKET_BYTES, side="right") - 1
    layers["first_gradient"] = np.searchsorted(gradients, gradients, side="right") - 1
    layers["returned_bytes"] = memory.returned
    for link, place in ((line.cluster.intra_host, "inside"), (line.cluster.inter_host, "between")):
        layers[f"sent_{place}"] = transfer_ns(memory.sent, link)
        layers[f"returned_{place}"] = transfer_ns(memory.returned, link)
    return layers


def _devices(line: DeviceLine) -> Records:
    devices = np.zeros(len(line.cluster.devices), dtype=DEVICE)
    last_on: dict[str, int] = {}
    for p, device in enumerate(line.cluster.devices):
        host = list(last_on).index(device.host) if device.host in last_on else len(last_on)
        same_host = last_on.get(device.host, -1)
        devices[p] = line.kinds.index(device.kind), device.speed, host, same_host, line.class_of[p], line.limits[p]
        last_on[device.host] = p
    return devices


def _notes(most_stages: int, num_devices: int, num_microbatches: int, num_layers: int) -> Notes:
    """Returns arrays for notes on any plan; rows that are never used take no memory."""
    return Notes(
        stages=np.zeros(most_stages, dtype=ESTIMATED_STAGE),
        replicas=Replicas(np.zeros(num_devices, dtype=np.int64), *np.zeros((4, num_devices))),
        sent=np.empty((most_stages + 1, num_microbatches)),
        returned=np.empty((most_stages + 1, num_microbatches)),
        hosts=np.empty((most_stages + 2, num_microbatches), dtype=np.int32),
        recomputed=np.zeros(NUM_KNOWN, dtype=RECOMPUTED),
        came=np.empty((num_layers, 2), dtype=np.int8),
    )
