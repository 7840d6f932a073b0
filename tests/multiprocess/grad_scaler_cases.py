"""The worker of test_grad_scaler.py: pipelines in float16, and the whole model with torch's own GradScaler beside them."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bapipe.runtime.grad_scaler import unscale
from bapipe.runtime.optimizer import optimizer_factory
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.training.launch.worker import Rank
from tests.multiprocess.runtime_cases import make_plan, mlp, named_order, random_order

STEPS = 6


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Large enough for the first factors to be too large."""
    return 20 * nn.functional.cross_entropy(output, target)


@dataclass(frozen=True)
class Outcome:
    """Largest errors over the steps, and the factor after each of them."""

    loss: float
    parameter: float
    factors: tuple[float, ...]
    wanted: tuple[float, ...]


def run(rank: Rank) -> tuple[list[Outcome], list[tuple[bool, float]]]:
    plans = (((5,), (0, 1), named_order("1f1b", 2, 2)), ((), ((0, 1),), random_order(1, ((0, 1),), 2, 0.0)))
    outcomes = [_train(*plan) for plan in plans]
    checks = []
    for value in (float("inf"), float("nan"), 4.0):
        gradient = torch.tensor([value if rank.index == 0 else 4.0])
        checks.append((unscale([gradient], 2.0, rank.device, None), gradient.item()))
    return outcomes, checks


def _train(cuts: tuple[int, ...], ranks: tuple[int | tuple[int, ...], ...], order: list[list[str]]) -> Outcome:
    torch.manual_seed(0)
    whole = mlp()
    part = copy.deepcopy(whole)
    x, y = torch.randn(6, 6), torch.arange(6) % 5
    plan = make_plan([layer.name for layer in trace(part, [x]).layers], cuts, ranks, order, 3, 2)
    make = optimizer_factory("adamw", 0.01, {})
    pipeline = Pipeline(part, plan, loss=loss, inputs=[x], optimizer=make, clip_norm=2.0, autocast=torch.float16)
    reference, scaler = make(whole.parameters()), torch.amp.GradScaler("cpu", init_scale=65_536.0)
    loss_error = parameter_error = 0.0
    factors, wanted = [], []
    for _ in range(STEPS):
        got, want = pipeline.step(x, target=y), 0.0
        reference.zero_grad()
        for inputs, target in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.float16):
                value = loss(whole(inputs), target) / 2
            scaler.scale(value).backward()
            want += value.item()
        scaler.unscale_(reference)
        nn.utils.clip_grad_norm_(whole.parameters(), 2.0)
        scaler.step(reference)
        scaler.update()
        loss_error = max(loss_error, abs(got - want) / want if got is not None else 0.0)
        for name, parameter in pipeline.named_parameters().items():
            parameter_error = max(parameter_error, float((parameter - whole.get_parameter(name)).detach().abs().max()))
        assert pipeline.grad_scaler is not None
        factors.append(pipeline.grad_scaler.scale)
        wanted.append(scaler.get_scale())
    return Outcome(loss_error, parameter_error, tuple(factors), tuple(wanted))
