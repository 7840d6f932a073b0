"""Losses and gradients of every schedule with all stages on one device, beside those of the model as a whole."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import bapipe
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.profiler.measure import measure_model
from bapipe.profiler.options import ProfileOptions
from bapipe.schedules import ALL, SIDE_BY_SIDE
from bapipe.torch_settings import tf32
from bapipe.zoo.example import Example
from benchmarks.gpu.one_device import plan_on_one_device
from benchmarks.gpu.workloads import example_of, random_batch, without_dropout

MICROBATCH_SIZE, NUM_MICROBATCHES, NUM_RANKS = 2, 4, 2
MAX_LOSS_ERROR, MAX_GRADIENT_ERROR = 1e-4, 1e-3
"""Relative errors that are still right in float32, whose sums are rounded in another order on a GPU."""

_MIN_SHARE = 1e-5
"""A parameter's error is relative to its gradient, or to this share of the largest gradient if that is more.

The gradient of GNMT's attention is 1e-7 of the others' at first, and the sum of such: it is mostly rounding.
"""


def correct_schedules(name: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields the errors of a model under each schedule."""
    example = example_of(name, is_tiny=True)
    without_dropout(example.module)
    batch = random_batch(name, example, MICROBATCH_SIZE * NUM_MICROBATCHES)
    profile = quick_profile(name, example, batch, device)
    reference = whole_step(example, batch, device)
    for schedule in ALL:
        if schedule in SIDE_BY_SIDE:  # torch cannot run it
            continue
        plan = plan_on_one_device(
            profile,
            schedule,
            num_ranks=NUM_RANKS,
            microbatch_size=MICROBATCH_SIZE,
            num_microbatches=NUM_MICROBATCHES,
        )
        yield {"schedule": schedule} | errors_of(pipelined_step(example, plan, batch, device)[1], reference)


def quick_profile(name: str, example: Example, batch: tuple[Tensor, ...], device: torch.device) -> ModelProfile:
    """Returns a profile at the one size that is run, whose times need not be good."""
    *inputs, target = batch
    return measure_model(
        example.module,
        inputs,
        target,
        example.loss,
        ProfileOptions(microbatch_sizes=(MICROBATCH_SIZE,), seconds_per_size=0.0, check=False),
        name=name,
        device=device,
    )


def whole_step(example: Example, batch: tuple[Tensor, ...], device: torch.device) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of a copy of the model by its own code."""
    module = copy.deepcopy(example.module).to(device).train()
    *inputs, target = (tensor.to(device) for tensor in batch)
    with tf32(False):
        loss = example.loss(module(*inputs), target)
        loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}


def pipelined_step(
    example: Example, plan: Plan, batch: tuple[Tensor, ...], device: torch.device
) -> tuple[bapipe.Pipeline, tuple[float | None, dict[str, Tensor]]]:
    """Returns a pipeline of a copy of the model after a step, and its loss and gradients, as far as it has them."""
    *inputs, target = batch
    pipeline = bapipe.Pipeline(
        copy.deepcopy(example.module), plan, loss=example.loss, inputs=inputs, device=device, check=False
    )
    loss = pipeline.step(*inputs, target=target)
    parameters = pipeline.named_parameters().items()
    return pipeline, (loss, {name: p.grad.cpu() for name, p in parameters if p.grad is not None})


def errors_of(
    got: tuple[float | None, dict[str, Tensor]], reference: tuple[float, dict[str, Tensor]]
) -> dict[str, Any]:
    """Returns the relative errors of a loss and of the gradients, the largest of all parameters, and the verdict."""
    (loss, gradients), (right_loss, right) = got, reference
    loss_error = 0.0 if loss is None else abs(loss - right_loss) / abs(right_loss)
    least = _MIN_SHARE * max(gradient.norm().item() for gradient in right.values())
    of_parameters = [
        ((gradients[name] - right[name]).norm() / right[name].norm().clamp(min=least)).item() for name in gradients
    ]
    gradient_error = torch.tensor(of_parameters).max().item() if of_parameters else 0.0  # of tensors: NaN is the most
    is_right = loss_error <= MAX_LOSS_ERROR and gradient_error <= MAX_GRADIENT_ERROR
    return {"loss_error": loss_error, "gradient_error": gradient_error, "right": is_right}
