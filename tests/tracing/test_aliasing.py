"""Views and in-place changes in small graphs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from bapipe.equivalence.check import Equivalence, compare_split, example_microbatches
from bapipe.tracing.aliasing import alias_set, rewire_inplace_uses, writers
from bapipe.tracing.extract import extract
from bapipe.tracing.layers import trace

CPU = torch.device("cpu")


class Changes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        view = y.view(-1)
        y.add_(1)
        return view.sum() + y.sum()


def traced() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    module = fx.symbolic_trace(Changes())
    return module, {node.name: node for node in module.graph.nodes}


def test_a_view_and_an_in_place_result_are_aliases() -> None:
    module, node = traced()
    assert alias_set(module, node["mul"]) == {node["mul"], node["view"], node["add_"]}
    assert alias_set(module, node["x"]) == {node["x"]}


def test_writers_are_found_with_their_tensor() -> None:
    module, node = traced()
    assert list(writers(module)) == [(node["add_"], node["mul"])]


def test_uses_after_an_in_place_change_take_its_result() -> None:
    module, node = traced()
    assert set(node["mul"].users) == {node["view"], node["add_"], node["sum_2"]}
    rewire_inplace_uses(module)
    assert set(node["mul"].users) == {node["view"], node["add_"]}
    assert set(node["add_"].users) == {node["sum_2"]}
    module.recompile()
    x = torch.ones(2, 3)
    assert torch.equal(module(x), Changes()(x))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "movedim": lambda x: x.movedim(0, 1),
    "moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "diagonal": lambda x: torch.diagonal(x),
    "tensor_split": lambda x: torch.tensor_split(x, 2)[0],
    "hsplit": lambda x: x.hsplit(2)[0],
    "view_as_complex": lambda x: torch.view_as_complex(x),
    "ravel": lambda x: x.ravel(),
    "as_strided": lambda x: x.as_strided((2,), (1,)),
    "broadcast_to": lambda x: x.broadcast_to((3, 4, 2)),
    "split_with_sizes": lambda x: x.split_with_sizes([1, 3])[0],
    "adjoint": lambda x: x.adjoint(),
    "float": lambda x: x.float(),
    "transpose": lambda x: x.transpose(0, 1),
    "chunk": lambda x: x.chunk(2)[0],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_result_of_an_operator_of_torch_may_be_a_view(view: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(4, 2)
    assert view(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    class Viewing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return view(x)

    graph = fx.symbolic_trace(Viewing())
    result = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    assert next(node for node in graph.graph.nodes if node.op == "placeholder") in alias_set(graph, result)


@pytest.mark.parametrize("function", [torch.relu, torch.add, torch.clone, torch.cumsum, torch.stack])
def test_other_operators_return_memory_of_their_own(function: Callable[..., Tensor]) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, x)))
    module = fx.GraphModule(nn.Module(), graph)
    assert alias_set(module, x) == {x}


@pytest.mark.parametrize(
    "write",
    [
        lambda h, change: h.movedim(0, 1).add_(change.t()),
        lambda h, change: h.transpose(0, 1).add_(change.t()),
        lambda h, change: torch.tensor_split(h, 1, dim=1)[0].add_(change),
        lambda h, change: h.unfold(1, 8, 8).add_(change[:, None]),
    ],
    ids=["movedim", "transpose", "tensor_split", "unfold"],
)
@pytest.mark.parametrize("is_made_first", [True, False])
def test_a_tensor_that_is_changed_through_a_view_stays_in_one_stage(
    write: Callable[[Tensor, Tensor], Tensor], is_made_first: bool
) -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            view = h.view_as(h) if is_made_first else h
            change = self.b(x)
            write(view, change)
            y: Tensor = self.c(h)
            return y

    model = trace(Changed(), (torch.rand(4, 8),))
    together = {(hazard.reader, hazard.writer) for hazard in model.hazards if hazard.same_stage}
    assert ("c", "b") in together
    if is_made_first:
        assert ("a", "b") in together
    found = compare_split(model, mean_square, example_microbatches((torch.rand(4, 8),), torch.rand(4, 8), (4, 4), CPU))
    assert isinstance(found, Equivalence)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class ByMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return x


class ByOperator(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x *= 0.5
        return x


class ByPart(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[:] = x * 0.5
        return x


class ByArgument(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.threshold(x, 100.0, 0.5, inplace=True)


@pytest.mark.parametrize("kind", [ByMethod, ByOperator, ByPart, ByArgument])
def test_a_stage_copies_its_input_for_a_module_that_writes_to_it(kind: type[nn.Module]) -> None:
    model = trace(nn.Sequential(nn.Linear(3, 3), kind(), nn.Linear(3, 3)), [torch.rand(4, 3)])
    assert [layer.name for layer in model.layers] == ["0", "1", "2"]
    stage = extract(model, ["1"], ["0"], ["1"])
    received = torch.rand(5, 3, requires_grad=True)
    before = received.detach().clone()
    (result,) = stage(received)
    assert torch.equal(received, before)
    assert torch.equal(result, torch.full((5, 3), 0.5) if kind is ByArgument else 0.5 * before)
