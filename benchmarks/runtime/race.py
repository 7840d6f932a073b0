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
from bapipe.runtime.launch.processes import launch
from bapipe.runtime.launch.worker import Rank
from bapipe.runtime.lowering import check_runnable
from bapipe.runtime.optimizer import sgd
from bapipe.runtime.pipeline import Pipeline
from bapipe.simulator.timeline import Timeline
from benchmarks.runtime.by_hand import Step, ddp, one_process, pipelines, with_threads
from benchmarks.runtime.models import Raced, batch_like

LEARNING_RATE = 1e-4
NUM_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """The arguments of every rank.

    Attributes:
        plans: the plans that bapipe runs, by the name of their configuration.
        by_hand: the plan whose cut and micro-batches torch's own schedules run too.
        rounds, steps: number of rounds, and of timed steps of each configuration per round.
    """

    raced: Raced
    plans: Mapping[str, Plan]
    by_hand: Plan
    rounds: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements.

    Attributes:
        step_ns: by configuration, of every timed step the time of its slowest rank from a common start.
        overhead: the share of a step of `Race.by_hand` in which the main thread of the busiest rank computes something
            else than layers, loss and update: bapipe's runtime and torch's.
        timelines: of each plan that the first rank takes part in, of its last step.
    """

    step_ns: dict[str, list[int]]
    overhead: float
    timelines: dict[str, Timeline]


def race(given: Race, tell: Callable[[str], None]) -> Outcome:
    """Runs all configurations one after another, round by round, with one process per rank."""
    names = tuple(f"cpu{rank}" for rank in range(NUM_RANKS))
    return launch(_race_on, names, given, kind="cpu", on_message=lambda _, message: tell(message))[0]


def _race_on(rank: Rank, given: Race) -> Outcome:
    def tell(text: str) -> None:
        if rank.index == 0:
            rank.report(text)

    pipes = {name: _pipeline(given.raced, plan) for name, plan in given.plans.items()}
    steps = {name: _stepping(pipe, given.plans[name]) for name, pipe in pipes.items()} | _by_hand(given)
    inputs, target = batch_like(given.raced.build(), given.raced.minibatch_size)
    step_ns: dict[str, list[int]] = {name: [] for name in steps}
    for done in range(given.rounds + 1):
        tell(f"round {done} of {given.rounds}" if done else "the first step of each configuration")
        for name, step in steps.items():
            for i in range(given.steps + 1 if done else 1):
                elapsed_ns = _timed(step, inputs, target)
                if i:  # in the first one the caches hold another configuration's tensors
                    step_ns[name].append(elapsed_ns)
    timelines = {name: pipe.timeline() for name, pipe in pipes.items() if pipe is not None}
    piped = next(pipe for name, pipe in pipes.items() if given.plans[name] is given.by_hand)
    assert piped is not None
    overhead = _overhead(piped, steps[next(n for n, p in given.plans.items() if p is given.by_hand)], inputs, target)
    return Outcome(step_ns=step_ns, overhead=overhead, timelines=timelines)


def _pipeline(raced: Raced, plan: Plan) -> Pipeline | None:
    """Returns this rank's part of a plan, None if it has none."""
    num = len(check_runnable(plan))
    group = None if num == NUM_RANKS else dist.new_group(list(range(num)))
    if dist.get_rank() >= num:
        return None
    example = raced.build()
    torch.set_num_threads(_num_threads(plan))
    pipe = Pipeline(
        example.module, plan, loss=example.loss, inputs=example.inputs, optimizer=sgd(LEARNING_RATE), group=group
    )
    torch.set_num_threads(1)
    return pipe


def _stepping(pipe: Pipeline | None, plan: Plan) -> Step:
    if pipe is None:
        return lambda inputs, target: None
    return with_threads(_num_threads(plan), lambda inputs, target: pipe.step(*inputs, target=target))


def _num_threads(plan: Plan) -> int:
    return 1 if plan.settings is UNSET else plan.settings.threads


def _by_hand(given: Race) -> dict[str, Step]:
    build, num_accumulated = given.raced.build, given.raced.minibatch_size // NUM_RANKS // given.by_hand.microbatch_size
    steps = pipelines(build(), given.by_hand, LEARNING_RATE)
    parallel = ddp(build(), LEARNING_RATE)
    steps["DDP"] = parallel(1)
    if num_accumulated > 1:
        steps["DDP, accumulating"] = parallel(num_accumulated)
    steps[f"one process, {NUM_RANKS} threads"] = one_process(build(), LEARNING_RATE, NUM_RANKS)
    return steps


def _timed(step: Step, inputs: tuple[Tensor, ...], target: Tensor) -> int:
    dist.barrier()
    start_ns = time.perf_counter_ns()
    step(inputs, target)
    slowest = torch.tensor([time.perf_counter_ns() - start_ns])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return int(slowest)


def _overhead(pipe: Pipeline, step: Step, inputs: tuple[Tensor, ...], target: Tensor, num_steps: int = 3) -> float:
    """Returns the runtime's share of a step. Stamps become processor times of the main thread, without waits."""
    pipe._clock.stamp = time.thread_time_ns  # type: ignore[method-assign]
    shares = []
    for _ in range(num_steps):
        start_ns = time.thread_time_ns()
        elapsed_ns = _timed(step, inputs, target)
        shares.append((time.thread_time_ns() - start_ns - pipe.busy_ns()) / elapsed_ns)
    largest = torch.tensor([median(shares)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
