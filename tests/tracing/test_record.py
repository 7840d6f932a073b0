"""Capturing by recording: the graph computes what the module's own code does, at every batch size."""

import copy
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet, Distribution, Exponential, Normal, kl_divergence
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bapipe.errors import InvalidModel
from bapipe.torch_private.tensors import FakeTensor
from bapipe.tracing.capture import capture
from bapipe.tracing.captured import NO_GRAD, Captured
from bapipe.tracing.extract import extract
from bapipe.tracing.fx_capture import TracingFailed
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.layers import trace
from bapipe.tracing.recorded_capture import capture_by_recording


class Code(nn.Module):
    """Two layers with code between them."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.b(self.between(self, self.a(x)))


class Scaled(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grads[0], None


scaled = Scaled.apply  # as libraries do, at import


def _by_batch(self: Any, x: Tensor) -> Tensor:
    rows, width = x.shape
    return x.view(rows * 2, width // 2).flip(1).reshape(rows, width) + torch.zeros(2 * rows + 1).size(0)


def _in_place(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 1
    y[:, 1:3].mul_(3)
    y += 1
    return y


def _without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean()
    return x / scale


def _skipped(self: Any, x: Tensor) -> Tensor:
    """What layer drop with probability 0 does."""
    return x * 0 if torch.rand([]) < 0.0 else x.tanh()


def _split(self: Any, x: Tensor) -> Tensor:
    parts = x.chunk(3, dim=1)
    largest = torch.max(parts[1], dim=1)
    return torch.cat([parts[2], largest.values[:, None] * parts[0], x[:, :2]], dim=1)


def _hooked(self: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 5)
    return y.sin()


def _operators(self: Any, x: Tensor) -> Tensor:
    """Some are methods whose `__name__` is not the name under which a tensor has them."""
    y = x**2 + 2**x + 1 / (3 + x.abs()) - x % 2
    y **= 2
    return (1 - y) ** torch.ones((), dtype=x.dtype)


CODE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sizes": _by_batch,
    "in place": _in_place,
    "layer drop": _skipped,
    "several results": _split,
    "hook": _hooked,
    "operators": _operators,
    "number of numpy": lambda self, x: x.sin() / numpy.sqrt(6),
    "autograd function": lambda self, x: Scaled.apply(x.sin(), 3.0),
    "autograd function, apply taken before": lambda self, x: scaled(x.sin(), 3.0),
    "checkpoint": lambda self, x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False),
    "reentrant checkpoint": lambda self, x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=True),
    "buffer and parameter": lambda self, x: (x - self.mean) @ self.a.weight.T,
    "constants": lambda self, x: x * torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=x.dtype) if torch.ones(()).item() else x,
}


def _trained(run: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    output = run(x)
    output.square().sum().backward()
    grads = (parameter.grad for parameter in module.parameters())
    return [output.detach(), *(grad.clone() for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("rows", [2, 9])
def test_the_graph_computes_what_the_code_does(name: str, rows: int) -> None:
    torch.manual_seed(0)
    module = Code(CODE[name]).double()
    before = copy.deepcopy(module.state_dict())
    captured = capture_by_recording(module, (torch.zeros(3, 6, dtype=torch.float64),), LayerChoice())
    assert not captured.leaf_reasons
    assert list(captured.layer_of_call.values()) == ["a", "b"]
    x = torch.randn(rows, 6, dtype=torch.float64)
    want = _trained(module, module, x)
    got = _trained(lambda x: captured.module(x)[0], captured.module, x)
    assert len(got) == len(want) == 5
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.state_dict(), before)


def test_where_gradients_are_off() -> None:
    graph = capture_by_recording(Code(_without_gradients), (torch.zeros(3, 6),), LayerChoice()).module.graph
    assert [node.name for node in graph.nodes if node.meta.get(NO_GRAD)] == ["abs_1", "mean"]


class Nested(nn.Module):
    """A module whose code may or may not be recorded."""

    def __init__(self, between: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), Code(between), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def _captured(between: Callable[[Any, Tensor], Any]) -> Captured:
    return capture_by_recording(Nested(between), (torch.zeros(3, 6),), LayerChoice())


def _writes_to_buffer(self: Any, x: Tensor) -> Tensor:
    self.mean.mul_(0.9).add_(x.detach().mean(0))
    return x


def _says_that_it_needs_values(self: Any, x: Tensor) -> Tensor:
    if isinstance(x, FakeTensor) or x.is_meta:
        raise ValueError("\n  it needs values\nof x")
    return x


DRAWN = "a random number that it draws decides what it does"
VALUES = (
    "it cannot be traced: it uses values of tensors, which are not known while it is traced (tests.tracing.test_record"
)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda self, x: x if x.sum() > 0 else -x, VALUES),
        (lambda self, x: x[x[:, 0] > 0].sum(0) + x, VALUES),
        (lambda self, x: x * 0 if torch.rand([]) < 0.5 else x, DRAWN),
        # What the smallest and the largest draw have in common.
        (lambda self, x: x * 0 if torch.rand([]) < torch.rand([]) else x, DRAWN),
        (lambda self, x: x * 0 if (torch.rand([]) - 0.5).abs() < 0.02 else x, DRAWN),
        (lambda self, x: x * int(torch.rand(4).argmax()), DRAWN),
        (lambda self, x: x * 0 if torch.rand([]) == 0.5 else x, DRAWN),
        (lambda self, x: x * 0 if torch.rand([]).sub_(0.5) > 1.0 else x, DRAWN),
        (lambda self, x: x * (1 / len(x)), "an argument is 0.2 or "),
        (lambda self, x: torch.vmap(lambda row: row * 2)(x), "vmap"),
        (_writes_to_buffer, "'inner.mean' is changed"),
        (_says_that_it_needs_values, "it fails on tensors without values: ValueError: it needs values (tests."),
        (lambda self, x: x if random.random() < 2 else -x, "it cannot be traced: its forward draws random numbers"),
        (lambda self, x: x if random.random() < 2 and x.sum() > 0 else -x, VALUES),
    ],
)
def test_a_module_that_cannot_be_recorded_becomes_a_leaf(between: Callable[[Any, Tensor], Any], reason: str) -> None:
    captured = _captured(between)
    assert list(captured.layer_of_call.values()) == ["first", "inner", "last"]
    assert list(captured.leaf_reasons) == ["inner"]
    assert reason in captured.leaf_reasons["inner"].text


class Drawing(Nested):
    """Draws a number in Python, around a module that cannot be recorded either."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def test_only_the_outermost_of_nested_leaves_has_a_reason() -> None:
    module = nn.Sequential(Drawing(lambda self, x: x if x.sum() > 0 else -x), nn.Linear(6, 6))
    captured = capture_by_recording(module, (torch.zeros(3, 6),), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["0", "1"]
    assert list(captured.leaf_reasons) == ["0"]
    assert captured.leaf_reasons["0"].text == "it cannot be traced: its forward draws random numbers in Python"


class Images(nn.Module):
    """Puts rows of images in the places of words that stand for them, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        self.calls += 1
        places = words == 7
        if int(places.sum()) != len(images.flatten(0, 1)):
            raise ValueError(f"{places.sum()} places for {len(images.flatten(0, 1))} images")
        return self.words(words).masked_scatter(places[..., None].expand(-1, -1, 6), images)


class Resized(nn.Module):
    """Crops images to as many rows as the largest word says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        return self.scale * functional.adaptive_avg_pool2d(images[:, None], (int(words.max()) - 4, 6))[:, 0]


class WordsAndImages(nn.Module):
    def __init__(self, merge: nn.Module) -> None:
        super().__init__()
        self.merge, self.last = merge, nn.Linear(6, 6)

    def forward(self, words: Tensor, images: Tensor) -> Tensor:
        merged = self.merge(words, images)
        return self.last(merged.view(len(words), -1, 6))  # torch.fx does not know a length


@pytest.mark.parametrize(("kind", "num_rows"), [(Images, 4), (Resized, 3)])
def test_layers_that_need_values_get_those_of_the_examples(kind: type[nn.Module], num_rows: int) -> None:
    module = WordsAndImages(kind())
    before = copy.deepcopy(module.state_dict())
    words, images = torch.tensor([[1, 7, 7, 0], [7, 2, 3, 7]]), torch.randn(2, 2, 6)
    captured = capture_by_recording(module, (words, images), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["merge", "last"]
    assert captured.sizes is not None
    shapes = {call: shape.dims for call, (shape, _) in captured.sizes.items() if call in captured.layer_of_call}
    assert list(shapes.values()) == [(5, num_rows, 6), (5, num_rows, 6)]
    torch.testing.assert_close(module.state_dict(), before)
    assert torch.equal(captured.module(words, images)[0], module(words, images))


class ReadsValues(nn.Module):
    """A layer that needs values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if float(x.detach().sum()) < 1e9 else x


class ChangedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.reads, self.relu, self.last = (
            nn.Linear(6, 6),
            ReadsValues(),
            nn.ReLU(inplace=True),
            nn.Linear(6, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.dim() != 2:  # torch.fx does not know
            raise ValueError("want rows")
        z: Tensor = self.last(self.relu(self.reads(y)))
        return z


def test_what_a_layer_that_needs_values_returns_may_be_changed_in_place() -> None:
    """It is no leaf of autograd's graph, of which that is forbidden."""
    model = trace(ChangedInPlace(), [torch.randn(4, 6)])
    assert [(str(changing), str(changed)) for changing, changed in model.writes] == [("relu", "reads")]


def test_a_forward_on_the_examples_that_fails_is_said_to() -> None:
    words, images = torch.tensor([[1, 7, 0, 0], [7, 2, 3, 7]]), torch.randn(2, 2, 6)
    with pytest.raises(InvalidModel) as error:
        trace(WordsAndImages(Images()), [words, images])
    assert str(error.value).startswith(
        "WordsAndImages cannot be traced: a forward of 5 samples, rows of the example inputs, fails: ValueError: 7 places "
        f"for 10 images ({__name__}, line "
    )
    assert str(error.value).endswith("; a model must take any number of samples like those of its example inputs")


class BranchesOnShape(nn.Module):
    """Code that torch.fx cannot follow, and recording can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x) if x.ndim < 3 else x)
        return y


class InFours(nn.Module):
    """Computes with groups of four samples, as the minibatch deviation of a discriminator does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        deviation = self.first(x).view(4, -1, 6).std(0).mean(1, keepdim=True).repeat(4, 1)
        return self.second(x + deviation), deviation.squeeze(1)


class AroundFours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.fours, self.after = BranchesOnShape(), InFours(), BranchesOnShape()

    def forward(self, x: Tensor) -> Tensor:
        y, deviation = self.fours(self.before(x))
        z: Tensor = self.after(y) * deviation[:, None]
        return z


@pytest.mark.parametrize("leaf_modules", [(), ("fours",)])
def test_a_part_that_takes_some_batch_sizes_only_is_one_layer_and_its_siblings_are_cut(
    leaf_modules: tuple[str, ...],
) -> None:
    module, x = AroundFours(), torch.randn(4, 6)
    model = trace(module, [x], leaf_modules=leaf_modules)
    layers = [layer.name for layer in model.layers]
    assert layers == ["before.first", "before.second", "fours", "after.first", "after.second"]
    assert list(model.leaf_reasons) == ([] if leaf_modules else ["fours"])
    assert all("'[4, -1, 6]' is invalid for input of size 30" in reason.text for reason in model.leaf_reasons.values())
    first, second = layers[:3], layers[3:]
    crossing = tuple(dict.fromkeys(name for layer in model.layers[2:3] for name in layer.outputs))
    for num_samples in (4, 12):
        x = torch.randn(num_samples, 6)
        sent = extract(model, first, model.inputs, crossing)(x)
        assert torch.equal(extract(model, second, crossing, model.outputs)(*sent)[0], module(x))


class DividesByTheBatch(nn.Module):
    """Its own code can be followed by torch.fx alone, that of its part by recording alone."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = BranchesOnShape(), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.part(x)) * (1 / x.shape[0])
        return y


def test_a_part_is_said_to_be_one_layer_because_of_the_code_around_it_that_cannot_be_recorded() -> None:
    captured = capture(DividesByTheBatch(), (torch.zeros(3, 6),), LayerChoice(), called_leaves=True)
    assert list(captured.layer_of_call.values()) == ["part", "last"]
    reason = captured.leaf_reasons["part"].text
    assert reason.startswith("the code of the model around it cannot be traced: an argument is 0.2 or ")
    assert "* (1 / x.shape[0])" in reason


class ReadsTypes(nn.Module):
    """One layer that needs values turns autocast off, and what follows asks for the type that the other one computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Code(lambda self, x: x if x.sum() > 0 else -x) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.first(x)
        x = self.second(x)
        if x.dtype != torch.bfloat16:
            raise ValueError(f"{x.dtype}")
        return x


def test_the_examples_forward_has_the_autocast_of_the_recording() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture_by_recording(ReadsTypes(), (torch.zeros(3, 6),), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["first", "second"]


class Variational(nn.Module):
    """A variational autoencoder, whose own forward makes distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.encoder(x).chunk(2, 1)
        hidden = Normal(mean, scale.exp())
        penalty = kl_divergence(hidden, Normal(torch.zeros_like(mean), torch.ones_like(mean)))
        return self.decoder(hidden.rsample()), penalty


def test_distributions_of_the_models_own_forward_are_not_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the forward that is traced leaves that out."""
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch's compiler turns it off for a process
    module, x = Variational(), torch.randn(5, 6)
    traced = trace(module, [x])
    assert [layer.name for layer in traced.layers] == ["encoder", "decoder"]
    torch.manual_seed(0)
    want = module(x)
    torch.manual_seed(0)
    got = traced.module(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Normal(torch.zeros(1), -torch.ones(1))


class Draws(nn.Module):
    def __init__(self, kind: type[Distribution]) -> None:
        super().__init__()
        self.kind, self.weights, self.head = kind, nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.kind(self.weights(x).exp()).rsample())
        return y


@pytest.mark.parametrize("kind", [Exponential, Dirichlet])
def test_gradients_of_distributions_are_kept(kind: type[Distribution]) -> None:
    """The sample of the one is a new tensor of a size, that of the other has its gradient in an autograd function."""
    module, x = Draws(kind), torch.randn(5, 6)
    gradients = []
    for run in (module, trace(module, [x]).module):
        torch.manual_seed(0)
        (y,) = run(x) if run is not module else (run(x),)
        gradients.append(torch.autograd.grad(y.square().sum(), [module.weights.weight])[0])
    assert torch.equal(*gradients)


def test_code_outside_of_modules_that_cannot_be_recorded() -> None:
    with pytest.raises(TracingFailed) as error:
        capture_by_recording(Code(lambda self, x: x if x.sum() > 0 else -x), (torch.zeros(3, 6),), LayerChoice())
    assert error.value.path == ""


@dataclass
class Output:
    """What a model may return."""

    scores: Tensor
    loss: Tensor | None = None


class Returns(nn.Module):
    """Returns a nest of tensors and constants."""

    def __init__(self, as_dataclass: bool = False) -> None:
        super().__init__()
        self.as_dataclass = as_dataclass
        self.a, self.b = nn.Linear(6, 6), nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Output | dict[str, Any]:
        y, (hidden, _) = self.b(self.a(x))
        if self.as_dataclass:
            return Output(scores=y)
        return {"scores": y, "loss": None, "both": (hidden, 7)}


def test_returned_constants() -> None:
    captured = capture_by_recording(Returns(), (torch.zeros(3, 6),), LayerChoice())
    assert [leaf for leaf in captured.returned if not isinstance(leaf, torch.fx.Node)] == [None, 7]
    assert set(captured.layer_of_call.values()) == {"a", "b"}


def test_returned_dataclasses() -> None:
    model = trace(Returns(as_dataclass=True), (torch.zeros(3, 6),))
    output = model.result.rebuild(model.module(torch.ones(2, 6)))
    assert isinstance(output, Output)
    assert output.loss is None
    torch.testing.assert_close(output.scores, model.root(torch.ones(2, 6)).scores)


class NeedsValues(nn.Module):
    """A layer that returns a nest of tensors, and reads a value."""

    def __init__(self, nest: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.nest = nn.Parameter(torch.ones(6, 6)), nest

    def forward(self, x: Tensor) -> Any:
        y = x @ self.weight
        return self.nest(-y if y.sum() > 1e9 else y)


@dataclass(frozen=True)
class Doubled:
    """A dataclass that computes one of its fields."""

    once: Tensor
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.once)


@pytest.mark.parametrize(
    ("nest", "select"),
    [
        (Output, lambda output: output.scores),
        (Doubled, lambda output: output.twice),
        (lambda y: torch.max(y, 1, keepdim=True), lambda output: output.values),
        (lambda y: (y, y), lambda output: output[0]),
    ],
)
def test_nests_of_a_layer_that_needs_values_are_traced_as_trained(
    nest: Callable[[Tensor], Any], select: Callable[[Any], Tensor]
) -> None:
    """What it returns has no values while it is traced, but a gradient, which code may ask for."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(6, 6), NeedsValues(nest), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = select(self.inner(self.first(x)))
            scores: Tensor = self.last((y if y.requires_grad else 0 * y).expand(-1, 6))
            return scores

    module, x = Asks(), torch.randn(3, 6)
    (scores,) = trace(module, (x,)).module(x)
    torch.testing.assert_close(scores, module(x))


def test_models_on_the_meta_device() -> None:
    with torch.device("meta"):
        module = Nested(lambda self, x: x * 2)
    captured = capture_by_recording(module, (torch.zeros(3, 6),), LayerChoice())
    assert list(captured.layer_of_call.values()) == ["first", "inner.a", "inner.b", "last"]
    assert all(parameter.is_meta for parameter in captured.module.parameters())


class Reversible(torch.autograd.Function):
    """Calls the modules that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        output: Tensor = layers[0](x)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def test_a_function_that_is_given_modules_is_refused_with_its_line() -> None:
    """A graph would hold the copies of these without values."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return Reversible.apply(x, self.layers) if x.shape[0] else x

    with pytest.raises(InvalidModel, match=r"a ModuleList that holds tensors is an argument \(.*Reversible\.apply"):
        trace(Calls(), (torch.randn(2, 6),))


class Entry:
    """What a cache keeps of a layer."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Cache:
    """Holds objects that hold tensors, as those of transformers do."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []


class Attends(nn.Module):
    """Reads a value, so that its call is one layer, which is given the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        y: Tensor = self.linear(x)
        cache.entries.append(Entry(y))
        return sum((entry.keys for entry in cache.entries), -y if y.sum() > 1e9 else y)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Attends(), Attends()

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        y: Tensor = self.b(self.a(x, cache), cache)
        return y


def test_a_cache_that_layers_fill_is_no_constant() -> None:
    """A graph would hold the one of the trace, in which are tensors without values."""
    model = trace(nn.Sequential(nn.Linear(6, 6), Decoder(), nn.Linear(6, 6)), (torch.randn(3, 6),))
    assert [layer.name for layer in model.layers] == ["0", "1", "2"]
    reason = model.leaf_reasons["1"]
    assert "a Cache that holds tensors is an argument" in reason.text
    assert "give the tensors as arguments of their own" in reason.with_advice


@pytest.mark.parametrize("depends", [False, True])
def test_a_draw_that_decides_what_runs_is_named_as_such(*, depends: bool) -> None:
    """To leave a layer out by chance, as torchaudio's encoders do, needs other advice than a choice by the inputs."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if (torch.rand(1) + (x.sum() if depends else 0)).item() > 0.0:
                    x = layer(x)
            return x

    model = trace(nn.Sequential(nn.Linear(6, 6), Drops(), nn.Linear(6, 6)), (torch.randn(3, 6),))
    advice = model.leaf_reasons["1"].with_advice
    line = Drops.forward.__code__.co_firstlineno + 2
    assert f"line {line}" in advice
    assert ("a random number that it draws decides what it does" in advice) != depends
    assert ("draw in the forwards of these modules" in advice) != depends


class HoldsWhatCannotBeCopied(nn.Module):
    """Its forward must be recorded, for it asks how many samples there are."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held, self.calls = {"one": held}, 0
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.b(self.a(x).tanh() if len(x) > 0 else x)
        return y


class RefusesToBeCopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("one is enough")


@pytest.mark.parametrize("held", [functional, threading.Lock(), staticmethod(torch.relu)])
def test_a_module_that_holds_what_cannot_be_copied_is_recorded(held: Any) -> None:
    module = HoldsWhatCannotBeCopied(held)
    traced = trace(module, (torch.zeros(2, 6),))
    assert [layer.name for layer in traced.layers] == ["a", "b"]
    assert module.held == {"one": held}
    assert module.calls == 0


def test_a_model_of_which_a_module_cannot_be_copied_is_refused_with_its_name() -> None:
    module = HoldsWhatCannotBeCopied(None)
    module.b = RefusesToBeCopied(6, 6)
    with pytest.raises(InvalidModel, match="'b' is a RefusesToBeCopied, which cannot be copied"):
        trace(module, (torch.zeros(2, 6),))
