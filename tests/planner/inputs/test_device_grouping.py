"""Devices as they are, or merged for profiles of more threads: the faster grouping is chosen."""

import pytest
from msgspec.structs import replace

import bapipe
from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.cluster import Cluster, Link
from bapipe.formats.profile import ModelProfile, common_settings
from bapipe.formats.settings import Settings
from bapipe.planner.inputs.device_grouping import groupings, profiles_used_by
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.plan import plan_cached
from tests.builders import MS, chain, devices


def measured(threads: int, forward_ms: int) -> ModelProfile:
    """Two layers without parameters whose backward takes twice their forward."""
    return replace(chain([forward_ms, forward_ms]), settings=Settings(optimizer="sgd", threads=threads))


def test_two_devices_are_grouped_if_that_is_faster() -> None:
    plan = bapipe.plan([measured(1, 10), measured(2, 4)], devices(2), minibatch_size=2)
    assert [stage.devices for stage in plan.stages] == [("d0",)]
    assert plan.prediction.step_ns == 2 * 2 * (4 + 8) * MS  # two micro-batches of two layers; apart, 60 ms
    assert [(d.name, d.memory_bytes) for d in plan.cluster.devices] == [("d0", 2 * 10**9)]
    assert plan.settings == Settings(optimizer="sgd", threads=2)
    (apart,) = [other for other in plan.alternatives if other.name == "2 a devices of 1 thread"]
    assert (apart.step_ns, apart.feasible, apart.why_not) == (60 * MS, True, "25.0% slower")


def test_devices_stay_separate_if_that_is_faster() -> None:
    profiles = [measured(2, 6), measured(1, 10)]
    plan = bapipe.plan(profiles, devices(2), minibatch_size=2)
    assert [stage.devices for stage in plan.stages] == [("d0", "d1")]
    assert plan.prediction.step_ns == 60 * MS
    assert plan.settings == Settings(optimizer="sgd", threads=1)
    (together,) = [other for other in plan.alternatives if other.name == "1 a device of 2 threads"]
    assert (together.step_ns, together.why_not) == (72 * MS, "20.0% slower")
    assert profiles_used_by(plan, profiles) == {"a": profiles[1]}


@pytest.mark.parametrize(
    ("forward_ms", "other", "why_not"),
    [
        (5, "2 a devices of 1 thread", "as fast as this plan"),  # which has fewer devices
        (20, "1 a device of 2 threads", "4.0 times as long"),
    ],
)
def test_groupings_are_compared_in_the_words_of_other_plans(forward_ms: int, other: str, why_not: str) -> None:
    plan = bapipe.plan([measured(1, 10), measured(2, forward_ms)], devices(2), minibatch_size=2)
    (found,) = [each for each in plan.alternatives if each.name == other]
    assert found.why_not == why_not


def test_a_grouping_that_does_not_fit_leaves_the_other_groupings() -> None:
    small = devices(2, memory_bytes=1_500)
    one, two = (
        replace(chain([forward_ms], param_bytes=1_000), settings=Settings(optimizer="sgd", threads=threads))
        for threads, forward_ms in ((1, 4), (2, 9))
    )
    assert bapipe.plan([one, two], small, minibatch_size=2).settings == Settings(optimizer="sgd", threads=2)
    with pytest.raises(Infeasible):
        bapipe.plan([one, two], devices(2, memory_bytes=900), minibatch_size=2)


def _two_and_one(kind: str) -> Cluster:
    """Two devices of kind `a` and one of another."""
    three = devices(3)
    return replace(three, devices=(*three.devices[:2], replace(three.devices[2], kind=kind)))


def _of(kind: str, profile: ModelProfile) -> ModelProfile:
    return replace(profile, device=replace(profile.device, kind=kind))


def test_gpus_beside_merged_cores_have_no_threads() -> None:
    cluster = _two_and_one("cuda")
    profiles = [measured(1, 10), measured(2, 4), _of("cuda", measured(1, 100))]
    plan = bapipe.plan(profiles, cluster, minibatch_size=2)
    assert [stage.devices for stage in plan.stages] == [("d0",)]
    assert plan.settings == Settings(optimizer="sgd", threads=2)
    assert common_settings(profiles[1:]) == common_settings(profiles[:0:-1]) == plan.settings
    names = [grouping.name for grouping in groupings(profiles, cluster)]
    assert names == ["2 a devices of 1 thread, 1 cuda device", "1 a device of 2 threads, 1 cuda device"]


def test_kinds_of_cpus_have_the_same_threads() -> None:
    """A plan has one number of threads, so cores are not merged beside others that are not."""
    profiles = [measured(1, 10), measured(2, 1), _of("cpu-slow", measured(1, 20))]
    plan = bapipe.plan(profiles, _two_and_one("cpu-slow"), minibatch_size=2)
    assert plan.settings == Settings(optimizer="sgd", threads=1)


def test_devices_are_grouped_within_hosts() -> None:
    pairs = (("d0", "d1"), ("d1", "d2"), ("d0", "d2"))
    four = devices(4)
    cluster: Cluster = replace(
        four,
        devices=tuple(replace(d, host="hh" if i < 2 else "kk", speed=1.0 + i) for i, d in enumerate(four.devices)),
        links=tuple(Link(source=a, target=b, bytes_per_s=5, latency_ns=6) for a, b in pairs),
    )
    apart, together = groupings([measured(1, 10), measured(2, 4)], cluster)
    assert (apart.name, apart.cluster) == ("4 a devices of 1 thread", cluster)
    assert together.name == "2 a devices of 2 threads"
    assert [(d.name, d.host, d.speed) for d in together.cluster.devices] == [("d0", "hh", 1.0), ("d2", "kk", 3.0)]
    assert [(link.source, link.target) for link in together.cluster.links] == [("d0", "d2")]


def test_threads_that_no_devices_have_are_refused() -> None:
    with pytest.raises(BapipeError) as error:
        bapipe.plan([measured(1, 10), measured(2, 4)], devices(3), minibatch_size=2)
    assert str(error.value) == (
        "a profile of a devices has 2 threads and another 1, so its devices are 2 of the cluster's taken together; h has "
        "3: leave it out, or measure with a number of threads that divides them"
    )
    with pytest.raises(BapipeError) as error:
        bapipe.plan([measured(2, 10), measured(3, 4)], devices(3), minibatch_size=2)
    assert "its devices are 1.5 of the cluster's taken together; h has 3" in str(error.value)


def test_two_profiles_with_as_many_threads_are_refused() -> None:
    with pytest.raises(BapipeError) as error:
        plan_cached([measured(1, 10), measured(1, 4)], devices(2), PlanOptions(minibatch_size=2))
    assert str(error.value).startswith("two profiles are of device kind 'a': give one for each kind; what was measured")
