"""The workers of test_closing.py: many pipelines one after another in the same processes, and one whose peer goes."""

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from bapipe.errors import BapipeError
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.stage_executors import ExecutorFactory
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan, named_order, random_order, replicas

NUM_PIPELINES = 20


class Tied(nn.Module):
    """Two layers of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.second(self.first(x)))
        return y


def many_pipelines(rank: Rank) -> tuple[list[tuple[int, int]], int, str, list[str]]:
    """Returns the numbers of open files and of threads after each pipeline, that of groups left, and what a closed
    pipeline says; and the names of the weights that it still gives.
    """
    kept, counts = [], []
    for number in range(NUM_PIPELINES):
        kept.append(Tied())  # a user may keep the module, whose parameters are those that trained
        pipeline = _step(kept[-1])
        if number == 0:
            gc.collect()
            gc.disable()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    said = ""
    try:
        pipeline.step(torch.zeros(4, 4), target=torch.zeros(4, 4))
    except BapipeError as error:
        said = str(error)
    pipeline.close()
    total = torch.ones(())
    dist.all_reduce(total)  # the group of the job still works
    assert total == 2
    return counts, len(dist.distributed_c10d._world.pg_map), said, sorted(pipeline.state_dict())


def failing_pipelines(rank: Rank) -> tuple[list[tuple[int, int]], int, list[str]]:
    """Returns the numbers of open files and of threads after each pipeline that cannot be made, that of groups left,
    and what was said.
    """
    counts, said, module = [], [], Tied()
    for number in range(NUM_PIPELINES):
        with pytest.MonkeyPatch.context() as patch:
            if number % 2:
                patch.setattr(ExecutorFactory, "training", _fails)
            try:
                _step(module, optimizer=lambda _: None)
            except (BapipeError, ZeroDivisionError) as error:
                said.append(str(error))
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        dist.barrier()
    return counts, len(dist.distributed_c10d._world.pg_map), said


def _fails(*_: object) -> None:
    raise ZeroDivisionError("while stages are connected")


def _step(module: nn.Module, **options: Any) -> Pipeline:
    ranks = ((0, 1), (0, 1))  # both stages have replicas, and share a weight
    plan = make_plan(["first", "second", "last"], (1,), ranks, random_order(0, ranks, 2, 0.0), 2, 2)
    with Pipeline(module, plan, loss=mse_loss, inputs=(torch.zeros(4, 4),), check=False, **options) as pipeline:
        pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    return pipeline


def replicas_on_some(rank: Rank) -> list[float]:
    """Returns a sum over all ranks behind each pipeline; only ranks 1 and 2 have the replicas of a stage."""
    sums = []
    for ranks in ((0, (1, 2)), ((1, 2), 0)):
        plan = make_plan(["0", "1"], (1,), ranks, random_order(0, replicas(ranks), 2, 0.0), 2, 2)
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with Pipeline(module, plan, loss=mse_loss, inputs=(torch.zeros(4, 4),), check=False) as pipeline:
            pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        total = torch.ones(())
        dist.all_reduce(total)
        sums.append(float(total))
    return sums


def left_by_another(rank: Rank) -> tuple[str, str]:
    """Returns the type of error and the text that a step ends with if the other rank has closed its connections."""
    plan = make_plan(["0", "1"], (1,), (0, 1), named_order("1f1b", 2, 2), 2, 2)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipeline = Pipeline(module, plan, loss=mse_loss, inputs=(torch.zeros(4, 4),), check=False)
    pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    if rank.index == 1:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for who closes that of the job
        return "", ""
    try:
        pipeline.step(torch.ones(4, 4), target=torch.zeros(4, 4))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"
