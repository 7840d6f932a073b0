"""Mini-batches that processes are given are compared."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BapipeError
from bapipe.runtime.data.batch_check import check_same_batch


def checked(monkeypatch: pytest.MonkeyPatch, *given: dict[str, Tensor]) -> None:
    """As the last of some processes sees it."""
    gathered: list[Any] = []

    def gather(into: list[Any], own: Any, group: object) -> None:
        gathered.append(own)
        into[: len(gathered)] = gathered

    monkeypatch.setattr(dist, "get_world_size", lambda group: len(given))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for one in given:
        check_same_batch(one, None)


def test_what_all_that_give_it_have_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = torch.randn(4, 2, dtype=torch.bfloat16), torch.arange(4)
    checked(monkeypatch, {"input": x}, {"input": x.clone(), "the target": target}, {"the target": target})


@pytest.mark.parametrize("row", [0, 3])
def test_other_samples_are_refused(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    target = torch.arange(4)
    other = target.clone()
    other[row] = 7
    with pytest.raises(BapipeError, match=r"^process 2 was given other samples of 'the target' than process 1: all"):
        checked(monkeypatch, {}, {"the target": target}, {"the target": other})
