"""The line that fails is that of the forward, and the one inside the function that it calls."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bapipe.errors import InvalidModel
from bapipe.tracing.capture import capture
from bapipe.tracing.code_position import failed_line
from bapipe.tracing.layer_choice import LayerChoice


def steps(x: Tensor) -> Tensor:
    return halved(x.tanh())


def halved(x: Tensor) -> Tensor:
    return x / 2 if x.sum() > 0 else x


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(2, 2), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(self.linear(x))
        return y


def _place(function: Callable[..., object], text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    (line,) = [start + i for i, one in enumerate(lines) if text in one]
    return f"{__name__}, line {line}: "


FORWARD = _place(Calls.forward, "self.function(") + "y: Tensor = self.function(self.linear(x))"
INSIDE = _place(halved, "x.sum()") + "return x / 2 if x.sum() > 0 else x"


def test_a_refusal_names_both_lines() -> None:
    with pytest.raises(InvalidModel) as refused:
        capture(Calls(steps), (torch.zeros(2, 2),), LayerChoice())
    assert f"while it is traced ({FORWARD}, which comes to {INSIDE});" in str(refused.value)


def test_code_of_torch_and_of_python_is_not_named() -> None:
    for function in (lambda x: functional.linear(x, x[0, 0]), lambda x: sorted(inspect.getsource(x))):
        with pytest.raises((RuntimeError, TypeError)) as failed:
            Calls(function)(torch.zeros(2, 2))
        line = failed_line(failed.value)
        assert line is not None
        assert line.forward.in_words == FORWARD
        assert line.inside is not None
        assert line.inside.module == __name__


def test_an_inner_forward_that_fails_itself_is_named_alone() -> None:
    with pytest.raises(RuntimeError) as failed:
        nn.Sequential(Calls(nn.Linear(3, 3)))(torch.zeros(2, 2))
    assert str(failed_line(failed.value)) == f" ({FORWARD})"
