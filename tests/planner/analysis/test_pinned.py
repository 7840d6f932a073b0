"""A pinned plan keeps its stages, and gets the bound of the whole space."""

import pytest
from msgspec.structs import replace

from bapipe.errors import Infeasible
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.pinned import BEST_FOUND, certify_pinned
from bapipe.planner.options import PlanOptions
from bapipe.planner.plan_step import plan_step_time
from bapipe.simulator.simulate import simulate
from tests.builders import chain, devices

OPTIONS = PlanOptions(minibatch_size=4, schedules=("1f1b",), replicas=False)


def best_and_unbalanced(profiles: dict[str, ModelProfile]) -> tuple[Plan, Plan]:
    """Returns the best plan of two stages, and the one that has a single layer in the first stage."""
    best = plan_step_time(profiles, devices(2), OPTIONS)
    names = tuple(layer.name for layer in profiles["a"].layers)
    first, second = best.stages
    stages = (replace(first, layers=names[:1]), replace(second, layers=names[1:]))
    return best, replace(best, stages=stages)


def test_the_gap_of_a_pinned_plan_is_to_the_best_plan() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    best, unbalanced = best_and_unbalanced(profiles)
    pinned = certify_pinned(unbalanced, profiles, OPTIONS)
    assert pinned.stages == unbalanced.stages
    assert pinned.prediction.step_ns == simulate(unbalanced, profiles).step_ns > best.prediction.step_ns
    assert pinned.certificate.lower_bound_ns == best.prediction.step_ns
    assert not pinned.certificate.proven_optimal
    (other,) = pinned.alternatives
    slower = pinned.prediction.step_ns / best.prediction.step_ns - 1
    assert (other.name, other.step_ns) == (BEST_FOUND, best.prediction.step_ns)
    assert other.why_not == f"the pinned plan takes {slower:.1%} longer"


def test_the_best_plan_is_proven_when_it_is_pinned() -> None:
    profiles = {"a": chain([1, 1, 1, 1])}
    best, _ = best_and_unbalanced(profiles)
    pinned = certify_pinned(best, profiles, OPTIONS)
    assert pinned.certificate.proven_optimal
    assert pinned.alternatives[0].why_not == "not faster than the pinned plan"


def test_a_pinned_plan_that_does_not_fit_is_refused_with_the_bytes_it_lacks() -> None:
    profiles = {"a": chain([1, 1, 1, 1], param_bytes=100)}
    _, unbalanced = best_and_unbalanced(profiles)
    needed = simulate(unbalanced, profiles).memory[1].total
    cluster = unbalanced.cluster
    small = replace(cluster.devices[1], memory_bytes=needed - 1)
    short = replace(unbalanced, cluster=replace(cluster, devices=(cluster.devices[0], small)))
    message = rf"d1 needs {needed:,} bytes and has {needed - 1:,} \(1 bytes short\)"
    with pytest.raises(Infeasible, match=message):
        certify_pinned(short, profiles, OPTIONS)
