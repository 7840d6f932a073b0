"""The unsplit model as the reference of pipelines: a step of it, micro-batch by micro-batch, and how far a rank is off."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bapipe.runtime.pipeline import Pipeline
from bapipe.training.launch.worker import Rank

Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def run_each(rank: Rank, cases: Sequence[Case], run: Callable[[Case], Outcome]) -> list[Outcome]:
    """Returns what each case comes to on this rank; a failure names the case as the step."""
    outcomes = []
    for index, case in enumerate(cases):
        rank.enter_step(index)
        outcomes.append(run(case))
    return outcomes


def pipelined_step(pipeline: Pipeline, inputs: Sequence[Tensor], target: Tensor) -> float | None:
    """Trains on a mini-batch, of which the rank is given what it loads, and returns the loss where it is known."""
    given = [x if name in pipeline.needs else None for name, x in zip(pipeline.input_names, inputs, strict=True)]
    return pipeline.step(*given, target=target if pipeline.needs_target else None)


def whole_step(
    whole: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Sequence[Tensor],
    target: Tensor,
    loss: Callable[[Any, Tensor], Tensor],
    num: int,
) -> float:
    """Trains the unsplit model on a mini-batch of `num` micro-batches, and returns its loss."""
    optimizer.zero_grad()
    total = 0.0
    for m in range(num):
        value = loss(whole(*(x.chunk(num)[m].clone() for x in inputs)), target.chunk(num)[m]) / num
        value.backward()
        total += value.item()
    optimizer.step()
    return total


def largest_gradient_error(pipeline: Pipeline, whole: nn.Module) -> float:
    """Returns the largest difference of a gradient on this rank from that of the unsplit model."""
    wanted = dict(whole.named_parameters(remove_duplicate=False))
    return max((distance(p.grad, wanted[name].grad) for name, p in pipeline.named_parameters().items()), default=0.0)


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Returns the largest difference of two tensors; it is infinite if one of them is missing."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
