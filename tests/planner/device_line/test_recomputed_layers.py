"""Which layers stages recompute while plans are searched for, against all choices, closed forms and the simulator."""

from itertools import pairwise, product
from math import inf
from random import Random

import msgspec
import numpy as np
import pytest

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.planner.compute.deadline import UNLIMITED
from bapipe.planner.device_line.line import DeviceLine, LinePlan
from bapipe.planner.device_line.recompute_programme import Need, choose_recomputed
from bapipe.planner.device_line.recomputed_layers import layer_items, recomputed_layers
from bapipe.planner.device_line.search import LineSearch
from bapipe.planner.device_line.search_arrays import LayerItems
from bapipe.planner.inputs.options import PlanOptions
from bapipe.simulator.in_flight import InFlight
from tests.builders import chain, devices
from tests.random_graphs import branching_profile


def items_of(forward_ns: list[int], stash: list[int], sent: list[int], num_alone: int | None = None) -> LayerItems:
    """`sent` is what each layer but the first takes from the one before it."""
    return LayerItems(
        forward=np.concatenate([[0], np.cumsum(forward_ns)]).astype(float)[None],
        stash=np.concatenate([[0], np.cumsum(stash)]),
        sent=np.array([0, *sent, 0]),
        num_alone=len(stash) if num_alone is None else num_alone,
    )


def random_items(random: Random, num_layers: int) -> LayerItems:
    largest = random.choice([1, 20, 200])
    return items_of(
        [random.randint(0, 100) for _ in range(num_layers)],
        [random.randint(0, 100) for _ in range(num_layers)],
        [random.randint(0, largest) for _ in range(num_layers - 1)],
        num_layers - random.choice([0, 1]),
    )


def saved_bytes(items: LayerItems, need: Need, recomputed: frozenset[int]) -> int:
    """What is held less if some layers are recomputed; each tensor between one that is and one that is not is kept."""
    stash = sum(int(items.stash[i + 1] - items.stash[i]) for i in recomputed)
    kept = sum(int(items.sent[i]) for i in range(need.begin, need.end) if (i in recomputed) != (i - 1 in recomputed))
    return (need.kept - need.in_backward) * stash - need.kept * kept


def forward_ns(items: LayerItems, recomputed: frozenset[int]) -> float:
    return sum(float(items.forward[0, i + 1] - items.forward[0, i]) for i in recomputed)


def every_choice(items: LayerItems, begin: int, end: int) -> list[frozenset[int]]:
    alone = range(begin, min(end, items.num_alone))
    some = [
        frozenset(i for i, is_in in zip(alone, each, strict=True) if is_in) for each in product(*[(0, 1)] * len(alone))
    ]
    return [*some, frozenset(range(begin, end))]


def chosen_layers(items: LayerItems, need: Need) -> frozenset[int]:
    kept_bytes = int(need.kept * (items.stash[need.end] - items.stash[need.begin]))
    held = InFlight(need.kept, need.in_backward, 0)
    return recomputed_layers(items, need.begin, need.end, need.kind, held, kept_bytes - need.num_bytes)


def test_layers_save_enough_in_nearly_the_least_time_of_all_choices() -> None:
    least_ns = chosen_ns = whole_ns = num_best = num = num_without_every = 0.0
    for seed in range(300):
        random = Random(seed)
        items = random_items(random, 9)
        begin = random.randint(0, 4)
        end, kept = random.randint(begin + 1, 9), random.randint(2, 12)
        in_backward = random.randint(1, kept - 1)
        stash = int(items.stash[end] - items.stash[begin])
        need = Need(begin, end, 0, kept, in_backward, random.randint(1, max(1, (kept - in_backward) * stash)))
        found_ns = choose_recomputed(items, need, np.empty((end - begin, 2), dtype=np.int8)).forward_ns
        choices = [each for each in every_choice(items, begin, end) if saved_bytes(items, need, each) >= need.num_bytes]
        assert (found_ns < inf) == bool(choices), seed
        every, chosen = frozenset(range(begin, end)), chosen_layers(items, need)
        if found_ns == inf:
            assert chosen == every
            continue
        assert saved_bytes(items, need, chosen) >= need.num_bytes, seed
        assert forward_ns(items, chosen) == pytest.approx(found_ns), seed
        best_ns = min(forward_ns(items, each) for each in choices)
        assert best_ns - 1e-6 <= found_ns, seed
        if every not in choices:
            num_without_every += 1
            continue
        assert found_ns <= forward_ns(items, every), seed
        least_ns, chosen_ns, whole_ns = least_ns + best_ns, chosen_ns + found_ns, whole_ns + forward_ns(items, every)
        num, num_best = num + 1, num_best + (found_ns == pytest.approx(best_ns))
    assert num > 150
    assert num_without_every > 5
    assert num_best > 0.8 * num
    assert chosen_ns < 1.02 * least_ns < 0.9 * whole_ns


@pytest.mark.parametrize("begin", [0, 3])
def test_of_layers_alike_one_run_is_recomputed_at_an_end_of_the_stage(begin: int) -> None:
    """With tensors as large as three stashes, and 11 micro-batches in flight: n layers save 10 n - 11 * 3."""
    items = items_of([7] * 20, [1] * 20, [3] * 19)
    for num_layers in range(1, 12):
        need = Need(begin, 20, 0, 11, 1, max(1, 10 * num_layers - 11 * 3))
        least = -(-(need.num_bytes + 11 * 3) // 10)
        assert len(chosen_layers(items, need)) == least


def test_without_tensors_between_the_layers_of_least_time_for_a_byte_are_recomputed() -> None:
    items = items_of([5, 1, 4, 2, 3], [10] * 5, [0] * 4)
    for num_layers in range(1, 6):
        expected = frozenset(sorted(range(5), key=lambda i: [5, 1, 4, 2, 3][i])[:num_layers])
        assert chosen_layers(items, Need(0, 5, 0, 2, 1, 10 * num_layers)) == expected


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "eager-1f1b"])
def test_stages_of_branching_models_fit_by_the_simulator_with_the_layers_that_are_chosen(schedule: str) -> None:
    """Plans at limits from a tenth of a stash of the model besides its parameters up to nine: most recompute a part."""
    in_part = whole = 0
    for seed in range(12):
        profile = branching_profile(Random(seed), 8)
        for tenths in range(1, 90, 4):
            line = line_with_room(profile, tenths, schedule)
            for cut in line.cuts[1:-1]:
                cuts = 0, cut, line.cuts[-1]
                timed = line.time(LinePlan(cuts=cuts, counts=(1, 1), schedule=schedule, microbatch_size=1))
                for layers, stage in zip(timed.recompute if timed is not None else (), pairwise(cuts), strict=False):
                    in_part += 0 < len(layers) < stage[1] - stage[0]
                    whole += len(layers) == stage[1] - stage[0]
    assert in_part > whole
    assert in_part > 30


def line_with_room(profile: ModelProfile, tenths: int, schedule: str) -> DeviceLine:
    """Two devices with room for all parameters, and so many tenths of a micro-batch's stash of all layers."""
    state = sum(layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in profile.layers)
    stash = sum(measured.stash_bytes for measured in profile.at(1))
    cluster = Cluster(
        devices=tuple(
            Device(name=f"d{i}", host="h", kind=profile.device.kind, memory_bytes=state + stash * tenths // 10)
            for i in range(2)
        ),
        intra_host=Bandwidth(bytes_per_s=10**9, latency_ns=0),
        inter_host=Bandwidth(bytes_per_s=10**9, latency_ns=0),
    )
    return DeviceLine({profile.device.kind: profile}, cluster, PlanOptions(minibatch_size=8, schedules=[schedule]))


def test_the_loss_is_recomputed_with_all_of_its_stage_only() -> None:
    profile = branching_profile(Random(0), 4)
    assert layer_items([profile], 1).num_alone == 4
    layers = (*profile.layers[:-1], msgspec.structs.replace(profile.layers[-1], name=LOSS))
    assert layer_items([msgspec.structs.replace(profile, layers=layers)], 1).num_alone == 3


def test_a_search_finds_plans_that_are_fast_with_a_part_of_the_layers_recomputed() -> None:
    """Of GPipe on sixteen devices, with room for three quarters of the stashes; with all layers it is slower."""
    random = Random(3)
    profile = chain(
        [random.randint(1, 4) for _ in range(48)], param_bytes=10**6, stash_bytes=6 * 10**6, output_bytes=2 * 10**6
    )
    cluster = devices(16, memory_bytes=900 * 10**6, bytes_per_s=10**11)
    line = DeviceLine({"a": profile}, cluster, PlanOptions(minibatch_size=64, schedules=["gpipe"]))
    search = LineSearch([line], ["gpipe"], [1], bound_ns=0, deadline=UNLIMITED)
    search.run()
    best = search.best
    assert best is not None
    in_part = [
        0 < len(layers) < end - begin
        for layers, (begin, end) in zip(best.recompute, pairwise(best.plan.cuts), strict=True)
    ]
    assert any(in_part)
    stages = zip(pairwise(best.plan.cuts), best.recompute, strict=True)
    whole = line.time_with(best.plan, [frozenset(range(*ends)) if layers else layers for ends, layers in stages])
    assert whole is not None
    assert best.step_ns < 0.95 * whole.step_ns
