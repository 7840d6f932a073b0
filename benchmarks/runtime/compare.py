"""Runs every configuration of a model alternately on the same ranks, and measures its steps."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from msgspec import UNSET
from torch import Tensor

from bapipe.formats.plan import Plan
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.runtime.runnable import check_runnable
from bapipe.simulator.timeline import Timeline
from bapipe.training.launch.processes import launch
from bapipe.training.launch.worker import Rank
from benchmarks.runtime.by_hand import Step, ddp, one_process, pipelines, with_threads
from benchmarks.runtime.models import Workload, batch_like

LEARNING_RATE = 1e-4
NUM_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arguments of every rank.

    Attributes:
        plans: the plans that bapipe runs, by the name of their configuration.
        by_hand: the plan whose cut and micro-batches torch's own schedules run too.
        rounds, steps: number of rounds, and of timed steps of each configuration per round.
    """

    workload: Workload
    plans: Mapping[str, Plan]
    by_hand: Plan
    rounds: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements.

    Attributes:
        step_ns: by configuration: for every timed step, the time of its slowest rank from a common start.
        overhead: the share of a step of `Comparison.by_hand` in which the main thread of the busiest rank computes
            something else than layers, loss and update: bapipe's runtime and torch's.
        timelines: of the last step of each plan that the first rank takes part in.
    """

    step_ns: dict[str, list[int]]
    overhead: float
    timelines: dict[str, Timeline]


def compare(job: Comparison, log: Callable[[str], None]) -> Outcome:
    """Runs all configurations one after another, round by round, with one process per rank."""
    names = tuple(f"cpu{rank}" for rank in range(NUM_RANKS))
    return launch(_compare_on_rank, names, job, kind="cpu", on_message=lambda _, message: log(message))[0]


def _compare_on_rank(rank: Rank, job: Comparison) -> Outcome:
    def log(text: str) -> None:
        if rank.index == 0:
            rank.report(text)

    pipelines_here = {name: _pipeline(job.workload, plan) for name, plan in job.plans.items()}
    steps = {name: _step_function(pipeline, job.plans[name]) for name, pipeline in pipelines_here.items()}
    steps |= _by_hand(job)
    inputs, target = batch_like(job.workload.build(), job.workload.minibatch_size)
    step_ns: dict[str, list[int]] = {name: [] for name in steps}
    for done in range(job.rounds + 1):
        log(f"round {done} of {job.rounds}" if done else "the first step of each configuration")
        for name, step in steps.items():
            for i in range(job.steps + 1 if done else 1):
                elapsed_ns = _time_step(step, inputs, target)
                if i:  # in the first one the caches hold another configuration's tensors
                    step_ns[name].append(elapsed_ns)
    timelines = {name: pipeline.timeline() for name, pipeline in pipelines_here.items() if pipeline is not None}
    by_hand = next(name for name, plan in job.plans.items() if plan is job.by_hand)
    pipeline = pipelines_here[by_hand]
    assert pipeline is not None
    overhead = _overhead(pipeline, steps[by_hand], inputs, target)
    return Outcome(step_ns=step_ns, overhead=overhead, timelines=timelines)


def _pipeline(workload: Workload, plan: Plan) -> Pipeline | None:
    """Returns this rank's stages of a plan; None if it has none."""
    num = len(check_runnable(plan))
    group = None if num == NUM_RANKS else dist.new_group(list(range(num)))
    if dist.get_rank() >= num:
        return None
    example = workload.build()
    torch.set_num_threads(_num_threads(plan))
    pipeline = Pipeline(
        example.module, plan, loss=example.loss, inputs=example.inputs, optimizer=sgd(LEARNING_RATE), group=group
    )
    torch.set_num_threads(1)
    return pipeline


def _step_function(pipeline: Pipeline | None, plan: Plan) -> Step:
    if pipeline is None:
        return lambda inputs, target: None
    return with_threads(_num_threads(plan), lambda inputs, target: pipeline.step(*inputs, target=target))


def _num_threads(plan: Plan) -> int:
    return 1 if plan.settings is UNSET else plan.settings.threads


def _by_hand(job: Comparison) -> dict[str, Step]:
    build = job.workload.build
    num_accumulated = job.workload.minibatch_size // NUM_RANKS // job.by_hand.microbatch_size
    steps = pipelines(build(), job.by_hand, LEARNING_RATE)
    parallel = ddp(build(), LEARNING_RATE)
    steps["DDP"] = parallel(1)
    if num_accumulated > 1:
        steps["DDP, accumulating"] = parallel(num_accumulated)
    steps[f"one process, {NUM_RANKS} threads"] = one_process(build(), LEARNING_RATE, NUM_RANKS)
    return steps


def _time_step(step: Step, inputs: tuple[Tensor, ...], target: Tensor) -> int:
    dist.barrier()
    start_ns = time.perf_counter_ns()
    step(inputs, target)
    slowest = torch.tensor([time.perf_counter_ns() - start_ns])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return int(slowest)


def _overhead(pipeline: Pipeline, step: Step, inputs: tuple[Tensor, ...], target: Tensor, num_steps: int = 3) -> float:
    """Returns the runtime's share of a step. Stamps become processor times of the main thread, without waits."""
    pipeline._clock.stamp = time.thread_time_ns  # type: ignore[method-assign]
    shares = []
    for _ in range(num_steps):
        start_ns = time.thread_time_ns()
        elapsed_ns = _time_step(step, inputs, target)
        shares.append((time.thread_time_ns() - start_ns - pipeline.busy_ns()) / elapsed_ns)
    largest = torch.tensor([median(shares)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
