"""Inputs by keyword, masks, None, numbers and flags: traced, profiled and trained as the module's own call of them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import bapipe
from bapipe.errors import InvalidModel
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.bound_inputs import Inputs, check_buckets, check_inputs, only_tensor_inputs, tensor_inputs
from bapipe.tracing.layers import trace
from tests.multiprocess.runtime_cases import make_plan


class Gated(nn.Module):
    """Takes tensors and constants in an order of its own; branches on constants only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        times: int = 1,
        mask: Tensor | None = None,
        *,
        gate: bool = False,
        kind: str = "tanh",
    ) -> Tensor:
        hidden = self.a(x)
        for _ in range(times):
            hidden = torch.tanh(hidden) if kind == "tanh" else torch.relu(hidden)
        if gate:
            hidden = hidden * self.b(x).sigmoid()
        if mask is not None:
            hidden = hidden * mask
        return self.head(hidden if bias is None else hidden + bias)


X, MASK = torch.randn(4, 4), torch.arange(4).repeat(4, 1) < torch.tensor([[4], [2], [3], [1]])
TARGET = torch.arange(4) % 3
BY_NAME: dict[str, object] = {"mask": MASK, "gate": True, "kind": "relu", "bias": None, "x": X, "times": 2}
BY_POSITION: Inputs = (X, None, 2, MASK)


@pytest.mark.parametrize("inputs", [BY_NAME, BY_POSITION], ids=["by name", "by position"])
def test_the_forward_takes_the_tensors_in_order_and_layers_keep_their_names(inputs: Inputs) -> None:
    module = Gated()
    want = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    with only_tensor_inputs(module, inputs) as tensors:
        assert type(module).__name__ == "Gated"
        assert torch.equal(module(*tensors), want)
        model = trace(module, tensors)
    assert type(module) is Gated
    assert model.inputs == (("mask", "x") if isinstance(inputs, dict) else ("x", "mask"))
    assert [layer.name for layer in model.layers] == (["a", "b", "head"] if isinstance(inputs, dict) else ["a", "head"])
    assert [id(tensor) for tensor in tensors] == [id(tensor) for tensor in tensor_inputs(inputs)]


@pytest.mark.usefixtures("alone")
def test_a_module_with_inputs_by_keyword_is_profiled_and_trained() -> None:
    torch.manual_seed(0)
    whole = Gated().double()
    inputs = {**BY_NAME, "x": X.double()}
    profile = measure_model(
        whole, inputs, TARGET, cross_entropy, ProfileOptions(microbatch_sizes=[2], seconds_per_size=0.1), name="gated"
    )
    assert profile.layers[0].inputs == ("x",)
    part = copy.deepcopy(whole)
    order = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]
    pipeline = Pipeline(
        part, make_plan(["a", "b", "head"], (1,), (0, 0), order, 2, 2), loss=cross_entropy, inputs=inputs,
        optimizer=sgd(0.1),
    )  # fmt: skip
    assert pipeline.input_names == ("mask", "x")
    got = pipeline.step(MASK, X.double(), target=TARGET)
    want = cross_entropy(whole(**inputs), TARGET)
    assert got == pytest.approx(want.item(), abs=1e-12)
    want.backward()
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)


def test_inputs_without_a_tensor_are_refused() -> None:
    with pytest.raises(InvalidModel, match=r"^none of the example inputs is a tensor: give an example"):
        check_inputs(Gated(), {"x": None, "gate": True})
    with pytest.raises(InvalidModel, match=r"^input 'x' is \[1, 2\] \(list\); examples must be tensors, batch first"):
        bapipe.profile(Gated(), {"x": [1, 2]}, TARGET, cross_entropy)


def test_one_tensor_instead_of_a_tuple_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"one tensor of shape \[1, 8\]: put it in a tuple, as in \(tensor,\)"):
        check_inputs(nn.Linear(8, 8), torch.zeros(1, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((X, X), r"those of Linear, whose forward takes \(input\): too many positional arguments"),
        ({"nope": X}, r"those of Linear, whose forward takes \(input\): missing a required argument: 'input'"),
        (None, r"^the example inputs are None \(NoneType\): want a tuple of them"),
        (iter([X]), r"\(list_iterator\): want a tuple of them"),
    ],
)
def test_inputs_that_the_forward_does_not_take_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        check_inputs(nn.Linear(8, 8), inputs)


@pytest.mark.parametrize(
    ("bucket", "found"), [(X, "a Tensor"), ((X, X), "2 tensors"), ({"input": X}, "a dict"), ((None,), "a tuple")]
)
def test_buckets_have_an_example_of_each_input(bucket: Any, found: str) -> None:
    check_buckets([(X,)], 1)
    with pytest.raises(InvalidModel, match=f"^bucket 1 is {found}: want a tuple of 1, one for each input"):
        check_buckets([(X,), bucket], 1)


def test_an_argument_may_have_any_name() -> None:
    class Calls(nn.Linear):
        def forward(self, call: Tensor, scale: float = 1.0) -> Tensor:
            return scale * super().forward(call)

    module, x = Calls(4, 3), torch.randn(2, 4)
    with only_tensor_inputs(module, (x, 2.0)) as tensors:
        assert torch.equal(module(*tensors), 2 * functional.linear(x, module.weight, module.bias))
