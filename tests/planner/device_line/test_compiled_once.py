"""The programmes of bounds are compiled for one combination of arguments: each other one would take seconds."""

from math import inf
from typing import Any

from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.device_line.estimate import StepEstimate
from bapipe.planner.device_line.fitting_cuts import fitting_cuts, seems_to_fit
from bapipe.planner.device_line.fitting_programme import fits, fitting_stages, nearest_fitting_cuts
from bapipe.planner.device_line.fitting_replicas import fitting_replicas
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.line_memory import LineMemory
from bapipe.planner.device_line.prefix_bound import PrefixBound
from bapipe.planner.device_line.prefix_programme import extend
from bapipe.planner.device_line.recompute_programme import choose_recomputed, note_recomputed
from bapipe.planner.device_line.recomputed_layers import layer_items, recomputed_layers
from bapipe.planner.device_line.step_programme import estimate_ns
from bapipe.planner.device_line.suffix_programme import extend_backwards
from bapipe.planner.device_line.trip_bound import BY_COARSE, TripBound
from bapipe.planner.device_line.trips_before import fill_before
from bapipe.planner.device_line.trips_behind import fill_behind
from bapipe.simulator.in_flight import InFlight
from tests.builders import devices
from tests.planner.device_line.test_ring_bound import alike_line
from tests.planner.device_line.test_unlike_devices import unlike_line


def test_bounds_of_all_lines_are_of_the_same_types_and_layouts() -> None:
    """Of devices alike or not, one alone, of one rate of recomputation or several, with tables in band or not."""
    lines = [make(seed, "1f1b", buckets=seed % 2 == 1) for seed in range(3) for make in (alike_line, unlike_line)]
    alone = DeviceLine(lines[0].profiles, devices(1), lines[0].options)
    for line in (*lines, alone):
        plan = LinePlan(cuts=(0, line.cuts[-1]), counts=(1,), schedule="1f1b", microbatch_size=1)
        timed = line.time(plan)
        assert timed is not None
        bound = TripBound(PrefixBound(line, "1f1b", 1, len(line.cluster.devices)))
        of_all = bound.within(bound.prefix.kind, timed.step_ns, UNLIMITED, BY_COARSE)
        assert of_all is not None
        assert bound.within(bound.prefix.kind, timed.step_ns, UNLIMITED, 2, of_all, counts_cuts=True) is not None
        memory = LineMemory(line, 1)
        assert fitting_cuts(line, plan, memory) is not None
        assert fitting_replicas(line, "1f1b", memory) is not None
        assert seems_to_fit(line, plan, memory)
        estimate = StepEstimate(line, "1f1b", 1)
        assert estimate.score_ns(plan, timed.step_ns * 2) < inf
        items = layer_items(list(line.profiles.values()), 1)
        assert len(recomputed_layers(items, 0, line.cuts[-1], 0, InFlight(2, 1, 0), int(items.stash[-1]))) > 0
    programmes: list[Any] = [fill_before, fill_behind, extend, extend_backwards, estimate_ns]
    programmes += [fits, nearest_fitting_cuts, fitting_stages, choose_recomputed, note_recomputed]
    for programme in programmes:
        assert len(programme.signatures) == 1, programme
