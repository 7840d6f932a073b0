"""Errors of `bapipe plan` for wrong files and contradictory options: one line, the path of the fault, exit code 1."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from bapipe.cli import main
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.inputs.options import PlanOptions
from tests.random_profiles import random_profile
from tests.step_time import plan_step_time

PROFILE = msgspec.to_builtins(random_profile(Random(5), 6))
CLUSTER = {
    "bapipe": "cluster/1",
    "devices": [{"name": name, "host": "h", "kind": "a", "memory_bytes": 10**6} for name in ("d0", "d1")],
    "intra_host": {"bytes_per_s": 10**9, "latency_ns": 5},
    "inter_host": {"bytes_per_s": 10**9, "latency_ns": 5},
}
PLAN = "p.json", "--cluster", "c.json", "--minibatch-size", "8"
MAX = 2**63 - 1


def changed(tree: Any, path: Sequence[str | int], value: object) -> Any:
    copied = deepcopy(tree)
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied


def refused(folder: Path, capsys: pytest.CaptureFixture[str], profile: Any, cluster: Any, *options: str) -> str:
    """The one line in which the command line prints the error."""
    (folder / "p.json").write_text(json.dumps(profile))
    (folder / "c.json").write_text(json.dumps(cluster))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["bapipe", "plan", *PLAN, *options])
        with pytest.raises(SystemExit) as ended:
            main()
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert said.out == ""
    *before, line = said.err.splitlines(keepends=True)
    assert set(before) <= {"planning\n"}  # which a slow machine is told
    assert not (folder / "plan.json").exists()
    return line


LAYER = ("measurements", 0, "layers", 2)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("layers", 0, "inputs"),
            ["t5"],
            "p.json: tensor 't5' is used before the layer that makes it; layers must be in topological order, without "
            "cycles - at `$.layers[0].inputs`",
        ),
        (
            ("layers", 2, "inputs"),
            ["t2"],
            "p.json: tensor 't2' is used before the layer that makes it; layers must be in topological order, without "
            "cycles - at `$.layers[2].inputs`",
        ),
        ((*LAYER, "forward_ns"), 2**63, f"p.json: Expected `int` <= {MAX} - at `$.measurements[0].layers[2].forward_ns`"),
        ((*LAYER, "stash_bytes"), -1, "p.json: Expected `int` >= 0 - at `$.measurements[0].layers[2].stash_bytes`"),
        (
            (*LAYER, "input_grad_ns"),
            MAX,
            f"the profile of random on a: {MAX:,} is too much to add up over a mini-batch of 8; check the unit - at "
            "`$.measurements[0].layers[2].input_grad_ns`",
        ),
        (
            (*LAYER, "output_bytes"),
            [MAX],
            f"the profile of random on a: {MAX:,} is too much to add up over a mini-batch of 8; check the unit - at "
            "`$.measurements[0].layers[2].output_bytes`",
        ),
        (
            ("layers", 4, "param_bytes"),
            MAX,
            f"the profile of random on a: {MAX:,} is too much to add up over a mini-batch of 8; check the unit - at "
            "`$.layers[4].param_bytes`",
        ),
        (
            ("measurements", 0, "microbatch_size"),
            0,
            "p.json: Expected `int` >= 1 - at `$.measurements[0].microbatch_size`",
        ),
        (
            ("measurements",),
            [],
            "p.json: a profile needs at least one measured micro-batch size - at `$.measurements`",
        ),
        (
            ("measurements",),
            [changed(m, ["microbatch_size"], size) for m, size in zip(PROFILE["measurements"], (3, 5, 7), strict=True)][1:],
            "no micro-batch size divides the mini-batch of 8 and lies within those profiled (a: 5, 7): change "
            "--minibatch-size, or profile more sizes - at `$.measurements`",
        ),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: Sequence[str | int], value: object, message: str
) -> None:
    assert refused(tmp_path, capsys, changed(PROFILE, path, value), CLUSTER) == f"error: {message}\n"


@pytest.mark.parametrize("field", ["device", "optimizer"])
def test_a_missing_field_with_the_name_of_an_argument_is_named_as_a_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    without = {name: value for name, value in PROFILE.items() if name != field}
    assert refused(tmp_path, capsys, without, CLUSTER) == (
        f"error: p.json: Object missing required field '{field}' - at `$`\n"
    )


def test_disconnected_layers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layers = deepcopy(PROFILE["layers"])
    for layer, inputs in zip(layers[3:], (["y"], ["t3"], ["t4"]), strict=True):
        layer["inputs"] = inputs
    assert refused(tmp_path, capsys, PROFILE | {"layers": layers}, CLUSTER) == (
        "error: the layers fall into 2 parts that share no tensor: 'l0' is in one of 3, 'l3' in one of 3; remove what "
        "the loss does not use, or plan the parts apart - at `$.layers[3].inputs`\n"
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("intra_host", "bytes_per_s"), 0, "c.json: Expected `int` >= 1 - at `$.intra_host.bytes_per_s`"),
        (("inter_host", "bytes_per_s"), -5, "c.json: Expected `int` >= 1 - at `$.inter_host.bytes_per_s`"),
        (
            ("links",),
            [{"from": "d0", "to": "d1", "bytes_per_s": 0, "latency_ns": 0}],
            "c.json: Expected `int` >= 1 - at `$.links[0].bytes_per_s`",
        ),
        (
            ("links",),
            [{"from": "d0", "to": "d1", "bytes_per_s": 1, "latency_ns": MAX}],
            f"the cluster: with a latency of {MAX:,} ns a step of 8 samples could take more than four years; check the "
            "unit - at `$.links[0].latency_ns`",
        ),
        (("devices", 0, "memory_bytes"), 2**63, f"c.json: Expected `int` <= {MAX} - at `$.devices[0].memory_bytes`"),
        (("devices", 0, "speed"), 0, "c.json: Expected `float` > 0.0 - at `$.devices[0].speed`"),
        (
            ("devices", 1, "speed"),
            1e-300,
            "device 'd1' of speed 1e-300 would take more than four years for a step: check its speed, and the profile's "
            "times",
        ),
        (("devices",), [], "c.json: a cluster needs at least one device - at `$.devices`"),
    ],
)
def test_a_wrong_cluster_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: Sequence[str | int], value: object, message: str
) -> None:
    assert refused(tmp_path, capsys, PROFILE, changed(CLUSTER, path, value)) == f"error: {message}\n"


def test_a_link_on_which_a_step_takes_years_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = changed(PROFILE, ("layers", 4, "param_bytes"), 10**9)
    assert refused(tmp_path, capsys, profile, changed(CLUSTER, ("inter_host", "bytes_per_s"), 1)) == (
        "error: the cluster: with a bandwidth of 1 bytes/s a step of 8 samples could take more than four years; check "
        "the unit - at `$.inter_host.bytes_per_s`\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["l0 on d0", "l0 on d1"],
            "the constraints contradict one another: no device is allowed by all those on 'l0'; drop one of them",
        ),
        (
            ["l0 on d0", "l5 on d0", "l2 on d1"],
            "no plan keeps the constraints 'l0 on d0', 'l5 on d0', 'l2 on d1': drop one of 'l0 on d0', 'l5 on d0', "
            "'l2 on d1', or allow more stages or devices",
        ),
        (
            ["l0 without l1", "l1 without l2", "l3 with l4"],
            "no plan keeps the constraints 'l0 without l1', 'l1 without l2', 'l3 with l4': drop one of 'l0 without l1', "
            "'l1 without l2', or allow more stages or devices",
        ),
    ],
)
def test_constraints_that_no_plan_satisfies_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    given = [word for text in options for word in ("--constraint", text)]
    assert refused(tmp_path, capsys, PROFILE, CLUSTER, *given) == f"error: {message}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--constraint", "l0 with l5", "--stages", "2"],
            "2 stages asked for; 2 devices, 6 layers and 1f1b, gpipe allow 1 where l0 with l5",
        ),
        (
            ["--constraint", "l0 without l1", "--stages", "1"],
            "no plan with --stages 1 keeps the constraints 'l0 without l1': drop 'l0 without l1', or allow more stages or "
            "devices",
        ),
        (["--memory-limit", "10000000000TB"], f"--memory-limit is {10**22}: want at most {MAX}"),
        (["--minibatch-size", str(10**12)], "a mini-batch of 1,000,000,000,000: want at most 2,147,483,648 samples"),
        (
            ["--minibatch-size", str(2**31 - 1)],
            "a mini-batch of 2147483647 is 2147483647 micro-batches of 1; want at most 1024: choose a smaller "
            "--minibatch-size, or profile larger micro-batches",
        ),
        (
            ["--microbatch-size", "8"],
            "micro-batches of 8 are not within those profiled (a: 1, 2, 4): choose another --microbatch-size, or profile "
            "more sizes - at `$.measurements`",
        ),
    ],
)
def test_options_that_no_plan_satisfies_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert refused(tmp_path, capsys, PROFILE, CLUSTER, *options) == f"error: {message}\n"


def test_any_micro_batch_size_between_two_measured_ones_is_found_quickly() -> None:
    """A measured micro-batch size of 2**62 samples does not make the planner iterate that far."""
    huge = msgspec.convert(changed(PROFILE, ("measurements", 2, "microbatch_size"), 2**62), ModelProfile)
    plan = plan_step_time({"a": huge}, msgspec.convert(CLUSTER, Cluster), PlanOptions(minibatch_size=6))
    assert plan.certificate.space.count("micro-batches of 1, 2, 3, 6;") == 1


def said_before_work(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line in which a command refuses its options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["bapipe", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("option", ["--devices", "--minibatch-size"])
def test_a_pinned_plan_goes_without_options_that_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert said_before_work(tmp_path, capsys, "plan", "p.json", "--pin", "plan.json", option, "2") == (
        "error: a pinned plan holds its cluster and its mini-batch: leave out --cluster, --devices and "
        "--minibatch-size\n"
    )


@pytest.mark.parametrize("option", [["--hosts", "2"], ["--within", "nvlink"], ["--between", "eth100"]])
def test_options_of_a_cluster_that_is_not_here_are_refused_without_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    assert said_before_work(tmp_path, capsys, "cluster", *option) == (
        f"error: {option[0]} goes with --like, which describes devices that are not here: add --like PROFILE, or leave "
        f"{option[0]} out to measure this machine\n"
    )


def test_devices_that_are_not_here_cannot_be_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = said_before_work(tmp_path, capsys, "cluster", "--like", "p.json", "--probe")
    assert said == "error: --probe measures devices, and --like describes some that are not here: leave out either\n"


def test_devices_that_are_not_here_are_of_the_profile_s_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_before_work(tmp_path, capsys, "cluster", "--like", "p.json", "--device", "cpu")
    assert said == ("error: --device chooses devices of this machine, and --like describes others: leave out either\n")
