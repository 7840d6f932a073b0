"""A stage that runs its forward again does so exactly, and leaves nothing twice."""

import collections
import copy
import itertools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from bapipe.errors import InvalidModel
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.recompute import RecomputedStage
from bapipe.tracing.layers import trace
from tests.multiprocess.runtime_cases import make_plan

CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    """Random numbers, running statistics, and a buffer on which the output depends."""
    return nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), spectral_norm(nn.Linear(8, 8)), nn.Dropout(0.3),
        nn.Linear(8, 3),
    ).double()  # fmt: skip


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(nn.functional.dropout(output, 0.2), target)


def _train(backward: str, recompute: tuple[int, ...], recompute_layers: tuple[str, ...] = ()) -> list[Tensor]:
    """Returns losses, gradients, parameters and buffers of two steps."""
    torch.manual_seed(0)
    module = _model()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    order = [f"{s}F{m}" for m in range(3) for s in (0, 1)]
    order += [f"{s}{phase}{m}" for m in range(3) for s in (1, 0) for phase in backward]
    layers = [layer.name for layer in trace(module, [x]).layers]
    plan = make_plan(layers, (3,), (0, 0), [order], 4, 3, recompute, recompute_layers)
    pipeline = Pipeline(module, plan, loss=_loss, inputs=[x], optimizer=sgd(0.1))
    seen = []
    for _ in range(2):
        seen.append(torch.tensor(pipeline.step(x, target=y)))
        for parameter in pipeline.named_parameters().values():
            assert parameter.grad is not None
            seen += [parameter.grad.clone(), parameter.detach().clone()]
        seen += [buffer.clone() for buffer in module.buffers()]
    return seen


@pytest.mark.parametrize("backward", ["B", "IW"])
@pytest.mark.parametrize("layers", [(), ("1", "2"), ("0", "2", "3", "5"), ("0", "4"), ("3",)])
@pytest.mark.usefixtures("alone")
def test_recomputing_changes_nothing(backward: str, layers: tuple[str, ...]) -> None:
    """Whole stages, and some of their layers: 0, 1 and 2 are the first stage, 3, 4 and 5 the second."""
    want, got = _train(backward, ()), _train(backward, () if layers else (0, 1), layers)
    assert len(want) == len(got) > 20
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, atol=1e-14, rtol=0)


def test_of_large_buffers_only_those_that_change_are_kept() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4))
    module.register_buffer("table", torch.zeros(100_000))
    stage = RecomputedStage(module, CPU)
    for m in range(2):
        stage.first(m, lambda: stage(torch.randn(3, 4)))
    assert set(stage._before[0].tensors) == set(stage._before[1].tensors)
    assert "table" not in stage._before[1].tensors
    assert stage._before[1].tensors["0.num_batches_tracked"].item() == 1


class Counted(nn.Module):
    count: Tensor

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.register_buffer("count", count)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * self.count


def test_a_buffer_of_two_layers_changes_once() -> None:
    """Each forward counts twice: the third one begins at 4."""
    count = torch.zeros(())
    stage = RecomputedStage(nn.Sequential(Counted(count), Counted(count)), CPU)
    one = torch.ones(())
    assert [stage.first(m, lambda: stage(one)).item() for m in range(3)] == [1 * 2, 3 * 4, 5 * 6]
    for m, want in ((0, 1 * 2), (2, 5 * 6), (1, 3 * 4)):
        with stage.recomputing(m):
            assert stage(one).item() == want
    assert count.item() == 6


class OfClass(nn.Module):
    num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        OfClass.num_forwards += 1
        return x * self.num_forwards


class OfBase(OfClass):
    """Its forwards make a counter of its own, which hides the one that it has from its base."""

    def forward(self, x: Tensor) -> Tensor:
        type(self).num_forwards += 1
        return x * self.num_forwards


def test_a_counter_that_a_class_has_from_its_base_is_refused() -> None:
    stage = RecomputedStage(OfBase(), CPU)
    with pytest.raises(InvalidModel, match=r"^the forward changes the class attribute 'num_forwards', so it cannot be"):
        stage.first(0, lambda: stage(torch.ones(1, 1)))


class LateOfClass(nn.Module):
    num_late = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        type(self).num_late += self.calls > 1
        return x * self.num_late


def test_a_counter_of_a_class_that_changes_later_is_refused() -> None:
    stage = RecomputedStage(nn.Sequential(LateOfClass()), CPU)
    stage.first(0, lambda: stage(torch.ones(1, 1)))
    with pytest.raises(
        InvalidModel, match=r"^the forward changes the class attribute '0\.num_late' of layer '0', so it"
    ):
        stage.first(1, lambda: stage(torch.ones(1, 1)))


class Unset(nn.Linear):
    unset = float("nan")


def test_a_number_of_a_class_that_is_nan_does_not_change() -> None:
    stage = RecomputedStage(Unset(1, 1), CPU)
    stage.first(0, lambda: stage(torch.ones(1, 1)))


def test_a_counter_of_a_class_is_refused() -> None:
    """It would count twice: classes are not put back."""
    stage = RecomputedStage(nn.Sequential(nn.Linear(1, 1), OfClass()), CPU)
    with pytest.raises(InvalidModel) as caught:
        stage.first(0, lambda: stage(torch.ones(1, 1)))
    assert str(caught.value) == (
        "the forward changes the class attribute '1.num_forwards' of layer '1', so it cannot be recomputed exactly: plan "
        "without recomputation of its stage"
    )


class Warmed(nn.Module):
    """From its third forward on a centre follows what it computes, and running statistics its inputs."""

    centre: Tensor
    num_forwards: Tensor

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.linear, self.norm, self.kind = nn.Linear(4, 4), nn.BatchNorm1d(4), kind
        if kind.startswith("frozen"):
            self.centre = nn.Parameter(torch.zeros(size), requires_grad=False)
        else:
            self.register_buffer("centre", torch.zeros(size))
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        late = self.num_forwards.item() > 2
        self.norm.train(late)
        y: Tensor = self.norm(self.linear(x)) - self.centre[:4]
        if late and self.kind == "assigned":
            self.centre = self.centre + x.mean()
        elif late and self.kind == "frozen, assigned":
            self.centre = nn.Parameter(self.centre + x.mean(), requires_grad=False)
        elif late and self.kind.endswith("through data"):
            self.centre.data.add_(x.mean())
        elif late and self.kind.endswith("new data"):
            self.centre.data = self.centre.data + x.mean()
        elif late and self.kind.endswith("numpy"):
            self.centre.numpy()[:] += float(x.mean())
        elif late:
            self.centre += x.mean()
        return y


SMALL, LARGE = 4, 100_000


@pytest.mark.parametrize(
    ("kind", "size"), [("written", SMALL), ("assigned", SMALL), ("assigned", LARGE), ("frozen, assigned", LARGE)]
)
def test_what_a_later_forward_changes_is_changed_once(kind: str, size: int) -> None:
    torch.manual_seed(0)
    module = Warmed(kind, size).double()
    whole, stage = copy.deepcopy(module), RecomputedStage(module, CPU)
    inputs = torch.randn(6, 3, 4, dtype=torch.float64).unbind()
    for m, x in enumerate(inputs):
        stage.first(m, lambda x=x: stage(x))
        if m:  # the forward of the micro-batch before runs again after this one's
            with stage.recomputing(m - 1):
                again = stage(inputs[m - 1])
            torch.testing.assert_close(again, whole(inputs[m - 1]), atol=1e-14, rtol=0)
    whole(inputs[-1])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-14, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("written", LARGE),
        ("frozen", SMALL),
        ("through data", LARGE),
        ("numpy", LARGE),
        ("new data", LARGE),
        ("frozen, through data", SMALL),
        ("frozen, new data", SMALL),
    ],
)
def test_a_later_change_of_what_was_taken_for_a_constant_is_refused(kind: str, size: int) -> None:
    stage = RecomputedStage(nn.Sequential(Warmed(kind, size)), CPU)
    for m in range(2):
        stage.first(m, lambda: stage(torch.ones(3, 4)))
    with pytest.raises(
        InvalidModel,
        match=r"^the forward changes '0\.centre' of layer '0', so it cannot be recomputed exactly: plan without recomp",
    ):
        stage.first(2, lambda: stage(torch.ones(3, 4)))


class Ratio:
    """An object with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)


class Keeps(nn.Module):
    """Every forward multiplies by another number, which comes from what an attribute holds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind
        frozen = nn.Linear(1, 1).requires_grad_(False)
        self.kept: Any = {
            "torch generator": torch.Generator().manual_seed(1),
            "generator of an object": Ratio(),
            "Python generator": random.Random(1),
            "numpy generator": numpy.random.default_rng(1),
            "deque": collections.deque([0.0], maxlen=3),
            "numpy array": numpy.zeros(1),
            "counter": itertools.count(),
            "list of lists": [[0.0]],
            "list of tensors": [torch.zeros(1, dtype=torch.float64)],
            "list of modules": [frozen],
            "tensor": torch.zeros(1),
            "tensor, through data": torch.zeros(1),
        }[kind]

    def next(self) -> float:
        kept = self.kept
        if isinstance(kept, torch.Generator | Ratio):
            return torch.rand(1, generator=kept.generator if isinstance(kept, Ratio) else kept).item()
        if isinstance(kept, random.Random | numpy.random.Generator):
            return float(kept.random())
        if self.kind == "counter":
            return float(next(kept))
        if self.kind == "list of modules":
            kept[0].weight.add_(1)
            return float(kept[0].weight)
        if self.kind == "deque":
            kept.append(kept[-1] + 1)
            return float(sum(kept))
        if self.kind == "tensor, through data":
            kept.data.add_(1)
            return float(kept[0])
        where = kept[0] if self.kind == "list of lists" else kept
        where[0] += 1
        return float(where[0])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (1 + 0.1 * self.next())
        return y


KEPT = (
    "torch generator", "generator of an object", "Python generator", "numpy generator", "deque", "numpy array",
    "counter", "list of lists", "list of tensors", "list of modules", "tensor", "tensor, through data",
)  # fmt: skip


@pytest.mark.parametrize("kind", KEPT)
def test_what_attributes_hold_is_as_in_the_first_forward(kind: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Keeps(kind), nn.Tanh(), Keeps(kind)).double()
    whole, stage = copy.deepcopy(module), RecomputedStage(module, CPU)
    inputs = torch.randn(5, 2, 4, dtype=torch.float64).unbind()
    wanted = [whole(x) for x in inputs]
    for m in range(7):
        if m < 5:  # also those that follow a recomputation
            assert torch.equal(stage.first(m, lambda m=m: stage(inputs[m])), wanted[m])
        if m > 1:  # with two other forwards in between
            with stage.recomputing(m - 2):
                assert torch.equal(stage(inputs[m - 2]), wanted[m - 2])


@pytest.mark.parametrize("kind", ["tensor", "tensor, through data"])
def test_a_large_tensor_of_an_attribute_that_a_forward_changes_is_refused(kind: str) -> None:
    module = nn.Sequential(Keeps(kind))
    module[0].kept = torch.zeros(LARGE)
    stage = RecomputedStage(module, CPU)
    with pytest.raises(
        InvalidModel,
        match=r"^the forward changes '0\.kept' of layer '0', so it cannot be recomputed exactly: plan without recomp",
    ):
        stage.first(0, lambda: stage(torch.ones(3, 4)))


class Halves(nn.Module):
    """Halves its input in place, from a forward on."""

    def __init__(self, since: int, *, through_data: bool) -> None:
        super().__init__()
        self.weight, self.since, self.calls, self.through_data = nn.Parameter(torch.ones(())), since, 0, through_data

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.since:
            (x.data if self.through_data else x).mul_(0.5)
        return self.weight * x


@pytest.mark.parametrize("through_data", [False, True])
def test_inputs_that_a_forward_changes_in_place_are_as_before(through_data: bool) -> None:
    stage = RecomputedStage(Halves(0, through_data=through_data), CPU)
    inputs = torch.tensor([8.0, 6.0]).chunk(2)
    assert [stage.first(m, lambda x=x: stage(x)).item() for m, x in enumerate(inputs)] == [4, 3]
    for m, x in enumerate(inputs):
        with stage.recomputing(m):
            assert stage(x).item() == [4, 3][m]
    assert [x.item() for x in inputs] == [4, 3]


def test_an_input_with_a_gradient_that_a_forward_changes_behind_autograd_is_refused() -> None:
    stage = RecomputedStage(Halves(0, through_data=True), CPU)
    with pytest.raises(
        InvalidModel, match=r"^the forward changes an input in place that the first forward did not, or that requires"
    ):
        stage.first(0, lambda: stage(torch.ones(1, requires_grad=True)))


@pytest.mark.parametrize("through_data", [False, True])
def test_an_input_that_only_a_later_forward_changes_in_place_is_refused(through_data: bool) -> None:
    stage = RecomputedStage(Halves(1, through_data=through_data), CPU)
    stage.first(0, lambda: stage(torch.ones(1)))
    with pytest.raises(
        InvalidModel,
        match=r"^the forward changes an input in place that the first forward did not, or that requires gradients "
        r"\(by `tensor\.data`\), so it cannot be recomputed exactly: ",
    ):
        stage.first(1, lambda: stage(torch.ones(1)))


class Noisy(nn.Module):
    """Its own forward draws from its generator: that of a traced model's graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = (y * torch.rand(y.shape, generator=self.generator, dtype=y.dtype)).tanh()
        z: Tensor = self.second(y)
        return z


@pytest.mark.parametrize(("recompute", "layers"), [((0,), ()), ((), ("first",))])
@pytest.mark.usefixtures("alone")
def test_a_recomputed_graph_draws_the_same_numbers_from_its_own_generator(
    recompute: tuple[int, ...], layers: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    module = Noisy().double()
    whole = copy.deepcopy(module)
    x, y = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    order = ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    plan = make_plan(["first", "second"], (), (0,), [order], 2, 3, recompute, layers)
    pipeline = Pipeline(module, plan, loss=nn.functional.mse_loss, inputs=[x], optimizer=sgd(0.0))
    for _ in range(2):
        whole.zero_grad()
        pipeline.step(x, target=y)
        for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
            (nn.functional.mse_loss(whole(a), b) / 3).backward()
        for name, parameter in pipeline.named_parameters().items():
            torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)


def _from_one(output: Tensor, target: Tensor) -> Tensor:
    target -= 1
    return nn.functional.mse_loss(output, target)


@pytest.mark.usefixtures("alone")
def test_a_loss_changes_its_target_in_place_once_if_the_last_stage_recomputes() -> None:
    def trained(recompute: tuple[int, ...]) -> list[float | None]:
        torch.manual_seed(0)
        module, x = nn.Sequential(nn.Linear(3, 3)).double(), torch.randn(4, 3, dtype=torch.float64)
        plan = make_plan(["0"], (), (0,), [["0F0", "0B0", "0F1", "0B1"]], 2, 2, recompute)
        pipeline = Pipeline(module, plan, loss=_from_one, inputs=[x], optimizer=sgd(0.1))
        return [pipeline.step(x, target=torch.ones(4, 3, dtype=torch.float64)) for _ in range(3)]

    assert trained((0,)) == trained(())


class Centred(nn.Module):
    """A loss with a running mean and a counter, which changes its input in place and asks whether it has a gradient."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.centre.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        output.mul_(2.0 if output.requires_grad else 3.0)
        return nn.functional.mse_loss(output - self.centre, target) * self.calls


@pytest.mark.parametrize("backward", ["B", "IW"])
@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.usefixtures("alone")
def test_the_state_of_a_loss_changes_once(backward: str, cut: int) -> None:
    """With the cut at 2 the last stage is nothing but the loss, which changes what the stage keeps."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).double()
    whole, loss, own_loss = copy.deepcopy(module), Centred(), Centred()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    order = [f"{s}F{m}" for m in range(3) for s in (0, 1)]
    order += [f"{s}{phase}{m}" for m in range(3) for s in (1, 0) for phase in backward]
    plan = make_plan(["0", "1"], (cut,), (0, 0), [order], 4, 3, (1,), ())
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], optimizer=sgd(0.1))
    got = pipeline.step(x, target=y)
    parts = [own_loss(whole(a), b) / 3 for a, b in zip(x.chunk(3), y.chunk(3), strict=True)]
    torch.stack(parts).sum().backward()
    assert got == pytest.approx(sum(part.item() for part in parts), abs=1e-6)  # the pipeline adds up in float32
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)
    torch.testing.assert_close(loss.centre, own_loss.centre)
    assert loss.calls == 3


class AsksForGradient(nn.Module):
    """One layer, as it also branches on values; its result depends on whether its input has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return x * 3 if x.requires_grad else x


@pytest.mark.parametrize("recompute", [(1,), (0, 1, 2)])
@pytest.mark.usefixtures("alone")
def test_inputs_of_a_stage_that_recomputes_require_gradients(recompute: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), AsksForGradient(), nn.Linear(8, 3)).double()
    whole = copy.deepcopy(module)
    x, y = torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    order = ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]
    plan = make_plan(["0", "1", "2"], (1, 2), (0, 0, 0), [order], 2, 1, recompute)
    pipeline = Pipeline(module, plan, loss=nn.functional.mse_loss, inputs=[x], optimizer=sgd(0.1))
    got, want = pipeline.step(x, target=y), nn.functional.mse_loss(whole(x), y)
    want.backward()
    assert got == pytest.approx(want.item(), abs=1e-6)  # the pipeline adds up in float32
    for name, parameter in pipeline.named_parameters().items():
        torch.testing.assert_close(parameter.grad, whole.get_parameter(name).grad, atol=1e-12, rtol=0)
