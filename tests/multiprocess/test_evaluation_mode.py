"""In evaluation mode a pipeline computes what the whole model computes, and training continues unchanged."""

import copy
import random
from collections import OrderedDict, deque

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BapipeError, InvalidModel
from bapipe.runtime.evaluation import forwards_only
from bapipe.runtime.lowering import Lowered, lower_for
from bapipe.runtime.pipeline import Pipeline
from bapipe.schedules.table import Schedule
from bapipe.tracing.layers import trace
from bapipe.training.launch.processes import launch
from tests.multiprocess.evaluation_mode_cases import (
    NUM,
    SIZE,
    Case,
    Drawing,
    Dropping,
    Looking,
    Outcome,
    Passing,
    drawn,
    refused,
    run_cases,
)
from tests.multiprocess.runtime_cases import loss, make_plan, named_order, random_order

EVERY = tuple((start, start + 3) for start in range(0, 15, 3))

CASES = (
    Case("two stages", Dropping, (3,), (0, 1)),
    Case("two stages and a smaller last micro-batch", Dropping, (4,), (0, 1), num_samples=8),
    Case("through torch.export", Looking, (3,), (0, 1), num_samples=14),
    Case("two stages a rank, in a loop", Dropping, (1, 3, 5), (0, 1, 0, 1), looped=True, num_samples=13),
    Case("replicas", Dropping, (), ((0, 1),)),
    Case("replicas, of which one has nothing to do", Dropping, (3,), ((0, 1), (0, 1)), num_samples=2),
    Case("two inputs and two results", Passing, (2,), (0, 1), num_samples=7),
    Case("in bfloat16", Dropping, (3,), (0, 1), autocast=True),
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    results = launch(run_cases, ["cpu0", "cpu1"], CASES, timeout_s=60)
    return {item.name: [result[i] for result in results] for i, item in enumerate(CASES)}


@pytest.mark.parametrize("item", CASES, ids=lambda item: item.name)
def test_evaluation_equals_the_whole_model(item: Case, outcomes: dict[str, list[Outcome]]) -> None:
    found = outcomes[item.name]
    assert all(outcome.unchanged for outcome in found)
    knowing = [outcome for outcome in found if outcome.loss_error is not None]
    last = item.ranks[-1]
    assert len(knowing) == (len(last) if isinstance(last, tuple) else 1)
    for outcome in knowing:
        assert outcome.loss_error is not None
        assert outcome.output_error is not None
        assert max(outcome.loss_error, outcome.output_error) <= (0.05 if item.autocast else 1e-12)
    seen = sorted(rows for outcome in knowing for rows in outcome.rows)
    want = [(start, min(stop, item.num_samples)) for start, stop in EVERY if start < item.num_samples]
    assert seen == want


@pytest.mark.usefixtures("alone")
def test_what_is_drawn_in_evaluation_depends_on_neither_ranks_nor_cuts() -> None:
    layers = [layer.name for layer in trace(Drawing(), [torch.zeros(2, 5)]).layers]
    (one,) = drawn(None, [make_plan(layers, (), (0,), named_order("1f1b", 1, NUM), SIZE, NUM)])
    plans = (
        make_plan(layers, (), ((0, 1),), random_order(3, ((0, 1),), NUM, 0.0), SIZE, NUM),
        make_plan(layers, (layers.index("b"),), (0, 1), named_order("1f1b", 2, NUM), SIZE, NUM),
    )
    for ranks in zip(*launch(drawn, ["cpu0", "cpu1"], plans, timeout_s=60), strict=True):
        assert {row: output for rank in ranks for row, output in rank.items()} == one
    assert len({value for output in one.values() for sample in output for value in sample}) > 0.99 * 2 * SIZE * NUM * 5


@pytest.mark.usefixtures("alone")
def test_a_model_that_differs_in_evaluation_mode_is_refused() -> None:
    assert refused() == (
        "in evaluation mode the model cannot be cut as the plan says: its layer 'other' runs in that mode only, so it is "
        "in no stage: let training call it too, or evaluate with the module itself"
    )


class Biased(nn.Module):
    """Adds a row of a table, which it looks up once where it evaluates, as attention of LeViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.table = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6))
        self.found: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> "Biased":
        if mode:
            self.found = {}
        return super().train(mode)

    def row(self) -> Tensor:
        if self.training:
            return self.table[1]
        if "row" not in self.found:
            self.found["row"] = self.table[1]
        return self.found["row"]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.after(self.before(x) + self.row())
        return y


@pytest.mark.usefixtures("alone")
def test_where_modules_are_one_layer_in_evaluation_only_the_advice_makes_a_plan_that_evaluates() -> None:
    blocks = [nn.Sequential(OrderedDict({"relu": nn.ReLU(), "biased": Biased()})) for _ in range(2)]
    module, x = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 5)), torch.randn(6, 6)

    def evaluated(leaf_modules: list[str], cut: int) -> Tensor:
        layers = [layer.name for layer in trace(module, [x], leaf_modules=leaf_modules).layers]
        plan = make_plan(layers, (cut,), (0, 0), [["0F0", "1F0", "1B0", "0B0"]], 6, 1)
        pipeline = Pipeline(copy.deepcopy(module), plan, loss=loss, inputs=[x], evaluates=True)
        found = pipeline.evaluate(x)
        assert found is not None
        output: Tensor = found.outputs[0]
        return output

    with pytest.raises(InvalidModel) as caught:
        evaluated([], 4)
    assert str(caught.value) == (
        "in evaluation mode the model cannot be cut as the plan says: '1.biased' and 1 more of class Biased are one layer "
        "each in that mode, and several in training: profile with `leaf_modules=['*.biased']`, with which they are "
        "one layer in both modes, and plan again"
    )
    assert torch.equal(evaluated(["*.biased"], 3), copy.deepcopy(module).eval()(x))


class Auxiliary(nn.Module):
    """Has a head that it uses in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y: Tensor = self.b(x)
        return y + self.head(x) if self.training else y


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "cut", [1, 2]
)  # before the head, which is all of the last stage but the sum, or further before
def test_layers_that_only_training_uses_are_left_out(cut: int) -> None:
    module, x = Auxiliary(), torch.randn(6, 6)
    layers = [layer.name for layer in trace(module, [x]).layers]
    assert layers[:3] == ["a", "b", "head"]
    plan = make_plan(layers, (cut,), (0, 0), [["0F0", "1F0", "1B0", "0B0"]], 6, 1)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], evaluates=True)
    found = pipeline.evaluate(x)
    assert found is not None
    assert torch.equal(found.outputs[0], module.eval()(x))


@pytest.mark.usefixtures("alone")
def test_wrong_numbers_of_samples_are_refused() -> None:
    module, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), torch.randn(6, 6)
    plan = make_plan([layer.name for layer in trace(module, [x]).layers], (1,), (0, 0), [["0F0", "1F0", "1B0", "0B0"]],
                     6, 1)  # fmt: skip
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], evaluates=True)
    with pytest.raises(BapipeError) as caught:
        pipeline.evaluate(x, num_samples=5)
    assert str(caught.value) == "'input' has 6 samples; num_samples is 5"
    with pytest.raises(
        BapipeError, match=r"smaller batch \(`evaluate` takes it as it is, if `num_samples` says how many"
    ):
        pipeline.evaluate(x[:5])
    with pytest.raises(BapipeError, match=r"^7 samples to evaluate: want 1 to 6, the plan's mini-batch$"):
        pipeline.evaluate(x, num_samples=7)
    found = pipeline.evaluate(x)
    assert found is not None
    assert found.loss is None
    assert torch.equal(found.outputs[0], module(x))
    with pytest.raises(BapipeError, match="not made to evaluate"):
        Pipeline(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5)), plan, loss=loss, inputs=[x]).evaluate(x)


class Centred(nn.Module):
    """Treats a single sample in another way, which tracing, with several, does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.a(x)
        if x.shape[0] > 1:
            y = y - 0.5 * y.mean(0)
        z: torch.Tensor = self.b(y)
        return z


@pytest.mark.usefixtures("alone")
def test_a_single_last_sample_is_refused_if_the_model_treats_it_in_another_way() -> None:
    module, x = Centred(), torch.randn(6, 6)
    order = [["0F0", "1F0", "1B0", "0B0", "0F1", "1F1", "1B1", "0B1"]]
    plan = make_plan([layer.name for layer in trace(module, [x]).layers], (1,), (0, 0), order, 3, 2)
    pipeline = Pipeline(module, plan, loss=loss, inputs=[x], evaluates=True)
    with pytest.raises(
        InvalidModel,
        match=r"^of 4 samples the last micro-batch is a single one, for which the stages would not give what the "
        r"module does: the loss of micro-batch 0 differs by .*; evaluate another number of samples$",
    ):
        pipeline.evaluate(x[:4], num_samples=4)
    found = pipeline.evaluate(x[:5], num_samples=5)
    assert found is not None
    for rows, output in zip((x[:3], x[3:5]), found.outputs, strict=True):
        torch.testing.assert_close(output, module(rows))


def test_forwards_of_a_loop_go_round_in_groups() -> None:
    table = Schedule(devices=((0,), (1,), (0,), (1,)), num_microbatches=9, order=((), ()))
    assert [list(map(str, order)) for order in forwards_only(table, 3).order] == [
        ["0F0", "0F1", "2F0", "2F1", "0F2", "2F2"],
        ["1F0", "1F1", "3F0", "3F1", "1F2", "3F2"],
    ]


class Scaled(nn.Module):
    """A loss that drops values in training, and is divided by its running mean; it counts its calls."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.calls = nn.Dropout(0.5), 0
        self.register_buffer("mean", torch.full((), 2.0, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        value = (self.dropout(output) - target).square().mean()
        self.mean += value.detach()
        return value / (self.mean - value.detach())


@pytest.mark.usefixtures("alone")
def test_the_loss_is_in_evaluation_mode_too_and_keeps_its_state() -> None:
    module, computed = nn.Sequential(nn.Linear(6, 5)).double(), Scaled()
    x, y = torch.randn(2, 6, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    plan = make_plan(["0"], (), (0,), [["0F0", "0B0"]], 2, 1)
    pipeline = Pipeline(module, plan, loss=computed, inputs=[x], evaluates=True)
    for _ in range(2):
        found = pipeline.evaluate(x, target=y)
        assert found is not None
        assert found.loss == pytest.approx((module(x) - y).square().mean().item() / 2)
    assert computed.mean.item() == 2
    assert computed.calls == 0
    assert computed.training
    assert computed.dropout.training


class Changes(nn.Module):
    """One layer, whose forward changes in any mode what it is asked to change."""

    calls: Tensor
    num_of_class = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.num_calls, self.recent = what, 0, deque([1.0], maxlen=2)
        self.linear, self.kinds = nn.Linear(6, 6), nn.Embedding(2, 6, max_norm=0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.noise = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # so that it is one layer
            return x
        if self.what == "parameter":
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
            return x
        if self.what == "through data":
            self.linear.weight.data.mul_(0.9)
            return x
        if self.what == "new data":
            self.linear.weight.data = self.linear.weight.data * 0.9
            return x
        type(self).num_of_class += 1
        self.calls += 1
        self.num_calls += 1
        self.recent.append(random.random())
        y: Tensor = self.linear(x) + self.kinds.weight.sum() + self.kinds(torch.zeros(len(x), dtype=torch.int64))
        return (
            y * self.calls * self.num_calls * self.num_of_class + sum(self.recent) + torch.rand(6, generator=self.noise)
        )


def _evaluating(module: nn.Module, x: Tensor) -> Pipeline:
    plan = make_plan(["0"], (), (0,), [["0F0", "0F1", "0B0", "0B1"]], len(x) // 2, 2)
    return Pipeline(module, plan, loss=loss, inputs=[x], evaluates=True, check=False)


@pytest.mark.usefixtures("alone")
def test_what_a_forward_changes_in_any_mode_is_as_before_an_evaluation() -> None:
    module, x = nn.Sequential(Changes("state")).double(), torch.randn(4, 6, dtype=torch.float64)
    pipeline, layer = _evaluating(module, x), module[0]
    assert isinstance(layer, Changes)
    before, generators = copy.deepcopy(layer), random.getstate()
    for _ in range(2):
        pipeline.evaluate(x)
        assert all(torch.equal(value, before.state_dict()[name]) for name, value in layer.state_dict().items())
        assert layer.noise.get_state().equal(before.noise.get_state())
        assert (layer.num_calls, layer.recent) == (before.num_calls, before.recent)
        assert Changes.num_of_class == 0
        assert random.getstate() == generators


CALLS = [0]
SEEN: dict[str, Tensor] = {}


class KeepsElsewhere(nn.Module):
    """Counts its forwards in a global, and keeps what it gets in another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += 1
        SEEN["last"] = x.detach()
        y: Tensor = self.linear(x) * CALLS[0]
        return y


@pytest.mark.usefixtures("alone")
def test_what_a_forward_keeps_outside_of_the_model_is_as_before_an_evaluation() -> None:
    module, x = nn.Sequential(KeepsElsewhere()).double(), torch.randn(4, 6, dtype=torch.float64)
    pipeline = _evaluating(module, x)
    CALLS[0], SEEN["last"] = 5, x[:1]
    for _ in range(2):
        found = pipeline.evaluate(x)
        assert found is not None
        wanted = [module[0].linear(x[:2]) * 6, module[0].linear(x[2:]) * 7]
        torch.testing.assert_close(found.outputs, tuple(wanted))
        assert CALLS == [5]
        assert SEEN.keys() == {"last"}
        assert torch.equal(SEEN["last"], x[:1])


@pytest.mark.usefixtures("alone")
def test_the_order_of_forwards_is_found_once_for_each_number_of_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Sequential(nn.Linear(6, 6)).double(), torch.randn(4, 6, dtype=torch.float64)
    pipeline, lowered = _evaluating(module, x), list[int]()

    def lower(schedule: Schedule, *, gloo: bool) -> tuple[Lowered, ...]:
        lowered.append(schedule.num_microbatches)
        return lower_for(schedule, gloo=gloo)

    monkeypatch.setattr("bapipe.runtime.evaluation.lower_for", lower)
    for num in (4, 3, 2, 4, 1):  # samples, of micro-batches of two
        found = pipeline.evaluate(x[:num], num_samples=num)
        assert found is not None
        torch.testing.assert_close(torch.cat(found.outputs), module(x[:num]))
    assert lowered == [2, 1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("what", ["parameter", "through data", "new data"])
def test_a_model_whose_parameters_an_evaluation_would_change_is_refused(what: str) -> None:
    module, x = nn.Sequential(Changes(what)).double(), torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(
        InvalidModel,
        match=r"^the forward changes the parameter '0\.linear\.weight' in evaluation mode, too, .*`self\.training`$",
    ):
        _evaluating(module, x).evaluate(x)
