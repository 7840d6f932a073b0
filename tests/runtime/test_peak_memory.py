"""The peak of the memory of a process."""

from pathlib import Path

import pytest
import torch

from bapipe.runtime import peak_memory
from bapipe.runtime.peak_memory import PeakMemory


def test_the_peak_is_not_known_where_the_system_does_not_reset_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As gVisor, kernels without CONFIG_PROC_PAGE_MONITOR, and a read-only /proc."""
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    assert PeakMemory(torch.device("cpu")).peak_bytes() is None
