"""The worker of test_architectures.py: two stages on three ranks, the second with replicas."""

import random
from collections.abc import Sequence

import torch

from bapipe.runtime.launch.worker import Rank
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.tracing import trace
from bapipe.tracing.bound_inputs import only_tensor_inputs
from tests.models.architectures import ARCHITECTURES, ROWS
from tests.models.in_one_process import largest_error, whole_step
from tests.models.random_partitions import Trained, random_stages
from tests.multiprocess.runtime_cases import make_plan_of, random_order


def train_with_replicas(rank: Rank, names: Sequence[str]) -> list[tuple[str, float]]:
    """Returns for each architecture what differs most on this rank, and by how much; the second stage recomputes."""
    torch.set_num_threads(1)
    outcomes = []
    for index, name in enumerate(names):
        rank.enter_step(index)
        outcomes.append(_largest_error(name, seed=index))
    return outcomes


def _largest_error(name: str, seed: int) -> tuple[str, float]:
    architecture = ARCHITECTURES[name]()
    module, want = architecture.module, whole_step(architecture, ROWS)
    with only_tensor_inputs(module, architecture.inputs) as tensors:
        stages = random_stages(trace(module, tensors), 2, random.Random(seed))
    ranks = (0, (1, 2))
    plan = make_plan_of(stages, ranks, random_order(seed, ranks, ROWS, 0.0), 1, ROWS, recompute=(1,))
    pipeline = Pipeline(
        module, plan, loss=architecture.loss, inputs=architecture.inputs, optimizer=sgd(0.0), check=False
    )
    target = architecture.target if pipeline.needs_target else None
    loss = pipeline.step(*architecture.inputs.values(), target=target)
    grads = {key: p.grad for key, p in pipeline.named_parameters().items() if p.grad is not None}
    own = {key: grad for key, grad in want.grads.items() if key in pipeline.named_parameters()}
    got = Trained(want.loss if loss is None else torch.tensor(loss, dtype=torch.float64), grads, {})
    return largest_error(got, Trained(want.loss, own, {}))
