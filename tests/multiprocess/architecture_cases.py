"""Two stages, or one, of architectures on three ranks, with different numbers of replicas."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing.bound_inputs import only_tensor_inputs
from bapipe.tracing.layers import trace
from bapipe.training.launch.worker import Rank
from tests.models.architectures import ARCHITECTURES, ROWS
from tests.models.in_one_process import largest_error, traced_once, whole_step
from tests.models.random_partitions import Trained, random_stages
from tests.multiprocess.runtime_cases import make_plan_of, random_order


@dataclass(frozen=True)
class ReplicaCase:
    """An architecture by name, and the ranks of each stage; the last stage recomputes."""

    name: str
    ranks: tuple[int | tuple[int, ...], ...]


def train_with_replicas(rank: Rank, cases: Sequence[ReplicaCase]) -> list[tuple[str, float]]:
    """Returns for each case what differs most on this rank from the whole model, and by how much."""
    torch.set_num_threads(1)
    outcomes = []
    for index, case in enumerate(cases):
        rank.enter_step(index)
        outcomes.append(_largest_error(case, seed=index))
    return outcomes


def _largest_error(case: ReplicaCase, seed: int) -> tuple[str, float]:
    architecture = ARCHITECTURES[case.name]()
    module, want = architecture.module, whole_step(architecture, ROWS)
    with only_tensor_inputs(module, architecture.inputs) as tensors:
        model = trace(module, tensors)
    last = len(case.ranks) - 1
    stages = random_stages(model, len(case.ranks), random.Random(seed))
    plan = make_plan_of(stages, case.ranks, random_order(seed, case.ranks, ROWS, 0.0), 1, ROWS, recompute=(last,))
    with traced_once(model):
        pipeline = Pipeline(
            module, plan, loss=architecture.loss, inputs=architecture.inputs, optimizer=sgd(0.0), check=False
        )
    target = architecture.target if pipeline.needs_target else None
    loss = pipeline.step(*architecture.inputs.values(), target=target)
    grads = {key: p.grad for key, p in pipeline.named_parameters().items() if p.grad is not None}
    own = {key: grad for key, grad in want.grads.items() if key in pipeline.named_parameters()}
    got = Trained(want.loss if loss is None else torch.tensor(loss, dtype=torch.float64), grads, {})
    return largest_error(got, Trained(want.loss, own, {}))
