"""Planning with groups: the searches equal brute force, whatever the sizes of the groups and what their members sum."""

from random import Random

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from bapipe.errors import BapipeError, ConstraintsUnmet
from bapipe.formats.cluster import Bandwidth, Cluster, Device, Link
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.branch_and_bound.search import best_first
from bapipe.planner.branch_and_bound.space import build_space
from bapipe.planner.inputs.device_groups import with_groups
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan
from bapipe.planner.simulate import simulate
from bapipe.planner.stages.constraints import parse_constraints
from tests.builders import chain, devices
from tests.oracles.exhaustive_layouts import layouts
from tests.problems import heavy
from tests.random_profiles import random_profile


def of_group(profile: ModelProfile, random: Random, kind: str, members: int) -> ModelProfile:
    """The profile as one of a group of another kind: each member has its part of the bytes, and sums some gradients."""

    def share(layer: LayerProfile) -> LayerProfile:
        num_bytes = layer.param_bytes // members
        return replace(layer, param_bytes=num_bytes, group_sum_bytes=random.choice([0, num_bytes, num_bytes // 2]))

    measurements = tuple(
        replace(
            measurement,
            layers=tuple(
                replace(m, forward_ns=m.forward_ns // 2, output_bytes=tuple(size // members for size in m.output_bytes))
                for m in measurement.layers
            ),
        )
        for measurement in profile.measurements
    )
    device = replace(profile.device, kind=kind, members=members, split="spatial")
    return replace(profile, device=device, layers=tuple(map(share, profile.layers)), measurements=measurements)


def group(name: str, kind: str, members: int, host: str) -> Device:
    names = tuple(f"{name}.{i}" for i in range(members)) if members > 1 else None
    device = Device(name=name, host=host, kind=kind, memory_bytes=2**32)
    return device if names is None else replace(device, members=names)


def random_groups(seed: int) -> tuple[dict[str, ModelProfile], Cluster]:
    """Two or three devices, groups of one or of unlike sizes, on one or two hosts."""
    random = Random(seed)
    single = random_profile(random, random.randint(2, 5), splits_badly=seed % 3 == 0)
    if seed % 4 == 0:
        single = heavy(single)
    profiles = {"a": single, "b": of_group(single, random, "b", 2), "c": of_group(single, random, "c", 3)}
    kinds = ["b"] * 3 if seed % 2 else random.choice([["a", "b", "b"], ["a", "a", "c"], ["b", "c"]])
    cluster = Cluster(
        devices=tuple(
            group(f"d{rank}", kind, profiles[kind].device.num_members, random.choice("hi"))
            for rank, kind in enumerate(kinds)
        ),
        intra_host=Bandwidth(bytes_per_s=10**9 if seed % 4 else 10**15, latency_ns=random.randrange(4)),
        inter_host=Bandwidth(bytes_per_s=5 * 10**8 if seed % 4 else 10**14, latency_ns=random.randrange(9)),
    )
    if seed % 5 == 0 and cluster.devices[-1].num_members > 1:
        p, q, *_ = cluster.devices[-1].members or ()
        slow = Link(source=p, target=q, bytes_per_s=10**8, latency_ns=9)
        cluster = replace(cluster, links=(slow,))
    if seed % 7 == 0:
        cluster = replace(cluster, intra_host_sum=Bandwidth(bytes_per_s=10**9, latency_ns=5))
    return {kind: profiles[kind] for kind in kinds}, cluster


def has_alike_replicas(cluster: Cluster, ranks: tuple[tuple[int, ...], ...]) -> bool:
    return all(len({cluster.devices[rank].num_members for rank in group}) == 1 for group in ranks)


@pytest.mark.parametrize("schedules", [("1f1b", "gpipe"), ("interleaved-1f1b",), ("zb-h1",)])
def test_the_search_equals_brute_force(schedules: tuple[str, ...]) -> None:
    for seed in range(24):
        profiles, cluster = random_groups(seed)
        options = PlanOptions(minibatch_size=4, schedules=schedules, recompute=seed % 2 == 1)
        problems = build_space(profiles, cluster, options, sizes=[1, 2]).problems
        times = [
            problem.simulate(layout).step_ns
            for problem in problems
            for layout in layouts(problem)
            if has_alike_replicas(cluster, problem.ranks(layout.placements)) and problem.fits(layout)
        ]
        found = best_first(problems, max_nodes=100_000)
        if not times:
            assert found is None
            continue
        assert found is not None
        assert (found.step_ns, found.lower_bound_ns) == (min(times), min(times)), (seed, schedules)
        assert found.problem.step_ns(found.layout) == found.problem.simulate(found.layout).step_ns


def test_plans_say_what_the_simulator_says() -> None:
    for seed in range(8):
        profiles, cluster = random_groups(seed)
        made = plan(profiles, cluster, minibatch_size=4)
        assert made.prediction == simulate(made, profiles).prediction(4)
        assert made.certificate.lower_bound_ns <= made.prediction.step_ns


def test_a_profile_of_another_number_of_members_is_refused() -> None:
    profile = chain([1, 2], output_bytes=4)
    cluster = replace(devices(1), devices=(group("g", "a", 2, "h"),))
    with pytest.raises(BapipeError) as error:
        plan(profile, cluster, minibatch_size=1)
    assert str(error.value) == (
        "device 'g' is a group of 2, and the profile of kind 'a' is of a single device: measure or estimate one of a "
        "group of 2, or change `members` in the cluster"
    )


def test_unlike_groups_with_tied_weights_or_for_throughput_are_refused() -> None:
    profiles, cluster = random_groups(0)
    with pytest.raises(BapipeError, match="`objective` throughput wants groups of one size"):
        plan(profiles, cluster, minibatch_size=4, objective="throughput")
    tied = {
        kind: replace(
            profile,
            layers=(
                replace(profile.layers[0], param_bytes=8, group_sum_bytes=UNSET),
                *profile.layers[1:-1],
                replace(profile.layers[-1], shares=("l0",), shared_bytes=8),
            ),
        )
        for kind, profile in profiles.items()
    }
    with pytest.raises(BapipeError, match="shares parameters with 'l0', and the devices have"):
        plan(tied, cluster, minibatch_size=4)


def test_throughput_counts_what_members_sum() -> None:
    profile = chain([10, 10], param_bytes=10**6, output_bytes=4)
    members = of_group(profile, Random(0), "a", 2)
    cluster = replace(devices(2), devices=(group("g", "a", 2, "h"), group("h", "a", 2, "h")))
    loads = []
    for num_bytes in (0, 500_000):
        layers = tuple(replace(layer, group_sum_bytes=num_bytes, no_replicas=True) for layer in members.layers)
        made = plan(replace(members, layers=layers), cluster, minibatch_size=4, objective="throughput")
        loads.append(made.prediction.load_ns)
    # One stage each: 4 micro-batches of 25 ms, and a ring of two members: 2 messages of 250,000 bytes.
    assert loads == [4 * 25 * 10**6, 4 * 25 * 10**6 + 2 * 250_000]


def test_a_group_runs_the_layers_of_which_a_constraint_names_all_its_members() -> None:
    """Four devices, and groups of two that are twice as fast: members stand for their group."""
    single = chain([4, 4, 4, 4])
    (measured,) = single.measurements
    halves = tuple(
        replace(
            m, forward_ns=m.forward_ns // 2, input_grad_ns=m.input_grad_ns // 2, weight_grad_ns=m.weight_grad_ns // 2
        )
        for m in measured.layers
    )
    grouped = replace(
        single,
        device=replace(single.device, members=2, split="filter"),
        measurements=(replace(measured, layers=halves),),
    )

    def devices_of_first(constraint: str, *profiles: ModelProfile) -> tuple[str, ...]:
        made = plan(profiles, devices(4), minibatch_size=2, microbatch_size=1, constraints=[constraint])
        assert constraint in made.certificate.space
        return made.stages[0].devices

    assert devices_of_first("l0 on d2,d3", grouped) == ("d2..d3",)
    assert set(devices_of_first("l0 on d0,d2,d3", grouped)) <= {"d2..d3"}
    # No group can be on one device: the single devices are what is left.
    assert devices_of_first("l0 on d2", single, grouped) == ("d2",)
    with pytest.raises(ConstraintsUnmet) as caught:
        devices_of_first("l0 on d2", grouped)
    assert str(caught.value) == (
        "the constraint 'l0 on d2' names some members of groups, whose layers all members run: the devices are d0..d1, "
        "d2..d3; name all members, or plan with single devices"
    )
    with pytest.raises(BapipeError, match="names the device 'd9', which the cluster does not have"):
        devices_of_first("l0 on d9", single, grouped)


def test_a_pinned_plan_on_groups_keeps_constraints_on_their_members() -> None:
    rules = parse_constraints(["l0 on d0,d1", "l1 on d0,d2"])
    cluster = with_groups(devices(4), "a", 2)
    stages = (StagePlan(layers=("l0", "l1"), devices=("d0..d1",)),)
    assert rules.broken_by(stages, cluster) == ["l1 on d0,d2"]
