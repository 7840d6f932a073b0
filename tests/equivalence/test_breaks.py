"""Stages that are broken on purpose, each in another way, and each is found, with the layer."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy

from bapipe.equivalence import stages
from bapipe.equivalence.check import Difference, Equivalence, compare_split, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.errors import InvalidModel
from bapipe.tracing import sizes, stage_module
from bapipe.tracing.extract import GradMode
from bapipe.tracing.layers import trace
from tests.equivalence import breaks
from tests.equivalence.breaks import Breakable, Edit, edited, two_losses

CPU = torch.device("cpu")


def compare() -> Any:
    torch.manual_seed(0)
    module = Breakable().train()
    inputs, target = (torch.randn(4, 6),), torch.tensor([0, 1, 2, 1])
    model = trace(module, inputs)
    assert len(model.layers) == 10
    return compare_split(model, two_losses, example_microbatches(inputs, target, (2, 2, 3), CPU))


def break_operator(edit: Edit) -> Callable[[pytest.MonkeyPatch], None]:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        make = stage_module.stage_module
        monkeypatch.setattr(stages, "stage_module", lambda *args: edited(make(*args), edit))

    return patch


def ignore_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradMode, "enter", lambda self, node: None)


def constant_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes.StageSizes, "_affine", lambda self, wanted, scale, offset: 2 * scale + offset)


def drop_gradient_at_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads[1:]) if len(grads) > 1 else grads

    monkeypatch.setattr(stage_module._Seal, "backward", staticmethod(backward))


def outputs_in_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_swapped(parts: Any, index: int, *args: Any) -> fx.GraphModule:
        stage = stage_module.stage_module(parts, index, *args)
        if index + 1 == len(parts.stages):
            output = next(node for node in stage.graph.nodes if node.op == "output")
            sealed = output.all_input_nodes[0]
            sealed.args = tuple(reversed(sealed.args))
            stage.recompile()
        return stage

    monkeypatch.setattr(stages, "stage_module", last_swapped)


def fail_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError("lost the graph")

    monkeypatch.setattr(stage_module._Seal, "backward", staticmethod(backward))


CASES: Sequence[tuple[str, Callable[[pytest.MonkeyPatch], None], str, str]] = [
    ("a gradient is lost at a cut", drop_gradient_at_cut, "head", "gradient"),
    ("a layer's input is detached", break_operator(breaks.detached), "b", "gradient"),
    ("the backward is another", break_operator(breaks.straight_through), "b", "gradient"),
    ("a tied weight loses a gradient", break_operator(breaks.untied_weight), "a", "gradient of 'a.weight'"),
    ("other random numbers", break_operator(breaks.other_random_numbers), "drop", "loss"),
    ("a buffer is not updated", break_operator(breaks.no_buffer_update), "norm", "buffer of 'norm."),
    ("changed in place twice", break_operator(breaks.in_place_twice), "head", "loss"),
    ("a hook is dropped", break_operator(breaks.no_hook), "act", "loss"),
    (
        "gradients are not turned off",
        ignore_no_grad,
        "shift",
        "gradient of 'shift.weight' is missing in the original model",
    ),
    ("Python state is lost", break_operator(breaks.forgotten_python_state), "calls", "loss of micro-batch 1"),
    ("the batch size is a constant", constant_sizes, "", "loss of micro-batch 2"),
    ("outputs are in the wrong order", outputs_in_wrong_order, "", "loss"),
    ("a parameter is used upside down", break_operator(breaks.swapped_outputs), "head", "loss"),
    ("a backward fails", fail_in_backward, "other", "lost the graph"),
]


class Averages(nn.Module):
    """Its own code keeps an average between calls, outside of the modules that could be layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(6, 6), nn.Linear(6, 3), None

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if self.last is not None:
            y = y + self.last.mean()
        self.last = y.detach()
        z: Tensor = self.b(y)
        return z


def test_values_kept_by_the_models_own_code_are_refused_with_what_to_do() -> None:
    inputs, target = (torch.randn(4, 6),), torch.tensor([0, 1, 2, 1])
    with pytest.raises(InvalidModel) as error:
        trace_checked(Averages(), inputs, cross_entropy, example_microbatches(inputs, target, (2, 2), CPU))
    assert str(error.value).startswith(
        "the split model would not train as the original does: the loss of micro-batch 1"
    )
    assert str(error.value).endswith(
        "values differ in the forward after 'a' and before 'b', first in the model; the forward of the model keeps values "
        "between calls, which tracing does not see; put this code into a module of its own, which is then one layer"
    )


def test_the_unbroken_model_passes() -> None:
    result = compare()
    assert isinstance(result, Equivalence), result
    assert str(result) == ("in 10 stages, the model equals the original: loss, 11 gradients, 3 changed buffers")


@pytest.mark.parametrize(("patch", "layer", "what"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_break_is_found(
    patch: Callable[[pytest.MonkeyPatch], None], layer: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch)
    result = compare()
    assert isinstance(result, Difference), result
    assert what in result.what, result
    assert result.path == layer, result
