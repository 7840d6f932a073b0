"""Parameters that torch does not see are named."""

from typing import Any

import pytest
from torch import nn

from bapipe.formats.settings import Settings
from bapipe.module_state.unregistered import unregistered_parameters
from bapipe.profiler.prepare import prepared
from bapipe.torch_device import CPU


class Heads(nn.Module):
    def __init__(self, heads: Any) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(2, 2), heads


LINEAR = nn.Linear(2, 2)


@pytest.mark.parametrize("heads", [{"a": LINEAR}, [LINEAR], (LINEAR.weight,)])
def test_parameters_in_plain_containers_are_named(heads: Any, caplog: pytest.LogCaptureFixture) -> None:
    inner = Heads(heads)
    module = nn.Sequential(inner)
    assert list(module.parameters()) == list(inner.body.parameters())  # torch's own view
    found = unregistered_parameters(module)
    assert found is not None
    assert found.startswith(f"the {type(heads).__name__} '0.heads' holds parameters that are none of the model's")
    with prepared(module, CPU, Settings()):
        assert found in caplog.text


@pytest.mark.parametrize(
    "heads", [nn.ModuleDict({"a": LINEAR}), {"a": nn.Linear(2, 2).requires_grad_(False)}, [1, "b"], {"c": None}]
)
def test_those_that_torch_sees_and_frozen_ones_are_not(heads: Any) -> None:
    assert unregistered_parameters(Heads(heads)) is None


def test_a_list_of_registered_modules_is_not_named() -> None:
    module = Heads([])
    module.heads.append(module.body)
    assert unregistered_parameters(module) is None
