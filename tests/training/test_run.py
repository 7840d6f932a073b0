"""Plans that this machine cannot run, and runs that do not suit their plan, are refused before anything starts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from safetensors.torch import save_file

import bapipe
from bapipe.errors import BapipeError
from bapipe.formats.plan import Plan
from bapipe.formats.settings import Settings
from bapipe.hardware import num_cores
from bapipe.runtime.runnable import type_to_run
from bapipe.training.run import _check_devices
from bapipe.training.train import _place
from tests.multiprocess.fault_cases import quiet
from tests.multiprocess.runtime_cases import make_plan, named_order


def plan_on(kind: str, num_devices: int) -> Plan:
    """A plan with a stage on each of some devices of a kind."""
    layers = [f"l{i}" for i in range(num_devices)]
    cuts, ranks = tuple(range(1, num_devices)), tuple(range(num_devices))
    plan = make_plan(layers, cuts, ranks, named_order("1f1b", num_devices, 4), 1, 4)
    own = tuple(structs.replace(device, kind=kind) for device in plan.cluster.devices)
    return structs.replace(plan, cluster=structs.replace(plan.cluster, devices=own))


def refusal_of(plan: Plan, num_threads: int = 1) -> str:
    with pytest.raises(BapipeError) as caught:
        _check_devices(plan, num_threads)
    return str(caught.value)


def test_devices_that_torch_cannot_drive_are_named_by_their_kind() -> None:
    assert refusal_of(plan_on("v100", 3)) == (
        "the plan's devices are of kind v100; torch can run a plan of kind cpu or of kind cuda, or of kinds that all "
        "begin with cpu- or with cuda-"
    )


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("cuda", "cuda-small"), "cuda"),
        (("cpu-fast", "cpu-slow"), "cpu"),
        (("cpu", "cuda-small"), None),
        (("cudasmall", "cuda"), None),
    ],
)
def test_devices_of_several_kinds_run_if_torch_drives_them_alike(kinds: tuple[str, str], expected: str | None) -> None:
    plan = plan_on("cuda", 2)
    own = tuple(structs.replace(device, kind=kind) for device, kind in zip(plan.cluster.devices, kinds, strict=True))
    plan = structs.replace(plan, cluster=structs.replace(plan.cluster, devices=own))
    if expected is None:
        with pytest.raises(
            BapipeError, match=rf"^the plan's devices are of kind {', '.join(sorted(kinds))}; torch can"
        ):
            type_to_run(plan)
    else:
        assert type_to_run(plan) == expected
        assert [_place(device, plan.cluster.devices) for device in plan.cluster.devices] == [0, 1]


def test_more_devices_or_threads_than_there_are_cores_are_refused() -> None:
    have = num_cores()
    assert refusal_of(plan_on("cpu", have + 1)).startswith(
        f"the plan uses {have + 1} cpu devices and this machine has {have}: plan for a cluster of"
    )
    assert refusal_of(plan_on("cpu", 1), num_threads=have + 1).startswith(
        f"the plan uses {have + 1} threads on each of 1 cpu devices and this machine has {have} cores"
    )
    _check_devices(plan_on("cpu", have), 1)  # must not raise


def test_a_run_that_does_not_suit_its_plan_is_refused_before_a_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapipe.training.train.train", None)
    plan = plan_on("cpu", 1)
    own: dict[str, Any] = {"factory": quiet, "data": "tests.multiprocess.fault_cases:points"}
    with pytest.raises(BapipeError, match=r"computes with optimizer adam: leave `optimizer` out, or profile"):
        bapipe.run(plan, optimizer="adam", **own)
    of_doubles = structs.replace(plan, settings=Settings(dtype="float64"))
    with pytest.raises(BapipeError, match=r"measured with dtype float64; this run computes with dtype float32"):
        bapipe.run(of_doubles, **own)
    save_file({"other": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(BapipeError, match=r"weights.safetensors has other weights than the model"):
        bapipe.run(plan, weights=tmp_path / "weights.safetensors", **own)
