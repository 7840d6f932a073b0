"""Optimizers and losses may not communicate with processes of other stages."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed._functional_collectives import all_reduce
from torch.testing._internal.distributed.fake_pg import FakeStore

from bapipe.equivalence.sample_dims import BY_ROWS
from bapipe.equivalence.target_weights import WeightsAhead
from bapipe.errors import BapipeError
from bapipe.runtime.clock import CpuClock
from bapipe.runtime.collectives_check import loss_checked, optimizer_checked
from bapipe.runtime.loss_weights import LossWeights
from bapipe.runtime.optimizer import StageOptimizers
from bapipe.runtime.process_layout import ProcessLayout
from bapipe.runtime.rng import PerOperatorRng
from bapipe.schedules.gpipe import gpipe
from bapipe.torch_device import CPU


@pytest.fixture
def layout() -> Iterator[ProcessLayout]:
    """Stage 0 on processes 0 and 1, stage 1 on process 2, seen from process 0; all messages are lost."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    schedule = replace(gpipe(3, 2), devices=((0, 1), (2,)))
    yield ProcessLayout(schedule=schedule, ranks=(0, 1, 2), rank=0, device=CPU, group=None)
    dist.destroy_process_group()


class Averages(optim.SGD):
    """Sums something over processes in each step, as optimizers for data parallelism do."""

    group: dist.ProcessGroup | None = None
    sums_norms = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad.norm() if self.sums_norms else parameter.grad, group=self.group)


def update(layout: ProcessLayout, kind: type[Averages]) -> None:
    layer = nn.Linear(4, 4)
    optimizers = StageOptimizers({0: layer}, lambda parameters: kind(parameters, 0.1), CpuClock(), layout)
    layer(torch.ones(1, 4)).sum().backward()
    optimizers.step(0)


def test_an_optimizer_that_averages_gradients_of_all_stages_is_refused(layout: ProcessLayout) -> None:
    with pytest.raises(BapipeError, match="exchanges gradients or weights with processes that run other stages"):
        update(layout, Averages)


def test_an_optimizer_may_sum_norms_over_all_processes(layout: ProcessLayout) -> None:
    update(layout, type("SumsNorms", (Averages,), {"sums_norms": True}))


def test_an_optimizer_may_communicate_with_the_replicas_of_its_stage(layout: ProcessLayout) -> None:
    update(layout, type("OfReplicas", (Averages,), {"group": dist.new_group([0, 1])}))


def test_an_optimizer_that_sends_weights_when_it_is_made_is_refused(layout: ProcessLayout) -> None:
    class Sends(optim.SGD):
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, 0.1)
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)

    with pytest.raises(BapipeError, match="exchanges gradients or weights"):
        StageOptimizers({0: nn.Linear(4, 4)}, Sends, CpuClock(), layout)  # type: ignore[arg-type]


def test_an_optimizer_that_averages_weights_now_and_then_is_refused(
    layout: ProcessLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr("bapipe.runtime.optimizer.num_collectives", lambda group: len(calls))

    class NowAndThen(optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            if calls:
                dist.all_reduce(self.param_groups[0]["params"][0].grad)
            calls.append(1)

    layer = nn.Linear(4, 4)
    optimizers = StageOptimizers({0: layer}, lambda parameters: NowAndThen(parameters, 0.1), CpuClock(), layout)
    layer(torch.ones(1, 4)).sum().backward()
    optimizers.step(0)
    with pytest.raises(BapipeError, match="exchanges gradients or weights"):
        optimizers.step(0)


def test_functional_collectives_count_too(layout: ProcessLayout) -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(BapipeError, match="the loss communicates"), loss_checked(layout, 1):
        all_reduce(torch.ones(4), "sum", group)


def test_a_compiled_optimizer_may_be_checked(layout: ProcessLayout) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    with optimizer_checked(layout, 0, 2):
        assert halved(torch.ones(2)).tolist() == [0.5, 0.5]


def test_a_loss_that_sums_over_all_processes_is_refused(layout: ProcessLayout) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        center = target.sum(0)
        dist.all_reduce(center)
        return (output - center).pow(2).mean()

    ahead = WeightsAhead(loss, lambda outputs, target: loss(outputs[0], target), [torch.zeros(2, 4)], [BY_ROWS], CPU)
    weights = LossWeights(ahead, [0], lambda part: part, PerOperatorRng(0, CPU), lambda: loss_checked(layout, 1))
    weights.begin(torch.ones(2, 4), 1)
    with pytest.raises(BapipeError, match="the loss communicates with processes that run other stages"):
        weights.computed(loss, torch.ones(2, 4), torch.ones(2, 4))
