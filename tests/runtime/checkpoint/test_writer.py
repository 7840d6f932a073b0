"""The thread that writes checkpoints, as it would be on a GPU."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bapipe.runtime import copy_streams
from bapipe.runtime.checkpoint import writer
from tests.runtime.checkpoint.cases import go


def test_the_thread_that_writes_waits_on_the_gpu_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPU 0, where threads begin, each rank would make a context of half a gigabyte."""
    gpu, real = torch.device("cuda", 1), copy_streams.copied_to_host
    seen: list[tuple[str, object]] = []

    def noted(event: str, value: object = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            seen.append((event, value))

    def copied(tensors: Any, first: Any, stream: Any) -> Any:
        assert stream.device == gpu
        return real(tensors, first, None)

    monkeypatch.setattr(writer, "copy_stream", lambda device: SimpleNamespace(device=gpu))
    monkeypatch.setattr(writer, "copied_to_host", copied)
    monkeypatch.setattr(copy_streams.HostCopy, "wait", lambda copy: noted("wait"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: noted("set", device))
    go(tmp_path / "run", 2)
    assert seen == [("set", gpu), ("wait", None)]
