"""Profiles and devices as a caller may give them: one or several, once readable or not, and what is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import bapipe
from bapipe.errors import BapipeError
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import microbatch_sizes
from bapipe.planner.plan import plan_cached
from tests.builders import chain, devices

PROFILE = chain([1, 2], output_bytes=1000)
CLUSTER = devices(2)
MADE = bapipe.make(PROFILE, CLUSTER, minibatch_size=4)

FUNCTIONS: dict[str, Callable[[Any, Any], object]] = {
    "plan": lambda profiles, cluster: bapipe.plan(profiles, cluster, minibatch_size=4),
    "least devices": lambda profiles, cluster: bapipe.plan(
        profiles, cluster, minibatch_size=4, goal=bapipe.Goal(least="devices")
    ),
    "make": lambda profiles, cluster: bapipe.make(profiles, cluster, minibatch_size=4),
    "compare": lambda profiles, cluster: bapipe.compare(profiles, cluster, minibatch_size=4),
    "edit": lambda profiles, cluster: bapipe.edit(MADE, profiles, schedule="gpipe"),
    "simulate": lambda profiles, cluster: bapipe.simulate(MADE, profiles),
}
WITH_CLUSTER = "plan", "least devices", "make", "compare"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_profiles_may_come_from_an_iterator(name: str) -> None:
    for cluster in (2, CLUSTER):
        assert FUNCTIONS[name](iter([PROFILE]), cluster) == FUNCTIONS[name](PROFILE, cluster)


def test_profiles_of_a_plan_in_the_cache_may_come_from_an_iterator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = PlanOptions(minibatch_size=4)
    for _ in range(2):
        assert plan_cached(iter([PROFILE]), CLUSTER, options) == bapipe.plan(PROFILE, CLUSTER, options)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("profiles", ["p.json", Path("p.json"), [PROFILE, "p.json"], {"a": "p.json"}, None, CLUSTER])
def test_what_is_no_profile_is_refused(name: str, profiles: object) -> None:
    with pytest.raises(BapipeError, match=r" is no profile: want what `bapipe\.profile`, or `bapipe\.read\(path, "):
        FUNCTIONS[name](profiles, CLUSTER)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("profiles", [(), {}])
def test_no_profile_is_refused(name: str, profiles: object) -> None:
    for cluster in (2, CLUSTER):
        with pytest.raises(BapipeError, match=r"^no profile given$"):
            FUNCTIONS[name](profiles, cluster)


@pytest.mark.parametrize("name", WITH_CLUSTER)
def test_a_number_of_devices_that_is_too_large_is_refused_before_they_are_made(name: str) -> None:
    with pytest.raises(BapipeError, match=r"^1,000,000,000 devices: want at most 4,096; plan for a part of them$"):
        FUNCTIONS[name](PROFILE, 10**9)


@pytest.mark.parametrize("name", WITH_CLUSTER)
@pytest.mark.parametrize("cluster", [0, -1, 2.5, True, "c.json", None])
def test_what_is_neither_a_cluster_nor_a_number_of_devices_is_refused(name: str, cluster: object) -> None:
    with pytest.raises(BapipeError) as caught:
        FUNCTIONS[name](PROFILE, cluster)
    assert str(caught.value).startswith(f"`cluster` is {cluster!r}: want a number of devices, at least 1, or what ")


def test_sizes_are_those_that_all_kinds_of_devices_have() -> None:
    """Kind a was measured from 1 to 4 samples, kind b from 2 to 8."""
    measured = {size: structs.replace(PROFILE.measurements[0], microbatch_size=size) for size in (1, 2, 4, 8)}
    a = structs.replace(PROFILE, measurements=(measured[1], measured[4]))
    kind = structs.replace(PROFILE.device, kind="b")
    b = structs.replace(PROFILE, device=kind, measurements=(measured[2], measured[8]))
    first, second = devices(2).devices
    cluster = structs.replace(devices(2), devices=(first, structs.replace(second, kind="b")))
    assert microbatch_sizes({"a": a, "b": b}, cluster, PlanOptions(minibatch_size=8)) == [2, 4]
