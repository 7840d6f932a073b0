"""What processes gather from one another, in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist


def call_as_processes(monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object], *given: Any) -> None:
    """Calls what processes call together with what each is given; the last of them sees what all have gathered."""
    gathered: list[Any] = []

    def gather(into: list[Any], own: Any, group: object) -> None:
        gathered.append(own)
        into[: len(gathered)] = gathered

    monkeypatch.setattr(dist, "get_world_size", lambda group: len(given))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for one in given:
        call(one)
