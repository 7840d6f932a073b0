"""What is said of a machine, and what is advised."""

import os
from pathlib import Path

import pytest

from bapipe.profiler import diagnosis
from bapipe.profiler.diagnosis import diagnose


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


def test_torch_is_asked_for_devices_and_backends() -> None:
    found = {finding.name: finding for finding in diagnose()}
    assert found["gloo"].value == "available"
    assert found["cuda devices"].value
