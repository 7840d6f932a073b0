"""What the command line makes of files of profiles, clusters and plans."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from msgspec import structs

import bapipe
from bapipe.cli import explore, inputs
from bapipe.cli.show import show
from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import encode, read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.planner.inputs.link_catalogue import cluster_like
from tests.builders import chain, devices
from tests.explorer.page_data import data_of
from tests.random_profiles import random_profile

PROFILE = chain([1, 2, 3])


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("NVIDIA H200", []),
        (
            "V100",
            [
                "the profile was measured on V100, and the cluster has NVIDIA H200: times hold for the former only; "
                "profile there with --kind cuda-NAME and give those devices that kind, or give them a `speed`"
            ],
        ),
    ],
)
def test_a_profile_of_another_gpu_is_noted(
    name: str, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(inputs, "note", told.append)
    of_h200 = structs.replace(
        random_profile(Random(1), 3), device=DeviceKind(kind="cuda", name="NVIDIA H200", memory_bytes=2**36)
    )
    write(tmp_path / "cluster.json", cluster_like(of_h200, 2))
    profile = structs.replace(of_h200, device=structs.replace(of_h200.device, name=name))
    cluster = inputs.read_or_assume_cluster({"cuda": profile}, tmp_path / "cluster.json", None)
    assert [device.model for device in cluster.devices] == ["NVIDIA H200"] * 2
    assert told == notes


def test_a_profile_of_a_kind_that_the_cluster_lacks_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(inputs, "note", told.append)
    group = DeviceKind(kind="ax2", name="none", memory_bytes=10**9, members=2, split="tensor")
    write(tmp_path / "cluster.json", devices(2))
    inputs.read_or_assume_cluster({"a": PROFILE}, tmp_path / "cluster.json", None)
    assert told == []
    of_group = structs.replace(PROFILE, device=group)
    inputs.read_or_assume_cluster({"a": PROFILE, "ax2": of_group}, tmp_path / "cluster.json", None)
    assert told == [
        "the profile of kind ax2 is not used: the cluster's devices are of kind a (a profile of groups of these has "
        "their kind)"
    ]


@pytest.fixture
def piped() -> Iterator[Callable[[ModelProfile | Plan | Cluster], str]]:
    """Returns the names of pipes that hold a file, as a shell gives them for `<(...)`: each can be read once."""
    ends: list[int] = []

    def pipe(content: ModelProfile | Plan | Cluster) -> str:
        reader, writer = os.pipe()
        ends.append(reader)
        with os.fdopen(writer, "wb") as file:
            file.write(encode(content))
        return f"/dev/fd/{reader}"

    yield pipe
    for end in ends:
        os.close(end)


def test_a_profile_is_read_from_a_pipe(piped: Callable[[ModelProfile], str]) -> None:
    assert inputs.all_profiles([piped(PROFILE)], None, (1,)) == (PROFILE,)


def test_a_folder_with_the_name_of_a_model_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vgg16").mkdir()
    assert not inputs.is_file("vgg16")


def test_what_is_shown_may_come_from_pipes(
    piped: Callable[[ModelProfile | Plan], str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = bapipe.plan(PROFILE, 2, minibatch_size=4)
    for content, expected in ((PROFILE, "0 of 3 layers changed"), (plan, "no difference")):
        show(Path(piped(content)), Path(piped(content)))
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize("of_plan", [False, True])
def test_what_is_explored_may_come_from_a_pipe(of_plan: bool, piped: Callable[[ModelProfile | Plan], str]) -> None:
    plan = bapipe.plan(PROFILE, 2, minibatch_size=4)
    profiles = [Path(piped(PROFILE))] if of_plan else []
    session = explore._session(
        [piped(plan if of_plan else PROFILE)], None, None if of_plan else 2, None, profiles, [], None
    )
    assert dict(session.profiles) == {"a": PROFILE}


def test_a_cluster_is_neither_explored_nor_compared(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    write(path, devices(2))
    with pytest.raises(BapipeError, match=r"cluster.json is a cluster: name a plan, a profile or a model, and this"):
        explore._session([str(path)], None, None, None, [], [], None)
    with pytest.raises(BapipeError, match=r"cluster.json is a cluster: name two plans or two profiles to compare"):
        show(path, path)


def test_arguments_of_a_model_beside_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for holder, content in (("profile", PROFILE), ("plan", bapipe.plan(PROFILE, 2, minibatch_size=4))):
        write(path, content)
        with pytest.raises(BapipeError, match=f"^--arg goes with a model; a {holder} holds its arguments already"):
            explore._session([str(path)], None, None, None, [], [], ["depth=3"])


@pytest.mark.parametrize("what", ["profile", "plan", "two plans"])
def test_a_page_is_written_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    plan = bapipe.plan(PROFILE, devices(2), minibatch_size=2)
    page, file = tmp_path / "page.html", tmp_path / "file.json"
    write(file, PROFILE if what == "profile" else plan)

    def nobody_reads(*texts: object, **options: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("bapipe.cli.show.show_parts", nobody_reads)
    monkeypatch.setattr("bapipe.cli.show.out.print", nobody_reads)
    with pytest.raises(BrokenPipeError):
        show(file, file if what == "two plans" else None, html=page)
    assert page.read_bytes().startswith(b"<!DOCTYPE html>")


def test_a_profile_that_is_not_of_the_plan_is_refused(tmp_path: Path) -> None:
    plan, path = bapipe.plan(PROFILE, 2, minibatch_size=4), tmp_path / "profile.json"
    write(tmp_path / "plan.json", plan)
    write(path, structs.replace(PROFILE, device=DeviceKind(kind="b", name="none", memory_bytes=1)))
    with pytest.raises(BapipeError) as caught:
        inputs.profiles_of_plan(plan, inputs.read_profiles([path]))
    assert str(caught.value) == (
        "the profile of chain is of kind 'b', and the plan's devices are of kind a: leave its --profile out"
    )
    write(path, chain([1, 2, 3, 4]))
    with pytest.raises(
        BapipeError, match=r"^the profile's layer 'l3' is in no stage of the plan: use the profile that"
    ):
        show(tmp_path / "plan.json", html=tmp_path / "page.html", profile=[path])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["plan.json", "profile.json"]


def test_a_page_of_two_plans_has_the_profiles_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given together, files go to the plans that were made from them; one that is of neither is said to be another."""
    slow, third = chain([10, 20, 30]), chain([5, 5, 5])
    files, plans = {}, {}
    for name, profile in (("fast", PROFILE), ("slow", slow), ("third", third)):
        files[name] = tmp_path / f"{name}.json"
        write(files[name], profile)
        plans[name] = tmp_path / f"{name}-plan.json"
        write(plans[name], bapipe.make(profile, 2, minibatch_size=2))
    page = tmp_path / "page.html"
    show(plans["fast"], plans["slow"], html=page, profile=[files["slow"], files["fast"]])
    steps = [read(plans[name], Plan).prediction.step_ns for name in ("fast", "slow")]
    assert [entry["answer"]["step"] for entry in data_of(page.read_bytes())["tried"]] == steps
    assert "another" not in capsys.readouterr().err
    show(plans["fast"], html=page, profile=[files["third"]])
    assert "the plan was made from another a profile of chain" in capsys.readouterr().err
