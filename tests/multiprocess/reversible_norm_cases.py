"""The worker of test_reversible_norm.py: each rank also trains the whole model, and compares."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from bapipe.equivalence.check import Equivalence, example_microbatches
from bapipe.equivalence.choose_layers import trace_checked
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.torch_device import CPU
from bapipe.training.launch.worker import Rank
from tests.models.reversible_norm import HORIZON, LENGTH, NUM_CHANNELS, Forecaster, ReversibleNorm
from tests.multiprocess.runtime_cases import make_plan, named_order
from tests.multiprocess.whole_model import distance, largest_gradient_error, pipelined_step, run_each, whole_step

NUM_MICROBATCHES, MICROBATCH_SIZE = 4, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """A forecaster, a schedule, and the layers before which it is cut."""

    schedule: str
    cuts: tuple[int, ...]
    affine: bool = True
    subtract_last: bool = False
    detached: bool = True
    follows_sizes: bool = False
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The layers that were found, and the largest errors of one rank over two steps."""

    layers: tuple[str, ...]
    loss: float
    gradient: float
    parameter: float
    num_gradients: int


def run_cases(rank: Rank, cases: Sequence[Case]) -> list[Outcome]:
    torch.set_num_threads(1)
    return run_each(rank, cases, _run)


def _run(item: Case) -> Outcome:
    torch.manual_seed(0)
    norm = ReversibleNorm(affine=item.affine, subtract_last=item.subtract_last, detached=item.detached)
    whole = Forecaster(norm, follows_sizes=item.follows_sizes).double()
    part = copy.deepcopy(whole)
    (example, target), *batches = [_samples(size) for size in (2, *2 * (NUM_MICROBATCHES * MICROBATCH_SIZE,))]
    model, result = trace_checked(
        part, [example], mse_loss, example_microbatches([example], target, (2, 2, 3), CPU), max_size=3
    )
    assert isinstance(result, Equivalence), result
    layers = tuple(layer.name for layer in model.layers)
    order = named_order(item.schedule, len(item.cuts) + 1, NUM_MICROBATCHES)
    ranks = range(len(order))
    plan = make_plan(layers, item.cuts, ranks, order, MICROBATCH_SIZE, NUM_MICROBATCHES, item.recompute)
    pipeline = Pipeline(part, plan, loss=mse_loss, inputs=[example], optimizer=sgd(0.1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    loss = gradient = 0.0
    for inputs, wanted in batches:
        got = pipelined_step(pipeline, [inputs], wanted)
        want = whole_step(whole, optimizer, [inputs], wanted, mse_loss, NUM_MICROBATCHES)
        loss = max(loss, abs(got - want) if got is not None else 0.0)
        gradient = max(gradient, largest_gradient_error(pipeline, whole))
    state = whole.state_dict()
    return Outcome(
        layers=layers,
        loss=loss,
        gradient=gradient,
        parameter=max((distance(value, state[name]) for name, value in pipeline.state_dict().items()), default=0.0),
        num_gradients=sum(p.grad is not None for p in pipeline.named_parameters().values()),
    )


def _samples(num: int) -> tuple[Tensor, Tensor]:
    """Returns series that wander, as no batch of independent numbers does, and their continuations."""
    steps = torch.randn(num, LENGTH + HORIZON, NUM_CHANNELS, dtype=torch.float64)
    series = 5 + 3 * steps.cumsum(1)
    return series[:, :LENGTH], series[:, LENGTH:]
