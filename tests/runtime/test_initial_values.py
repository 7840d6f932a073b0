"""Initial values that processes do not share are told."""

import pytest
import torch
from torch import nn

from bapipe.runtime.initial_values import warn_of_unlike_values
from tests.runtime.gathering import call_as_processes


def module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(40, 5, dtype=torch.bfloat16))
    made.register_buffer("empty", torch.zeros(0))
    return made


def compared(monkeypatch: pytest.MonkeyPatch, *modules: nn.Module) -> None:
    call_as_processes(monkeypatch, lambda one: warn_of_unlike_values(one, None), *modules)


def test_equal_values_and_none_are_fine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compared(monkeypatch, module(0), module(0), module(1).to("meta"))
    assert not caplog.messages


def test_other_values_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    compared(monkeypatch, module(0), module(1))
    (message,) = caplog.messages
    assert message.startswith(
        "processes have different values of 4 parameters and buffers, such as '0.bias', and each stage"
    )
