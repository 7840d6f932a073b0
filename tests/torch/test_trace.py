"""Modules as layers: names, tensors, defaults, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.trace import extract, trace


class Scaled(nn.Module):
    """An argument with a default, and one that is keyword-only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None, *, shift: int = 1) -> Tensor:
        y = self.a(x) * scale + shift
        return self.b(y if mask is None else y * mask)


def test_arguments_beyond_the_inputs_keep_their_defaults() -> None:
    module = Scaled()
    model = trace(module, 1)
    assert model.inputs == ("x",)
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, model.outputs)
    x = torch.randn(3, 4)
    assert torch.equal(whole(x)[0], module(x))


class SameName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Linear(4, 4)
        self.y = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.y(self.x(x) + x)


def test_an_input_may_have_a_layers_name() -> None:
    model = trace(SameName())
    assert model.inputs == ("input:x",)
    assert [(layer.name, layer.inputs, layer.outputs) for layer in model.layers] == [
        ("x", ("input:x",), ("x",)),
        ("y", ("x",), ("y",)),
    ]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.a(x))
        return self.relu(self.b(x) + x)


def test_an_operator_belongs_to_the_last_layer_that_feeds_it() -> None:
    model = trace(Residual())
    assert [(layer.name, layer.inputs) for layer in model.layers] == [
        ("a", ("x",)),
        ("relu", ("a",)),
        ("b", ("relu",)),
        ("relu#2", ("b",)),
    ]


def test_what_a_layer_changes_in_place_is_copied_at_a_cut() -> None:
    model = trace(Residual())
    stage = extract(model, ["relu#2"], ["b"], ["relu#2"])
    received = torch.tensor([-1.0, 1.0], requires_grad=True)
    assert stage(received)[0].tolist() == [0.0, 1.0]
    assert received.tolist() == [-1.0, 1.0]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else x


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.a(x)}


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Twice(), "layer 'a' has parameters and is called more than once; call a layer once"),
        (
            Branches(),
            "Branches cannot be traced: symbolically traced variables cannot be used as inputs to control flow",
        ),
        (Dictionary(), "the model must return a tensor, or a tuple of different tensors that its layers make"),
        (nn.Linear(2, 2), "the model calls no module of torch.nn, so it has no layers to cut between"),
    ],
)
def test_what_cannot_be_traced(module: nn.Module, message: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        trace(module)
    assert str(caught.value).startswith(message)
