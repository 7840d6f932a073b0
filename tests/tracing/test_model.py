"""Modules as layers: names, tensors, defaults, and what is refused."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.torch_private.tensors import quiet_fake_tensors, tree_flatten
from bapipe.tracing.extract import extract
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.model import TracedModel, layer_states
from bapipe.tracing.stages import cut_into_stages


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
    model = trace(module, [torch.zeros(1, 4)])
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


def test_a_tensor_changed_in_place_is_copied_at_a_cut() -> None:
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


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.a(x)
        return {"out": (self.b(y), None), "hidden": [y, y]}


class Quiet(nn.Module):
    """Runs a layer where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.a(x).relu()
        return self.b(y) + self.a(x)


class Looks(Quiet):
    """Also looks at its input, which torch.fx cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return super().forward(x) if isinstance(x.shape[1], int) else x


@pytest.mark.parametrize("module", [Quiet(), Looks()], ids=["fx", "export"])
def test_regions_without_gradients_stay_so(module: nn.Module) -> None:
    x = torch.randn(3, 4)
    model = trace(module, [x])
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, model.outputs)
    (got,) = whole(x)
    want = module(x)
    assert torch.equal(got, want)
    mine = torch.autograd.grad(got.sum(), list(module.parameters()))
    assert all(map(torch.equal, mine, torch.autograd.grad(want.sum(), list(module.parameters()))))
    assert torch.is_grad_enabled()


class Gate(nn.Module):
    """Branches on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else x


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(4, 4), Gate(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


def test_a_module_that_cannot_be_followed_is_one_layer() -> None:
    module = Gated()
    model = trace(module, [torch.zeros(2, 4)])
    assert [(layer.name, layer.kind) for layer in model.layers] == [
        ("first", "Linear"), ("gate", "Gate"), ("last", "Linear"),
    ]  # fmt: skip
    whole = extract(model, [layer.name for layer in model.layers], model.inputs, model.outputs)
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        assert torch.equal(whole(x)[0], module(x))


def test_modules_can_be_taken_whole() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    assert [layer.name for layer in trace(module, leaf_modules=["0"]).layers] == ["0", "1"]
    assert granularity(module, ["0", "1", "loss"]) == (["0"], [], False)
    with pytest.raises(InvalidModel, match=r"^Sequential has no module 'x\.\*' to take as one layer$"):
        trace(module, leaf_modules=["x.*"])


def test_operators_can_be_layers() -> None:
    module = Residual()
    model = trace(module, operator_layers=True)
    names = [layer.name for layer in model.layers]
    assert names == ["a", "relu", "b", "op:add", "relu#2"]
    assert model.layers[3].inputs == ("b", "relu")
    assert granularity(module, names) == ([], [], True)
    last = extract(model, ["op:add", "relu#2"], ["b", "relu"], ["relu#2"])
    assert torch.equal(last(torch.tensor([1.0]), torch.tensor([-3.0]))[0], torch.tensor([0.0]))


class Masking(nn.Module):
    """Makes a mask from an input, which two layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, length: Tensor) -> Tensor:
        mask = (torch.arange(4) < length.unsqueeze(1)).float()
        return self.b(self.a(x) * mask) * mask


class Routed(nn.Module):
    """Reads values, so that it is one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y if float(y.detach().abs().max()) < 100 else y / 2


class Bounded(nn.Module):
    """Writes to a parameter of its own: torch.fx makes it one layer, whereas recording looks into it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.clamp_(max=4.6)
        y: Tensor = self.inner(x) * self.scale.exp()
        return y


def test_the_layers_of_a_profile_are_found_again_by_whichever_way_had_found_them() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Bounded(), Routed(), nn.Linear(4, 2))
    names = [layer.name for layer in trace(module, [torch.randn(3, 4)]).layers]
    leaf_modules, _, operator_layers = granularity(module, names)
    again = trace(module, [torch.randn(3, 4)], leaf_modules=leaf_modules, operator_layers=operator_layers, layers=names)
    assert [layer.name for layer in again.layers] == names == ["0", "1.inner", "2", "3"]
    other = trace(module, [torch.randn(3, 4)], leaf_modules=leaf_modules)
    assert [layer.name for layer in other.layers] == ["0", "1", "2", "3"]


def test_layers_that_read_only_inputs_run_on_the_stage_that_uses_them() -> None:
    model = trace(Masking(), [torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)])
    assert [(layer.name, layer.inputs, layer.outputs) for layer in model.layers] == [
        ("a", ("x", "length"), ("a",)),
        ("b", ("a", "length"), ("b",)),
    ]
    stage = extract(model, ["b"], ["a", "length"], ["b"])
    assert stage(torch.ones(2, 4), torch.tensor([1, 0]))[0][:, 1:].abs().sum() == 0


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Branches(),
            "Branches cannot be traced: symbolically traced variables cannot be used as inputs to control flow",
        ),
        (nn.Identity(), "Identity has no layers: it calls no modules, and computes nothing from its parameters"),
    ],
)
def test_untraceable_models_are_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        trace(module)
    assert str(caught.value).startswith(message)


class Pair(NamedTuple):
    scores: Tensor
    size: int


class Returning(nn.Module):
    """A layer, and a result made of what it computes by a function."""

    def __init__(self, result: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.result = nn.Linear(3, 3), result

    def forward(self, x: Tensor) -> Any:
        return self.result(self.layer(x), x)


@pytest.mark.parametrize(
    "result",
    [
        lambda y, x: (None, y, y, y[:, :2]),
        lambda y, x: {"input": x, "half": x / 2, "scores": y},
        lambda y, x: [Pair(y, 3), torch.arange(2.0), "text"],
    ],
)
def test_results_are_put_together_as_the_forward_does(result: Callable[[Tensor, Tensor], Any]) -> None:
    module, x = Returning(result), torch.randn(2, 3)
    for inputs in (None, [x]):
        assert_gives_the_same(trace(module, inputs), module, x)


def assert_gives_the_same(model: TracedModel, module: nn.Module, x: Tensor) -> None:
    outputs = model.module(x)
    assert all(isinstance(output, Tensor) for output in outputs)
    (got, nested), (want, as_wanted) = tree_flatten(model.result.rebuild(outputs)), tree_flatten(module(x))
    assert nested == as_wanted
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b


@pytest.mark.parametrize(
    "result",
    [
        lambda y, x: y.chunk(3, 1),
        lambda y, x: y.max(1),
        lambda y, x: {"best": y.topk(2), "input": x},
        lambda y, x: (y, y.shape[1]),
    ],
)
def test_tuples_of_operators_and_constant_sizes_may_be_returned(result: Callable[[Tensor, Tensor], Any]) -> None:
    module, x = Returning(result), torch.randn(2, 3)
    assert_gives_the_same(trace(module, [x]), module, x)


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (lambda y, x: (y, x.shape[0]), "int"),
        (lambda y, x: {"scores": y, "half": y.shape[0] / 2}, "float"),
        (lambda y, x: (y, y.shape), "Size"),
    ],
)
def test_numbers_that_depend_on_the_batch_cannot_be_returned(
    result: Callable[[Tensor, Tensor], Any], kind: str
) -> None:
    said = rf"^the model returns '\w+', of type {kind}, which is neither a tensor of its layers nor a constant: return"
    with pytest.raises(InvalidModel, match=said):
        trace(Returning(result), [torch.randn(2, 3)])


def test_numbers_that_depend_on_values_cannot_be_returned() -> None:
    module, x = Returning(lambda y, x: (y, y.mean().item())), torch.randn(2, 3)
    with pytest.raises(
        InvalidModel, match=r"^the model returns 'layer:item', of type float, which is neither a tensor"
    ):
        cut_into_stages(trace(module, [x]), {"layer": 0}, [x], 2)


def test_a_module_that_calls_no_others_is_one_layer() -> None:
    model = trace(nn.Linear(2, 3), [torch.zeros(1, 2)])
    assert [(layer.name, layer.inputs, layer.outputs) for layer in model.layers] == [
        ("Linear", ("input",), ("Linear",))
    ]
    assert set(layer_states(model)["Linear"]) == {"weight", "bias"}


class OnOneMemory(nn.Module):
    """Two layers, and optionally a buffer or a second parameter on the memory of a weight."""

    def __init__(self, what: str = "") -> None:
        super().__init__()
        memory = torch.zeros(2, 4, 4)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.weight, self.b.weight = nn.Parameter(memory[0]), nn.Parameter(memory[1])  # one storage, apart in it
        if what == "parameter":
            self.b.weight = nn.Parameter(self.a.weight.data.view(4, 4))
        if what == "frozen parameter":
            self.b.weight = nn.Parameter(self.a.weight.data, requires_grad=False)
        if what == "tied":
            self.b.weight = self.a.weight
        self.register_buffer("seen", self.a.weight.data[1:] if what == "buffer" else torch.zeros(3, 4))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x)) @ self.seen.T
        return y


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("parameter", r"'b\.weight' share memory.* assign the same nn\.Parameter"),
        ("frozen parameter", r"'b\.weight' share memory"),
        ("buffer", "buffer 'seen' share memory"),
    ],
)
def test_a_tensor_on_the_memory_of_a_trained_parameter_is_refused(what: str, said: str) -> None:
    with pytest.raises(InvalidModel, match=r"^parameter 'a\.weight' and .*" + said):
        trace(OnOneMemory(what))


def test_tied_parameters_and_parts_of_one_memory_are_not_refused() -> None:
    for what in ("", "tied"):
        assert [layer.name for layer in trace(OnOneMemory(what)).layers] == ["a", "b"]
    with torch.device("meta"):
        assert [layer.name for layer in trace(OnOneMemory()).layers] == ["a", "b"]


class ChangesLate(nn.Module):
    """Changes, before anything else, what only later layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.b.weight.data.clamp_(-0.1, 0.1)
        y: Tensor = self.c(self.b(self.a(x)).tanh() / self.calls.sqrt())
        return y


def test_a_change_of_state_belongs_to_the_layer_that_reads_it() -> None:
    model = trace(ChangesLate(), [torch.zeros(2, 6)])
    places = {node.name: layer for node, layer in model.layer_of.items()}
    assert {name: places[name] for name in ("add_", "clamp_", "sqrt")} == {"add_": "b", "clamp_": "b", "sqrt": "b"}
    assert not model.replicated


class Neighbours(nn.Module):
    """Finds neighbours among inputs that it masks in place, as graph networks do; they are used by several layers."""

    def __init__(self, find: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.find = nn.Linear(6, 6), nn.Linear(6, 6), find

    def forward(self, x: Tensor) -> Tensor:
        distances = x.clone()
        distances.masked_fill_(distances < 0, 0.0)
        values, places = self.find(distances)
        y: Tensor = self.b(self.a(x).gather(1, places.long())) * values
        return y


@pytest.mark.parametrize("find", [lambda x: x.topk(6), lambda x: x.sort(-1), lambda x: x.view(-1, 6, 1).max(-1)])
def test_results_of_an_operator_on_changed_inputs_may_be_used_by_several_layers(find: Callable[[Tensor], Any]) -> None:
    module, x = Neighbours(find), torch.randn(3, 6)
    model = trace(module, [x])
    layers = [layer.name for layer in model.layers]
    first = extract(model, layers[:1], model.inputs, model.layers[0].outputs)(x)
    assert all(isinstance(value, Tensor) for value in first)
    second = extract(model, layers[1:], model.layers[1].inputs, model.outputs)
    given = dict(zip(model.layers[0].outputs, first, strict=True)) | {"x": x}
    assert torch.equal(second(*(given[name] for name in model.layers[1].inputs))[0], module(x))


class FromTwelve(nn.Module):
    """Does something else for more than twelve samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh() if len(x) <= 12 else self.a(x))
        return y


def test_code_that_is_another_at_the_size_of_the_micro_batches_is_not_cut() -> None:
    inputs = [torch.zeros(2, 6)]
    assert [layer.name for layer in trace(FromTwelve(), inputs, microbatch_size=8).layers] == ["a", "b"]
    with pytest.raises(
        InvalidModel, match=r"^FromTwelve cannot be traced: what the forward calls depends on the batch"
    ):
        trace(FromTwelve(), inputs, microbatch_size=16)
    model = trace(nn.Sequential(nn.Linear(6, 6), FromTwelve()), inputs, microbatch_size=16)
    assert [layer.name for layer in model.layers] == ["0", "1"]


class SizeAlone(nn.Module):
    """One layer reads nothing of the batch but its size."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.first, self.b = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first(torch.ones(x.size(0), 6))
        y: Tensor = self.b(self.a(x) + state)
        return y


def test_a_layer_that_needs_the_batch_size_alone_loads_an_input() -> None:
    model = trace(SizeAlone(), [torch.zeros(2, 6)])
    assert {layer.name: layer.inputs for layer in model.layers} == {"first": ("x",), "a": ("x", "first"), "b": ("a",)}


def test_torch_says_nothing_of_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a recurrent layer on a GPU is a bug of the user's, and tracebacks of errors that are dealt with."""
    log, written = logging.getLogger("torch._subclasses.fake_tensor"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(log, "handlers", [handler])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet_fake_tensors():
            warnings.warn("Accessing the data pointer of FakeTensor is deprecated", stacklevel=1)
            warnings.warn("another", stacklevel=1)
            log.error("failed")
        warnings.warn("Accessing the data pointer of FakeTensor is deprecated", stacklevel=1)
        log.error("failed later")
    assert [str(each.message).split()[0] for each in seen] == ["another", "Accessing"]
    assert written == ["failed later"]
