"""Hand-written torch code for comparison: DDP, one process of several threads, and torch's own schedules."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from bapipe.formats.plan import Plan
from bapipe.runtime.split import split
from bapipe.tracing.layers import granularity, trace
from bapipe.tracing.stage_module import argument_names, stage_module
from bapipe.zoo.example import Example

Step = Callable[[tuple[Tensor, ...], Tensor], object]
"""(inputs, target) of the whole mini-batch -> nothing of interest."""

CLASSES = {"Schedule1F1B": Schedule1F1B, "ScheduleGPipe": ScheduleGPipe}
CPU = torch.device("cpu")


def optimizer_of(module: nn.Module, learning_rate: float) -> Optimizer:
    return SGD(module.parameters(), lr=learning_rate, momentum=0.9)


def ddp(example: Example, learning_rate: float) -> Callable[[int], Step]:
    """Each rank takes its share of the mini-batch in some micro-batches; gradients travel during the last one's B.

    Returns a step for a number of micro-batches.
    """
    module = DistributedDataParallel(example.module, gradient_as_bucket_view=True)
    optimizer = optimizer_of(module, learning_rate)
    rank, size = dist.get_rank(), dist.get_world_size()

    def made(num_microbatches: int) -> Step:
        def step(inputs: tuple[Tensor, ...], target: Tensor) -> None:
            own = [tensor.chunk(size)[rank].chunk(num_microbatches) for tensor in (*inputs, target)]
            optimizer.zero_grad()
            for m, (*given, wanted) in enumerate(zip(*own, strict=True)):
                with module.no_sync() if m + 1 < num_microbatches else nullcontext():
                    (example.loss(module(*given), wanted) / num_microbatches).backward()
            optimizer.step()

        return step

    return made


def with_threads(num_threads: int, step: Step) -> Step:
    """Returns a step that computes with some number of threads."""

    def changed(inputs: tuple[Tensor, ...], target: Tensor) -> None:
        torch.set_num_threads(num_threads)
        step(inputs, target)
        torch.set_num_threads(1)

    return changed


def one_process(example: Example, learning_rate: float, num_threads: int) -> Step:
    """The first rank takes the whole mini-batch, with as many threads as there are ranks; the others wait."""
    if dist.get_rank():
        return lambda inputs, target: None
    optimizer = optimizer_of(example.module, learning_rate)

    def step(inputs: tuple[Tensor, ...], target: Tensor) -> None:
        optimizer.zero_grad()
        example.loss(example.module(*inputs), target).backward()
        optimizer.step()

    return with_threads(num_threads, step)


def pipelines(example: Example, plan: Plan, learning_rate: float) -> dict[str, Step]:
    """The plan's cut and micro-batches under torch's own schedules, which know the shapes from the start."""
    rank = dist.get_rank()
    layers = [name for stage in plan.stages for name in stage.layers]
    leaf_modules, inlined, operator_layers = granularity(example.module, layers)
    traced = trace(
        example.module, example.tensors, leaf_modules=leaf_modules, operator_layers=operator_layers, inlined=inlined
    )
    parts = split(traced, plan, example.tensors)
    tensors, examples = parts.stages[rank], parts.examples
    module = stage_module(parts, rank)
    optimizer = optimizer_of(module, learning_rate)
    first, last = rank == 0, rank + 1 == len(plan.stages)
    taken = tensors.loaded if first else tensors.received
    stage = PipelineStage(
        module,
        rank,
        len(plan.stages),
        CPU,
        input_args=tuple(examples[name] for name in taken),
        output_args=tuple(examples[name] for name in tensors.outputs),
    )
    places = {name: place for place, name in enumerate(parts.model.inputs)}
    named = dict(zip(argument_names(parts, tensors.loaded), tensors.loaded, strict=True))

    def loss(output: Any, target: Tensor) -> Tensor:
        return example.loss(parts.model.result.rebuild(output), target)

    def made(name: str) -> Step:
        schedule = CLASSES[name](stage, plan.num_microbatches, loss_fn=loss)

        def step(inputs: tuple[Tensor, ...], target: Tensor) -> None:
            optimizer.zero_grad()
            given = [inputs[places[name]] for name in tensors.loaded] if first else []
            arguments: dict[str, Any] = {} if first else {key: inputs[places[name]] for key, name in named.items()}
            losses: list[Tensor] = []
            loss_arguments: dict[str, Any] = {"target": target, "losses": losses} if last else {}
            schedule.step(*given, **loss_arguments, **arguments, return_outputs=False)
            optimizer.step()

        return step

    return {name: made(name) for name in CLASSES}
