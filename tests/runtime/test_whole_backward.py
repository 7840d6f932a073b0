"""Which backwards of a stage are run whole."""

from functools import partial

import torch
from torch import nn

from bapipe.runtime.clock import CpuClock
from bapipe.runtime.replicas import GradientSum
from bapipe.runtime.whole_backward import has_hooks_of_the_model


def test_hooks_of_replicas_are_told_from_those_of_the_model() -> None:
    layer = nn.Linear(2, 2)
    GradientSum([list(layer.parameters())], None, CpuClock())  # type: ignore[arg-type]
    assert not has_hooks_of_the_model(layer)
    layer.bias.register_hook(partial(torch.mul, 2))
    assert has_hooks_of_the_model(layer)
