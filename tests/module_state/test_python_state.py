"""What a forward changes in its module is undone, and nothing else."""

import copy
import random
from collections import Counter, deque

import numpy
import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.python_state import numbers_kept, same_value, state_restored
from bapipe.tracing.layers import trace


class Remembers(nn.Module):
    """Changes everything that a forward can change in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3))
        self.queue = torch.zeros(2, 3)
        self.calls, self.seen, self.counts, self.draws = 0, [0.0], Counter[str](), random.Random(1)
        self.state = State()
        self.recent, self.array = deque([0.0], maxlen=2), numpy.zeros(1)
        self.noise, self.means = torch.Generator().manual_seed(1), [torch.zeros(3)]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.draws.random())
        self.counts["calls"] += 1
        self.state.steps += 1
        self.recent.append(self.draws.random())
        self.array += 1
        self.means[0].add_(torch.rand(3, generator=self.noise))
        self.latest = x
        with torch.no_grad():
            self.mean.add_(1)
            self.queue.copy_(x)
            self.linear.weight.clamp_(-0.01, 0.01)
        self.last = x.mean(0)
        self.register_buffer("added", torch.ones(1))
        self.linear.register_forward_hook(lambda *_: None)
        y: Tensor = self.linear(x) * self.calls * sum(self.recent) * self.array[0] * self.means[0]
        return y


class State:
    def __init__(self) -> None:
        self.steps = 0


def test_everything_that_a_forward_changes_is_undone() -> None:
    module = Remembers()
    seen, last, draws, state = module.seen, module.last, module.draws, module.draws.getstate()
    weight, noise = module.linear.weight.detach().clone(), module.noise.get_state()
    recent, means, mean = module.recent, module.means, module.means[0]
    with state_restored(module, parameters=True):
        first = module(torch.ones(2, 3))
    with state_restored(module, parameters=True):
        assert torch.equal(module(torch.ones(2, 3)), first)
    assert (module.calls, module.seen, module.counts, module.state.steps) == (0, [0.0], Counter(), 0)
    assert module.seen is seen
    assert module.last is last
    assert module.draws is draws
    assert draws.getstate() == state
    assert module.recent is recent
    assert list(recent) == [0]
    assert module.array[0] == 0
    assert module.noise.get_state().equal(noise)
    assert module.means is means
    assert module.means[0] is mean
    assert mean.eq(0).all()
    assert not hasattr(module, "latest")
    assert set(dict(module.named_buffers())) == {"mean", "last"}
    assert module.mean.eq(0).all()
    assert module.queue.eq(0).all()
    assert module.linear.weight.equal(weight)
    assert not module.linear._forward_hooks


class Counts:
    """A hook that scales what a layer gives by the number of its calls."""

    def __init__(self) -> None:
        self.calls, self.values, self.sum = 0, list[float](), torch.zeros(())

    def __call__(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls += 1
        self.values.append(self.calls)
        self.sum += 1
        return output * (1 + 0.01 * self.calls) + self.sum


class CountsItself(nn.Module):
    """Has a hook that is its own method, and one that keeps numbers in its closure; both share an object with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.counts = nn.Linear(3, 3), 0, {"calls": 0}
        counts, num = self.counts, 0

        def hook(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
            nonlocal num
            num += 1
            counts["calls"] += 1
            return output * num

        self.layer.register_forward_hook(hook)
        self.layer.register_forward_hook(self.count)

    def count(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls += 1
        return output * self.calls

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.counts["calls"]


def test_what_hooks_keep_is_undone() -> None:
    layer, counts, x = nn.Linear(3, 3), Counts(), torch.ones(2, 3)
    values = counts.values
    layer.register_forward_hook(counts)
    with state_restored(layer):
        first = layer(x)
        assert not torch.equal(layer(x), first)
    with state_restored(layer):
        assert torch.equal(layer(x), first)
    assert (counts.calls, counts.values, counts.sum.item()) == (0, [], 0)
    assert counts.values is values


@pytest.mark.parametrize("part", ["", "layer"])
def test_what_hooks_keep_in_a_closure_or_their_module_is_undone(part: str) -> None:
    """Also if the module is no part of the one that runs, as where a stage has one of its layers only."""
    module, x = CountsItself(), torch.ones(2, 3)
    counts = module.counts
    with state_restored(module.get_submodule(part)):
        first = module(x)
        assert torch.equal(module(x), 2**3 * first)
    with state_restored(module.get_submodule(part)):
        assert torch.equal(module(x), first)
    assert module.calls == 0
    assert module.counts is counts
    assert counts == {"calls": 0}


def test_state_is_undone_after_an_error_too() -> None:
    module = Remembers()
    with pytest.raises(RuntimeError), state_restored(module):
        module(torch.ones(2, 4))
    assert module.calls == 0
    assert module.mean.eq(0).all()


class WritesWithGradients(nn.BatchNorm1d):
    """Writes to a frozen parameter and to a buffer what has a gradient, and freezes the parameter that gives it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        self.weight.mul_(2 * self.scale)
        self.running_mean.add_(self.scale)
        self.scale.requires_grad_(False)
        assert (self.weight.is_leaf, self.running_mean.is_leaf) == (False, False)
        return x @ self.weight


def test_what_a_graph_has_changed_is_a_leaf_again() -> None:
    module = WritesWithGradients()
    assert module.running_mean is not None
    with pytest.raises(RuntimeError, match="size mismatch"), state_restored(module, parameters=True):
        module(torch.ones(2, 3))
    assert {name: (one.is_leaf, one.requires_grad) for name, one in module.named_parameters()} == {
        "weight": (True, False),
        "bias": (True, False),
        "scale": (True, True),
    }
    assert (module.running_mean.is_leaf, module.running_mean.requires_grad) == (True, False)
    assert (module.weight.tolist(), module.running_mean.tolist()) == ([1, 1], [0, 0])


def test_a_graph_that_has_saved_statistics_before_can_still_run_backward() -> None:
    """Batch norm writes to them without torch's counting it, and what is put back is what the graph has saved."""
    norm, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 2.0], [3.0, 6.0]], requires_grad=True)
    out = norm(x)
    with state_restored(norm):
        norm(torch.zeros(2, 2))
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.2, 0.4]))  # a tenth of the mean of x
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros(2, 2))  # what is normalized sums to zero, whatever x is


def test_a_module_with_handles_of_its_hooks_may_be_copied_meanwhile() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    module.handles = [module[0].register_forward_hook(lambda *_: None)]  # type: ignore[assignment]
    with state_restored(module):
        assert len(copy.deepcopy(module)) == 1


def test_tracing_leaves_nothing_in_the_module() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.a(x)
            y: Tensor = self.b(self.hidden)
            return y

    module = Keeps()
    trace(module, (torch.ones(2, 3),))
    assert not hasattr(module, "hidden")


class Base(nn.Module):
    num_forwards = 0


class CountsInClass(Base):
    """Writes to numbers of its base, and of its own class: one that hides its base's, and one that is made once."""

    def forward(self, x: Tensor) -> Tensor:
        Base.num_forwards += 1
        type(self).num_forwards += 1
        if not hasattr(CountsInClass, "made"):
            type(self).made = 3  # type: ignore[attr-defined]
        return x


def test_numbers_of_classes_are_undone() -> None:
    module = nn.Sequential(CountsInClass())
    with state_restored(module):
        module(torch.ones(1))
        assert (Base.num_forwards, CountsInClass.num_forwards) == (1, 2)
    assert (Base.num_forwards, CountsInClass.num_forwards) == (0, 0)
    assert "num_forwards" not in vars(CountsInClass)
    assert CountsInClass.made == 3  # type: ignore[attr-defined]


def test_numbers_of_all_parts_by_path() -> None:
    model = nn.Sequential(Remembers())
    assert numbers_kept(model)["0.calls"] == 0
    assert numbers_kept(model)["0.linear.in_features"] == 3
    assert "0.training" not in numbers_kept(model)


def test_what_is_nan_and_stays_so_is_the_same() -> None:
    assert same_value(float("nan"), float("nan"))
    assert same_value((1.0, float("nan")), (1.0, float("nan")))
    assert same_value(0.0, -0.0)
    assert not same_value(float("nan"), 1.0)
    assert not same_value(None, 0)


def test_a_parameter_without_a_shape_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidModel, match=r"^'1.weight' has no shape yet: call the module once, on any samples"):
        trace(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)), (torch.ones(2, 3),))


def test_a_sparse_buffer_is_refused_with_what_to_do() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    module.register_buffer("neighbours", torch.eye(3).to_sparse())
    with pytest.raises(
        InvalidModel,
        match=r"^'neighbours' is a sparse tensor \(torch.sparse_coo\), and stages hold dense ones only: register its to_dense",
    ):
        trace(module, (torch.ones(2, 3),))
