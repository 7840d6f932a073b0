"""Layers that return another number of values than when the model was traced."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bapipe.errors import InvalidModel, LayerFailed
from bapipe.profiler.instrument import InstrumentedModel, TrainingPass
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.tracing.structure import structure
from tests.multiprocess.runtime_cases import make_plan

Y = torch.randn(4, 3)


class Halting(nn.Module):
    """Returns its states until one is large: one or two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        y = torch.tanh(x @ self.weight)
        return [y, torch.tanh(y @ self.weight)] if x.max() > 4 else [y]


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halting, self.last = Halting(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(sum(self.halting(x)))
        return output


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute", [(), (0,)])
@pytest.mark.parametrize(("traced", "later"), [(1, 2), (2, 1)])
def test_a_layer_that_returns_another_number_of_values_ends_the_step(
    traced: int, later: int, recompute: tuple[int, ...]
) -> None:
    examples, other = (torch.zeros(4, 3), torch.full((4, 3), 5.0))[:: 1 if traced == 1 else -1]
    order = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]
    plan = make_plan(["halting", "last"], (1,), (0, 0), order, 2, 2, recompute=recompute)
    pipeline = Pipeline(Summing(), plan, loss=mse_loss, inputs=(examples,), check=False)
    pipeline.step(examples, target=Y)
    now, before = (", ".join(["tensor"] * count) for count in (later, traced))
    with pytest.raises(LayerFailed) as caught:
        pipeline.step(other, target=Y)
    assert str(caught.value) == (
        f"in the forward of micro-batch 0, layer 'halting' returned [{now}], and [{before}] "
        "when the model was traced: make it and what uses these one layer (`leaf_modules`)"
    )


def test_a_measured_layer_that_returns_another_number_of_values_is_told_in_the_same_words() -> None:
    x = torch.zeros(4, 3)
    model = trace(Summing(), (x,))
    training_pass = TrainingPass(model=model, loss=mse_loss, inputs=(x + 5,), target=Y, autocast=None)
    with pytest.raises(InvalidModel) as caught:
        InstrumentedModel(training_pass=training_pass, enter=lambda layer: None).forward()
    assert str(caught.value) == (
        "at micro-batch size 4, layer 'halting' returned [tensor, tensor], and [tensor] when the model was traced: make "
        "it and what uses these one layer (`leaf_modules`)"
    )


class Varying(nn.Module):
    """Returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.result: Callable[[Tensor], Any] = lambda y: y

    def forward(self, x: Tensor) -> Any:
        return self.result(x @ self.weight)


class Selecting(nn.Module):
    """Uses what its layer returns, or an entry of it."""

    def __init__(self, result: Callable[[Tensor], Any], key: int | str | None) -> None:
        super().__init__()
        self.varying, self.last, self.key = Varying(), nn.Linear(3, 3), key
        self.varying.result = result

    def forward(self, x: Tensor) -> Tensor:
        y = self.varying(x)
        output: Tensor = self.last(y if self.key is None else y[self.key])
        return output


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("first", "key", "later", "words"),
    [
        (lambda y: y, None, lambda y: [y], "a list, and a tensor in its first call"),
        (lambda y: y, None, lambda y: None, "None, and a tensor in its first call"),
        (lambda y: [y], 0, lambda y: y, "a tensor, and a list in its first call"),  # of which 0 is the first sample
        (lambda y: (y, y), 1, lambda y: (y,), r"\[tensor\], and one with the entry 1 when the model was traced"),
        (lambda y: {"a": y, "b": y}, "b", lambda y: {"a": y}, r"\{a: tensor\}, and one with the entry 'b' when"),
        (lambda y: (y, y), -1, lambda y: (y, y, y), None),
        (lambda y: y, 0, lambda y: 2 * y, None),
    ],
)
def test_another_kind_of_result_than_that_of_the_first_call_ends_the_step(
    first: Callable[[Tensor], Any], key: int | str | None, later: Callable[[Tensor], Any], words: str | None
) -> None:
    module = Selecting(first, key)
    order = [["0F0", "0B0", "0F1", "0B1"]]
    plan = make_plan(["varying", "last"], (), (0,), order, 2, 2)
    pipeline = Pipeline(
        module, plan, loss=lambda output, _: output.square().mean(), inputs=(torch.zeros(4, 3),), check=False
    )
    pipeline.step(torch.zeros(4, 3), target=Y)
    module.varying.result = later
    with nullcontext() if words is None else pytest.raises(LayerFailed, match=f"layer 'varying' returned {words}"):
        pipeline.step(torch.zeros(4, 3), target=Y)


def test_a_structure_says_what_is_where() -> None:
    one = torch.ones(())
    assert structure((one, [None, 3], {"a": one})) == ["tensor", ["None", "value"], {"a": "tensor"}]
    assert structure({"b": one, "a": None}) == structure({"a": None, "b": one})
    assert structure(()) != structure(((),))
