"""The worker of test_branching_models.py: models that are no chains, on real ranks, against the whole model in each rank."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.layers import trace
from bapipe.training.launch.worker import Rank
from tests.models.in_one_process import traced_once
from tests.models.random_partitions import random_stages
from tests.models.small_zoo import SMALL, small, without_dropout
from tests.models.transformers_models import MODELS as HUGGING_FACE
from tests.multiprocess.architecture_cases import ReplicaCase, train_with_replicas
from tests.multiprocess.runtime_cases import make_plan_of, named_order
from tests.multiprocess.whole_model import distance, largest_gradient_error, pipelined_step, run_each, whole_step

Trained = tuple[nn.Module, tuple[Tensor, ...], Tensor, Callable[[Any, Tensor], Tensor]]

ROWS = 4


@dataclass(frozen=True)
class Case:
    """A model by name, a schedule, and the seed of its stages."""

    model: str
    schedule: str
    seed: int
    num_microbatches: int = 2


@dataclass(frozen=True)
class Outcome:
    """Largest errors of one rank over two steps, and the state it holds."""

    loss: float
    gradient: float
    parameter: float
    keys: tuple[str, ...]
    all_keys: tuple[str, ...]


def two_ranks(
    rank: Rank, cases: Sequence[Case], cuts: Sequence[int]
) -> tuple[list[Outcome], list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    return _run_models(rank, cases), _dropout_of(cuts)


def three_ranks(
    rank: Rank, cases: Sequence[Case], uneven: Sequence[ReplicaCase]
) -> tuple[list[Outcome], list[tuple[str, float]]]:
    return _run_models(rank, cases), train_with_replicas(rank, uneven)


def _run_models(rank: Rank, cases: Sequence[Case]) -> list[Outcome]:
    torch.set_num_threads(1)
    return run_each(rank, cases, partial(_run, num_ranks=rank.size))


def _made(name: str) -> Trained:
    torch.manual_seed(0)
    if name in SMALL:
        example = small(name)
        rows = torch.arange(ROWS) % len(example.target)
        module = without_dropout(example.module)
        return module, tuple(tensor[rows] for tensor in example.tensors), example.target[rows], example.loss
    return HUGGING_FACE[name.partition("/")[2]]()


def _run(item: Case, num_ranks: int) -> Outcome:
    module, inputs, target, loss = _made(item.model)
    whole = module.double().train()
    inputs = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs)
    target = target.double() if target.is_floating_point() else target
    num = item.num_microbatches
    part = copy.deepcopy(whole)
    model = trace(part, inputs)
    stages = random_stages(model, num_ranks, random.Random(item.seed))
    assert len(stages) == num_ranks
    order = named_order(item.schedule, num_ranks, num)
    plan = make_plan_of(stages, range(num_ranks), order, ROWS // num, num)
    with traced_once(model):
        examples = [tensor[:1] for tensor in inputs]
        pipeline = Pipeline(part, plan, loss=loss, inputs=examples, optimizer=sgd(0.1), check=False)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    errors = [0.0, 0.0, 0.0]
    for _ in range(2):
        got = pipelined_step(pipeline, inputs, target)
        want = whole_step(whole, optimizer, inputs, target, loss, num)
        state = pipeline.state_dict()
        errors[0] = max(errors[0], abs(got - want) if got is not None else 0.0)
        errors[1] = max(errors[1], largest_gradient_error(pipeline, whole))
        errors[2] = max(errors[2], *(distance(state[name], whole.state_dict()[name]) for name in state), 0.0)
    loss_error, gradient_error, parameter_error = errors
    return Outcome(
        loss=loss_error,
        gradient=gradient_error,
        parameter=parameter_error,
        keys=tuple(state),
        all_keys=tuple(whole.state_dict()),
    )


class Dropping(nn.Module):
    """Dropout as a module, as a function, twice at the end of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.a(x))
        y = nn.functional.dropout(nn.functional.dropout(self.b(y), 0.3, self.training), 0.3, self.training)
        return self.c(y)


def _dropout_of(cuts: Sequence[int]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Returns, for each cut, what a rank of two and a rank alone have after two steps, by the same names."""
    torch.manual_seed(0)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    x, target = torch.randn(8, 6), torch.randint(0, 5, (8,))
    results = []
    for cut in cuts:
        states = []
        for group, num_ranks in ((None, 2), (alone, 1)):
            torch.manual_seed(1)
            module = Dropping()
            layers = [layer.name for layer in trace(module).layers]
            stages = [layers[:cut], [*layers[cut:], "loss"]] if num_ranks == 2 else [[*layers, "loss"]]
            plan = make_plan_of(stages, range(num_ranks), named_order("1f1b", num_ranks, 4), 2, 4)
            pipeline = Pipeline(
                module, plan, loss=nn.functional.cross_entropy, inputs=[x[:1]], seed=3, group=group,
            )  # fmt: skip
            before = torch.get_rng_state()
            for _ in range(2):
                pipeline.step(x, target=target if pipeline.needs_target else None)
            assert torch.equal(before, torch.get_rng_state())
            states.append(pipeline.state_dict())
        results.append((states[0], {name: states[1][name] for name in states[0]}))
    return results
