"""What is said of a machine, and what is advised."""

import os
from pathlib import Path

import pytest
import torch

from bapipe import diagnosis
from bapipe.diagnosis import diagnose
from bapipe.errors import BapipeError
from bapipe.profiler.cluster import check_devices


def test_every_fact_has_a_value_and_every_missing_package_a_purpose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    found = {finding.name: finding for finding in diagnose()}
    assert all(finding.value for finding in found.values())
    assert "to profile and train" in found["torch"].advice
    assert "to improve searched orders" in found["ortools"].advice
    assert "unset it" in found["OMP_NUM_THREADS"].advice
    assert found["cache"].value.startswith(str(tmp_path))
    assert "GB/s through TCP" in found["loopback"].value
    assert "gloo" not in found  # torch is not asked if it is not installed


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = {finding.name: finding for finding in diagnose()}
    assert found["cache"].advice == "set XDG_CACHE_HOME to a folder that can be written"


@pytest.mark.parametrize(
    ("may_write", "value", "advice"), [(False, "not writable", "data workers cannot start"), (True, "GiB free", "")]
)
def test_shared_memory_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, may_write: bool, value: str, advice: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    monkeypatch.setattr(diagnosis, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(diagnosis, "MIN_SHARED_MEMORY", 1)
    monkeypatch.setattr(os, "access", lambda path, mode: may_write)
    found = {finding.name: finding for finding in diagnose()}[str(tmp_path)]
    assert value in found.value
    assert found.advice.startswith(advice)
    assert bool(found.advice) != may_write


def test_torch_is_asked_for_devices_and_backends() -> None:
    found = {finding.name: finding for finding in diagnose()}
    assert found["gloo"].value == "available"
    assert found["cuda devices"].value


def test_a_gpu_that_cuda_does_not_start_on_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver counts its GPUs also for a torch that it is too old for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("The driver is too old")))
    found = {finding.name: finding for finding in diagnose()}["cuda devices"]
    assert found.value == "2, which cannot be used"
    assert found.advice == (
        "update the driver of the GPU, or install torch for its version of CUDA: CUDA 13.0 does not start (The driver "
        "is too old)"
    )
    with pytest.raises(BapipeError, match=r"^update the driver of the GPU"):
        check_devices(1, "cuda")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H{index}")
    found = {finding.name: finding for finding in diagnose()}["cuda devices"]
    assert (found.value, found.advice) == ("2: H0, H1", "")
