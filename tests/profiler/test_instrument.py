"""The order in which the layers of a chain report."""

import pytest
import torch
from torch import nn

from bapipe.errors import InvalidModel
from bapipe.profiler.instrument import InstrumentedModel, TrainingPass, check_loss, parameters_of
from bapipe.tracing.layers import trace

LOSS, INSTRUMENTATION = 3, 4
"""Numbers that follow those of the three layers."""


def training_pass(module: nn.Module | None = None) -> TrainingPass:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) if module is None else module
    inputs = (torch.ones(3, 2),)
    return TrainingPass(
        model=trace(module, inputs), loss=nn.functional.mse_loss, inputs=inputs, target=torch.ones(3, 2)
    )


def test_layers_report_in_order_forward_and_in_reverse_backward() -> None:
    reported: list[int] = []
    model = InstrumentedModel(training_pass=training_pass(), enter=reported.append)
    loss = model.forward()
    assert [layer for layer in dict.fromkeys(reported) if layer != INSTRUMENTATION] == [0, 1, 2, LOSS]
    reported.clear()
    model.backward(loss)
    assert reported == [LOSS, 2, 1, 0]


def test_instrumentation_does_not_change_the_loss_and_knows_the_outputs() -> None:
    measured = training_pass()
    model = InstrumentedModel(training_pass=measured, enter=lambda layer: None)
    assert torch.equal(model.forward(), measured.model_loss())
    assert {name: info.num_bytes for name, info in model.tensors.items()} == {"0": 24, "1": 24, "2": 24}
    assert [len(parameters) for parameters in parameters_of(measured.model)] == [2, 0, 2]


def test_a_loss_without_a_gradient_is_refused() -> None:
    check_loss(torch.ones((), requires_grad=True))
    with pytest.raises(InvalidModel, match=r"^the loss has no gradient"):
        check_loss(torch.ones(()))


def test_layers_between_two_that_share_a_weight_have_a_w_of_their_own() -> None:
    """The W of a shared weight would run through all of them, from its later layer to its earlier one."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    module[2].weight = module[0].weight
    reported: list[int] = []
    model = InstrumentedModel(training_pass=training_pass(module), enter=reported.append)
    module.zero_grad()
    model.backward(model.forward())
    expected = [parameter.grad for parameter in module[1].parameters()]
    module.zero_grad()
    groups = model.backward_inputs(model.forward())
    reported.clear()
    model.backward_weights(groups)
    assert set(reported) == {0, 1, 2}  # those of the first and the last are the biases'
    assert module[0].weight.grad is None
    for parameter, gradient in zip(module[1].parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    assert model.sharing_layers == {0, 2}
