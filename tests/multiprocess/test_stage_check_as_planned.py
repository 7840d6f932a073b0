"""The check before training runs stages as the plan does: what is wrong in one way of running only is found, too."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bapipe.equivalence import stage_pass
from bapipe.equivalence.check import Difference, Equivalence, Unchecked, compare_stages
from bapipe.equivalence.outcome import Conditions
from bapipe.equivalence.stage_pass import Stage
from bapipe.errors import InvalidModel
from bapipe.formats.plan import Plan
from bapipe.runtime import planned_stage, stage_check
from bapipe.runtime.autocast import AutocastStage
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.recompute import RecomputedStage
from bapipe.runtime.recompute_layers import _Saved
from tests.multiprocess.runtime_cases import make_plan

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
WHOLE = [["0F0", "1F0", "1B0", "0B0"]]
SPLIT = [["0F0", "1F0", "1I0", "0I0", "1W0", "0W0"]]


class Model(nn.Module):
    """Dropout, running statistics, and a layer of which one stage holds the half."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 5)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(self.frozen(x)))
        x = self.b(self.drop(x)).relu()
        y: Tensor = self.c(x)
        return y


LAYERS = ["frozen", "a", "norm", "drop", "b", "c"]


def plan_of(order: list[list[str]], recompute: tuple[int, ...] = (), cut: int = 3) -> Plan:
    return make_plan(LAYERS, (cut,), (0, 0), order, 4, 1, recompute)


def build(order: list[list[str]], recompute: tuple[int, ...] = (), **options: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(Model(), plan_of(order, recompute), loss=cross_entropy, inputs=[X], **options)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("cut", [1, 3, 6])
@pytest.mark.parametrize("recompute", [(), (0, 1)])
@pytest.mark.parametrize("order", [WHOLE, SPLIT])
def test_what_runs_rightly_passes(
    order: list[list[str]], recompute: tuple[int, ...], cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Equivalence | Unchecked | Difference] = []

    def noted(*args: Any) -> Equivalence | Unchecked | Difference:
        found.append(compare_stages(*args))
        return found[-1]

    monkeypatch.setattr(stage_check, "compare_stages", noted)
    torch.manual_seed(0)
    plan = plan_of(order, recompute, cut)
    Pipeline(Model(), plan, loss=cross_entropy, inputs=[X], autocast=torch.bfloat16, evaluates=True)
    equal = "in 2 stages, the model equals the original: loss, {} gradients, {} changed buffers"
    # In float32, under autocast, in evaluation mode, and there on a single sample.
    assert list(map(str, found)) == [*[equal.format(8, 3)] * 2, *[equal.format(0, 0)] * 2]


@pytest.mark.usefixtures("alone")
def test_a_w_that_loses_a_gradient_is_found_if_the_plan_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_pass, "stage_backward_weight", lambda parameters, groups: None)
    assert build(WHOLE).stages
    with pytest.raises(InvalidModel, match=r"^the stages would not train as the module does: the gradient of '[abc]\."):
        build(SPLIT)


@pytest.mark.usefixtures("alone")
def test_a_recomputation_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputing = RecomputedStage.recomputing

    @contextmanager
    def doubled(self: RecomputedStage, microbatch: int) -> Iterator[None]:
        hook = self.module.register_forward_hook(lambda module, args, output: tuple(2 * value for value in output))
        with recomputing(self, microbatch):
            yield
        hook.remove()

    monkeypatch.setattr(RecomputedStage, "recomputing", doubled)
    assert build(WHOLE).stages
    with pytest.raises(InvalidModel, match=r"^the stages would not train as the module does: the gradient of"):
        build(WHOLE, recompute=(1,))


@pytest.mark.usefixtures("alone")
def test_a_stage_that_fails_under_autocast_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(AutocastStage):
        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            outputs = super().forward(*args, **kwargs)
            return tuple(output * 3 for output in outputs)

    monkeypatch.setattr(planned_stage, "AutocastStage", Failing)
    assert build(WHOLE).stages
    with pytest.raises(InvalidModel, match=r"^under autocast the stages would not train as the module does: the loss"):
        build(WHOLE, autocast=torch.bfloat16)


class Doubled(nn.Module):
    """A stage that gives twice what it should."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return tuple(2 * value for value in self.stage(*args))


@pytest.mark.usefixtures("alone")
def test_a_difference_in_evaluation_mode_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, stages: list[Stage], loss: Any, microbatches: Any, conditions: Conditions) -> Any:
        if not conditions.trains:
            stages = [replace(stage, module=Doubled(stage.module)) for stage in stages]
        return compare_stages(model, stages, loss, microbatches, conditions)

    monkeypatch.setattr(stage_check, "compare_stages", broken)
    assert build(WHOLE).stages
    with pytest.raises(InvalidModel, match=r"^in evaluation mode the stages would not give what the module does: "):
        build(WHOLE, evaluates=True)


class Writes(nn.Module):
    """A layer that changes its input in place, as autograd sees it or not, and draws a number outside of torch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + np.random.rand() + random.random()
        if self.how == "operator":
            return x.mul_(factor).sin()
        with torch.no_grad():
            (x.data if self.how == "data" else x).mul_(factor)
        return x.sin()


def with_writes(how: str, order: list[list[str]], recompute_layers: tuple[str, ...], **options: Any) -> Pipeline:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), Writes(how), nn.Linear(6, 5))
    plan = make_plan(["0", "1", "2"], (), (0,), order, 2, 2, (), recompute_layers)
    return Pipeline(module, plan, loss=cross_entropy, inputs=[X[:2]], **options)


TWO_AT_A_TIME = [["0F0", "0F1", "0B0", "0B1"]]
TWO_SPLIT = [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("recompute_layers", [("1",), ("1", "2"), ("0",)])
@pytest.mark.parametrize("order", [TWO_AT_A_TIME, TWO_SPLIT])
@pytest.mark.parametrize("how", ["operator", "no_grad"])
def test_a_recomputed_layer_may_change_its_input(
    how: str, order: list[list[str]], recompute_layers: tuple[str, ...]
) -> None:
    def trained(recompute_layers: tuple[str, ...]) -> list[Tensor]:
        pipeline = with_writes(how, order, recompute_layers)
        target = torch.tensor([0, 1, 2, 3])
        for _ in range(2):
            pipeline.step(X.clone(), target=target)
        return [parameter.detach() for parameter in pipeline.named_parameters().values()]

    for got, wanted in zip(trained(recompute_layers), trained(()), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("check", [True, False])
def test_a_recomputed_layer_that_changes_its_input_unseen_is_refused(check: bool) -> None:
    with pytest.raises(InvalidModel, match=r"^the forward changes an input in place .* \(by `tensor.data`\)"):
        with_writes("data", TWO_AT_A_TIME, ("1",), check=check).step(X.clone(), target=torch.tensor([0, 1, 2, 3]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", [WHOLE, SPLIT])
def test_layers_are_compared_as_they_are_recomputed(order: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_another(self: _Saved, tensor: Tensor) -> None:
        self.tensors.append(2 * tensor.detach())

    plan = make_plan(LAYERS, (3,), (0, 0), order, 4, 1, (), ("a", "c"))
    assert Pipeline(Model(), plan, loss=cross_entropy, inputs=[X]).stages
    monkeypatch.setattr(_Saved, "append", keeps_another)
    with pytest.raises(InvalidModel, match=r"^the stages would not train as the module does: the gradient of"):
        Pipeline(Model(), plan, loss=cross_entropy, inputs=[X])
