"""A call fails if the forward of its module does not take its arguments; where that cannot be known, it does not."""

from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bapipe.tracing.layer_arguments import check_arguments


def test_arguments_of_a_module_of_torch() -> None:
    check_arguments(nn.Linear(2, 2), (torch.zeros(1, 2),), {})
    check_arguments(nn.Linear(2, 2), (), {"input": torch.zeros(1, 2)})
    with pytest.raises(TypeError, match=r"Linear\.forward\(\) got an unexpected keyword argument 'scale'"):
        check_arguments(nn.Linear(2, 2), (torch.zeros(1, 2),), {"scale": 2})
    with pytest.raises(TypeError, match=r"Linear\.forward\(\) too many positional arguments"):
        check_arguments(nn.Linear(2, 2), (torch.zeros(1, 2), 2), {})


class Wrapped(nn.Module):
    """A decorator takes an argument of which the function inside knows nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    @wraps(forward)
    def _outer(self, *args: Any, scale: float, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs) * scale


def _hooked() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)
    return module


def _assigned(forward: Any) -> nn.Module:
    module = Wrapped()
    vars(module)["forward"] = forward(module)
    return module


@pytest.mark.parametrize(
    "module", [_hooked(), _assigned(lambda one: one._outer), _assigned(lambda one: partial(one.forward))]
)
def test_a_forward_that_may_take_more_than_its_signature_says(module: nn.Module) -> None:
    check_arguments(module, (torch.zeros(1, 2),), {"scale": 2.0})
