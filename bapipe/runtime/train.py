"""Training by a plan: starts the ranks, feeds them, and gathers what was measured."""

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from bapipe.errors import BapipeError
from bapipe.outcome import StepReport, TrainResult
from bapipe.plan import Plan
from bapipe.runtime.launch import launch
from bapipe.runtime.lower import Loss
from bapipe.runtime.materialize import layer_seed
from bapipe.runtime.pipeline import Pipeline, check_runnable, sgd
from bapipe.runtime.rank import Rank
from bapipe.schedule import Action


class Trainable(Protocol):
    """A model and how to train it; what `build` returns."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def inputs(self) -> tuple[Tensor, ...]: ...
    @property
    def loss(self) -> Loss: ...
    @property
    def initialize(self) -> Callable[[nn.Module], None] | None: ...


def train(
    plan: Plan,
    build: Callable[[], Trainable],
    dataset: Dataset[Any],
    *,
    steps: int,
    lr: float = 0.01,
    seed: int = 0,
    timeout_s: float = 600.0,
    on_step: Callable[[StepReport], None] | None = None,
) -> TrainResult:
    """Trains a model by a plan with SGD (momentum 0.9), in processes of its own or as part of a job of torchrun.

    `build` is called in every process and should give the module on the meta device, so that no process holds more
    than its stages. Items of `dataset` are (input, target), or ((input, ...), target) for several inputs; each epoch
    is another permutation, drawn from `seed`, and what does not fill a mini-batch is left out. `build` and `dataset`
    must be picklable. `on_step` is called in this process; under torchrun in rank 0's.

    Raises:
        BapipeError: the plan cannot run, is not for this model or job, or the data does not fill a mini-batch.
        RunFailed: a rank failed, was killed, or waited longer than `timeout_s`.
    """
    ranks = check_runnable(plan)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, not {steps}")
    _num_batches(plan, dataset)
    devices = [plan.cluster.devices[rank] for rank in ranks]
    kinds = sorted({device.kind for device in devices})
    if len(kinds) != 1 or kinds[0] not in ("cpu", "cuda"):
        raise BapipeError(
            f"the plan's devices are of kind {', '.join(kinds)}; torch can run a plan of cpu or of cuda devices"
        )

    def receive(_: int, report: StepReport) -> None:
        if on_step is not None:
            on_step(report)

    names = tuple(device.name for device in devices)
    job = (plan, build, dataset, steps, lr, seed)
    return launch(_train_rank, names, *job, kind=kinds[0], timeout_s=timeout_s, on_message=receive)[0]


def _train_rank(
    rank: Rank, plan: Plan, build: Callable[[], Trainable], dataset: Dataset[Any], steps: int, lr: float, seed: int
) -> TrainResult:
    example = build()
    pipeline = Pipeline(
        example.module,
        plan,
        loss=example.loss,
        inputs=example.inputs,
        optimizer=sgd(lr),
        device=rank.device,
        seed=seed,
        initialize=example.initialize,
    )
    torch.manual_seed(layer_seed(seed, f"rank {rank.index}"))
    batches = _batches(pipeline, plan, dataset, seed)
    reports = []
    for step in range(steps):
        rank.enter_step(step)
        reports.append(_step(pipeline, rank, step, *next(batches)))
        if rank.index == 0:
            rank.report(reports[-1])
    peaks: list[int | None] = [None] * rank.size
    dist.all_gather_object(peaks, pipeline.peak_bytes())
    orders: list[tuple[Action, ...]] = [()] * rank.size
    dist.all_gather_object(orders, pipeline.order)
    return TrainResult(
        losses=tuple(report.loss for report in reports),
        step_ns=tuple(report.step_ns for report in reports),
        devices=tuple(plan.cluster.devices[r].name for r in check_runnable(plan)),
        peak_bytes=tuple(peaks),
        timeline=pipeline.timeline(),
        order=tuple(orders),
    )


def _step(
    pipeline: Pipeline, rank: Rank, step: int, inputs: Sequence[Tensor | None], target: Tensor | None
) -> StepReport:
    dist.barrier()
    start_ns = time.perf_counter_ns()
    loss = pipeline.step(*inputs, target=target)
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
    elapsed_ns = time.perf_counter_ns() - start_ns
    own = torch.tensor([elapsed_ns, loss or 0.0, loss is not None], dtype=torch.float64, device=rank.device)
    everyone = [torch.empty_like(own) for _ in range(rank.size)]
    dist.all_gather(everyone, own)
    rows = [values.tolist() for values in everyone]
    return StepReport(step=step, loss=next(row[1] for row in rows if row[2]), step_ns=int(max(row[0] for row in rows)))


def _num_batches(plan: Plan, dataset: Dataset[Any]) -> int:
    num_items = len(cast(Sized, dataset))
    if num_items < plan.minibatch_size:
        raise BapipeError(
            f"the data has {num_items} samples, less than a mini-batch of {plan.minibatch_size}: "
            "give more data, or plan with a smaller --minibatch-size"
        )
    return num_items // plan.minibatch_size


def _batches(
    pipeline: Pipeline, plan: Plan, dataset: Dataset[Any], seed: int
) -> Iterator[tuple[tuple[Tensor | None, ...], Tensor | None]]:
    """Yields (inputs, target) without end; what this rank does not need is None, and is never stacked."""
    needs, names, epoch = pipeline.needs, pipeline.input_names, 0
    size = plan.microbatch_size
    rows = [row for m in pipeline.microbatches for row in range(m * size, (m + 1) * size)]
    stack = partial(_stack, rows, plan.minibatch_size)
    while True:
        generator = torch.Generator().manual_seed(layer_seed(seed, f"epoch {epoch}"))
        order = torch.randperm(len(cast(Sized, dataset)), generator=generator).tolist()
        for batch in range(_num_batches(plan, dataset)):
            chosen = order[batch * plan.minibatch_size :][: plan.minibatch_size]
            items = [dataset[chosen[i]] for i in rows] if needs or pipeline.needs_target else []
            columns = [given if isinstance(given, tuple | list) else (given,) for given, _ in items]
            if any(len(column) != len(names) for column in columns):
                raise BapipeError(f"the model takes {len(names)} inputs; the data gives {len(columns[0])} a sample")
            inputs = tuple(
                stack([column[place] for column in columns]) if name in needs else None
                for place, name in enumerate(names)
            )
            yield inputs, stack([target for _, target in items]) if pipeline.needs_target else None
        epoch += 1


def _stack(rows: Sequence[int], minibatch_size: int, values: list[Any]) -> Tensor:
    """Returns a mini-batch with values in some rows and anything in the others."""
    batch = default_collate(values)
    if not isinstance(batch, Tensor):
        raise BapipeError(f"a batch of the data is a {type(batch).__name__}, not a tensor")
    if len(rows) == minibatch_size:
        return batch
    return batch.new_empty(minibatch_size, *batch.shape[1:]).index_copy_(0, torch.tensor(rows), batch)
