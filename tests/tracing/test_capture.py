"""The three ways to capture a graph."""

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

import bapipe
from bapipe.errors import InvalidModel
from bapipe.tracing.capture import capture
from bapipe.tracing.fx_capture import TracingFailed, capture_with_fx
from bapipe.tracing.layer_choice import LayerChoice


class Branches(nn.Module):
    """Branches on its input's values through a module, so torch.fx fails inside `inner`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * 2


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum() > 0 else -y


def test_calls_of_one_module_are_numbered() -> None:
    linear = nn.Linear(2, 2)
    captured = capture(nn.Sequential(linear, linear), (torch.zeros(1, 2),), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["0", "0#2"] or list(captured.layer_of_call.values()) == ["0", "1"]
    assert set(captured.kinds.values()) == {"Linear"}


def test_a_module_in_which_tracing_fails_becomes_a_leaf() -> None:
    captured = capture(Branches(), (torch.zeros(1, 2),), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["inner"]
    assert captured.kinds == {"inner": "Inner"}


def test_layers_are_modules_of_torch_or_without_children() -> None:
    assert LayerChoice().is_layer(nn.MultiheadAttention(2, 1), "a")
    assert not LayerChoice().is_layer(nn.Sequential(nn.ReLU()), "a")
    assert LayerChoice(leaf_modules=frozenset({"a"})).is_layer(nn.Sequential(nn.ReLU()), "a")
    assert not LayerChoice().is_layer(Inner(), "a")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.scale


def test_a_parametrized_module_of_the_users_is_cut_inside_and_one_of_torch_is_not() -> None:
    module = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), Scaled())
    parametrize.register_parametrization(module[1], "scale", nn.ReLU())
    captured = capture(module, (torch.zeros(1, 2),), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["0", "1.linear", "1.parametrizations.scale.0"]


class StarArguments(nn.Module):
    """Takes any number of tensors, and options that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, *tensors: Tensor, **options: object) -> Tensor:
        y: Tensor = self.linear(torch.cat(tensors))
        return y


class UnusedOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_any_number_of_arguments() -> None:
    x = torch.zeros(1, 2)
    inputs = [
        node.target
        for node in capture(StarArguments(), (x, x), LayerChoice()).module.graph.nodes
        if node.op == "placeholder"
    ]
    assert inputs == ["tensors_0", "tensors_1"]
    inputs = [
        node.target
        for node in capture(UnusedOptions(), (x,), LayerChoice()).module.graph.nodes
        if node.op == "placeholder"
    ]
    assert inputs == ["x"]


def test_an_input_may_have_the_name_of_another_argument_and_a_number() -> None:
    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x_1: Tensor, x: Tensor | None = None) -> Tensor:
            y: Tensor = self.linear(x_1)
            return y if x is None else y + x

    x, module = torch.rand(1, 2), Numbered()
    captured = capture(module, (x,), LayerChoice())
    torch.testing.assert_close(captured.module(x)[0], module(x))


def test_a_scripted_part_is_refused_if_it_has_parameters() -> None:
    x = torch.zeros(1, 2)
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(
        InvalidModel, match=r"^module '1' is scripted by torch\.jit, .* give the module that it was made"
    ):
        capture(nn.Sequential(nn.Linear(2, 2), scripted), (x,), LayerChoice())
    activation = torch.jit.script(nn.Tanh())
    model = nn.Sequential(nn.Linear(2, 2), activation)
    torch.testing.assert_close(capture(model, (x,), LayerChoice()).module(x)[0], model(x))


def script_method(method: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Returns what torch.jit's decorator of this name does; it reads the source, in which mypy's comments disturb it."""
    scripted: Callable[[Any, Tensor], Tensor] = vars(torch.jit)["script_method"](method)
    return scripted


class Scripted(torch.jit.ScriptModule):
    """A class that is scripted wherever it is made, as those of some repositories are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    @script_method
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return y


@pytest.mark.parametrize("around", [lambda module: module, lambda module: nn.Sequential(module)])
def test_classes_that_are_scripted_are_told_how_to_be_none(around: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(
        InvalidModel, match=r"scripted by torch\.jit, .*: its class Scripted is .*; set PYTORCH_JIT=0 in"
    ):
        capture(around(Scripted()), (torch.zeros(1, 2),), LayerChoice())


def test_without_torch_jit_such_classes_have_layers() -> None:
    code = (
        "import torch; from tests.tracing.test_capture import Scripted; from bapipe.tracing.layers import trace; "
        "print([layer.name for layer in trace(Scripted(), [torch.zeros(1, 2)]).layers])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTORCH_JIT": "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert found.stdout.split("\n")[0] == "['a', 'b']"


@pytest.mark.parametrize(("whole", "name"), [(True, "the module"), (False, "module '1'")])
def test_what_torch_export_made_is_refused_before_it_is_asked_to_train(*, whole: bool, name: str) -> None:
    x = torch.zeros(2, 2)
    exported = torch.export.export(nn.Sequential(nn.Linear(2, 2)), (x,)).module()
    module = exported if whole else nn.Sequential(nn.Linear(2, 2), exported)
    with pytest.raises(InvalidModel) as caught:
        bapipe.profile(module, (x,), x, nn.functional.mse_loss)
    assert str(caught.value) == (
        f"{name} was made by torch.export, so it has no layers to cut between, nor a training mode: give the module that "
        "it was made from"
    )


def test_a_module_named_as_a_later_call_is_refused() -> None:
    module = nn.Sequential(OrderedDict([("a", nn.Linear(2, 2)), ("a#2", nn.Linear(2, 2))]))
    with pytest.raises(
        InvalidModel, match=r"^module 'a#2' has a '#' in its name, which marks the later calls of a module: rename it$"
    ):
        capture(module, (torch.zeros(1, 2),), LayerChoice())


def _branch_on_rows(self: Any, x: Tensor) -> Tensor:
    return x / len(x) ** 0.5


def _rows(self: Any, x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in self.first(x)])


def _value(self: Any, x: Tensor) -> Tensor:
    return self.first(x) * int(x.sum())


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_branch_on_rows, r"an argument is 2\.2\d+ or 2\.6\d+, depending on the batch size"),
        (_rows, "what the forward calls depends on the batch size"),
        (_value, "it uses values of tensors, which are not known while it is traced"),
    ],
)
def test_a_refusal_names_the_line_of_the_models_code(forward: Callable[..., Tensor], reason: str) -> None:
    model = type("Own", (nn.Module,), {"forward": forward})()
    model.first = nn.Linear(2, 2)
    line = forward.__code__.co_firstlineno + 1
    with pytest.raises(
        InvalidModel, match=rf"^Own cannot be traced: {reason} \({__name__}, line {line}: return .*\); put"
    ):
        capture(model, (torch.zeros(1, 2),), LayerChoice())


class Cache:
    """An object of Python that holds tensors, as caches of keys and values do."""

    keys: Tensor


class ReadsAndTakesACache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = self.linear(x)
        return (-y if y.sum() > 0 else y) + cache.keys


class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ReadsAndTakesACache()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = self.inner(x, cache)
        return y * 2


class MakesACache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(2, 2), HandsOn()

    def forward(self, x: Tensor) -> Tensor:
        x, cache = self.first(x), Cache()
        cache.keys = x
        y: Tensor = self.block(x, cache)
        return y


def test_a_call_of_a_layer_that_a_graph_cannot_hold_fails_in_the_code_around_it() -> None:
    """What failed is the call, not the layer: to take that as one layer once more would change nothing, for ever."""
    module = MakesACache()
    for leaf, around in (("block.inner", "block"), ("block", "")):
        with pytest.raises(TracingFailed) as failed:
            capture_with_fx(module, 1, LayerChoice(leaf_modules=frozenset({leaf})))
        assert failed.value.path == around
    with pytest.raises(InvalidModel, match=r"^MakesACache cannot be traced: a Cache that holds tensors is an argument"):
        capture(module, (torch.zeros(1, 2),), LayerChoice())


class TriesAnArgument(nn.Module):
    """Gives each part an argument that not all of them take, as containers of several libraries do."""

    def __init__(self, *, asks_size: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList((nn.Linear(2, 2), Scales(), Inside()))
        self.asks_size = asks_size

    def forward(self, x: Tensor) -> Tensor:
        if self.asks_size and len(x) == 0:  # which torch.fx cannot tell
            return x
        for part in self.parts:
            try:
                x = part(x, scale=3.0)
            except TypeError:
                x = part(x)
        return x


class Scales(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("asks_size", [False, True])
def test_a_layer_that_does_not_take_an_argument_raises_as_in_training(asks_size: bool) -> None:
    module = TriesAnArgument(asks_size=asks_size)
    x = torch.randn(2, 2)
    captured = capture(module, (x,), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["parts.0", "parts.1", "parts.2.linear"]
    expected = module.parts[2](3 * module.parts[0](x))
    assert torch.equal(captured.module(x)[0], expected)


class TriesThenFails(TriesAnArgument):
    def __init__(self) -> None:
        super().__init__(asks_size=False)
        self.last = Inner()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(super().forward(x))
        return y


def test_what_fails_behind_a_call_that_was_caught_is_one_layer() -> None:
    with pytest.raises(TracingFailed) as failed:
        capture_with_fx(TriesThenFails(), 1, LayerChoice())
    assert failed.value.path == "last"


def test_a_call_with_an_argument_less_fails_as_python_says() -> None:
    with pytest.raises(InvalidModel, match=r"Linear\.forward\(\) missing a required argument: 'input'"):
        capture(Forgets(), (torch.zeros(2, 2),), LayerChoice())


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear()
        return y


class AsksClasses(nn.Module):
    """What it does depends on the classes of what its layers return."""

    def __init__(self, is_a: Callable[[Any, Any], bool]) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Linear(2, 2), ReturnsTwo(), nn.Linear(2, 2)
        self.is_a = is_a

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = 3 * y if self.is_a(y, Tensor) else y
        pair = self.two(y)
        y = pair[1] if self.is_a(pair, tuple) else pair
        z: Tensor = self.last(y if self.is_a(y, Sequence) else 2 * y)
        return z


class ReturnsTwo(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, 5 * x


@pytest.mark.parametrize("is_a", [isinstance, lambda value, cls: any(isinstance(one, cls) for one in [value])])
def test_a_value_is_of_the_class_that_it_has_in_training(is_a: Callable[[Any, Any], bool]) -> None:
    module, x = AsksClasses(is_a), torch.randn(2, 2)
    captured = capture(module, (x,), LayerChoice())
    assert list(dict.fromkeys(captured.layer_of_call.values())) == ["one", "two", "last"]
    torch.testing.assert_close(captured.module(x)[0], module.last(30 * module.one(x)))
    with pytest.raises(TracingFailed, match="it asks of which class a value is"):
        capture_with_fx(module, 1, LayerChoice())


class AsksByJit(nn.Module):
    """What is scripted asks so, with types such as `list[Tensor]`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.one(x)
        z: Tensor = self.last(3 * y if torch.jit.isinstance(y, Tensor) else y)
        return z


def test_a_value_has_its_class_for_torch_jit() -> None:
    module, x = AsksByJit(), torch.randn(2, 2)
    captured = capture(module, (x,), LayerChoice())
    torch.testing.assert_close(captured.module(x)[0], module.last(3 * module.one(x)))


class CallsTorch(nn.Module):
    """Functions of torch ask for classes themselves, which is no reason to record a model."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("ij,ij->ij", self.one(x), x)
        return functional.dropout(functional.layer_norm(y, (2,)), 0.0) + torch.stack([y, y]).sum(0)


def test_code_of_torch_that_asks_for_classes_is_traced_by_fx() -> None:
    assert list(capture_with_fx(CallsTorch(), 1, LayerChoice()).layer_of_call.values()) == ["one"]
