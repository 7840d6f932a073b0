"""Tensors that cross a cut and need a gradient later than when the model was traced."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.runtime.pipeline import Pipeline
from tests.multiprocess.runtime_cases import make_plan

X, Y = torch.randn(4, 3), torch.randn(4, 3)
MESSAGE = (
    r"^'gate:add' needs a gradient now, and did not when the model was traced, so the next stage sends none back: plan "
    r"another cut, or make a module of the layers that give and use it, and that module one layer \(`leaf_modules`\)$"
)


class Gate(nn.Module):
    """Gives a gate beside its output, of one element or one each; its gradient is stopped while it warms up."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.weight, self.num_elements = nn.Parameter(torch.randn(3, 3)), num_elements
        self.register_buffer("warms_up", torch.tensor(True))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ self.weight)
        gate = y.mean() if self.num_elements == 1 else y.mean(1, keepdim=True)
        return y, gate.detach() if self.warms_up else gate


class Gated(nn.Module):
    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.gate, self.layer = Gate(num_elements), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.gate(x)
        output: Tensor = self.layer(y) * (1 + gate)
        return output


def planned(recompute: tuple[int, ...]) -> Plan:
    order = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]
    return make_plan(["gate", "layer"], (1,), (0, 0), order, 2, 2, recompute=recompute)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("num_elements", [1, 2])
@pytest.mark.parametrize("recompute", [(), (0,)])
def test_a_gradient_that_is_needed_only_later_ends_the_step(num_elements: int, recompute: tuple[int, ...]) -> None:
    module = Gated(num_elements)
    pipeline = Pipeline(module, planned(recompute), loss=mse_loss, inputs=(X,))
    pipeline.step(X, target=Y)
    before = {name: parameter.detach().clone() for name, parameter in pipeline.named_parameters().items()}
    module.gate.get_buffer("warms_up").fill_(False)
    with pytest.raises(InvalidModel, match=MESSAGE):
        pipeline.step(X, target=Y)
    for name, parameter in pipeline.named_parameters().items():
        assert torch.equal(parameter, before[name])
