"""bapipe's plans for a model and their predicted step times: profiles its layers, then plans."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import bapipe
from bapipe.formats.cluster import Cluster
from bapipe.formats.codec import read, write
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.settings import Settings
from bapipe.planner.inputs import local_cluster
from bapipe.planner.schedule_placement import distribute_replicas
from bapipe.profiler.profile import profile_model
from bapipe.schedules import SCHEDULES
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages
from benchmarks.runtime.models import Raced

CHOICE, PARALLEL, PIPELINE = "bapipe's choice", "bapipe, data parallel", "bapipe, two stages"
BY_HAND = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """Plans by the name of their configuration, and the predicted step times of all that can be simulated.

    Attributes:
        by_hand: the plan with one stage per rank, which torch's own schedules run too.
    """

    plans: dict[str, Plan]
    by_hand: Plan
    step_ns: dict[str, int]


def promise(raced: Raced, num_ranks: int, folder: Path, tell: Callable[[str], None]) -> Promised:
    """Returns the plans of a model; what the folder does not hold is measured and put there.

    Nothing is pinned for the first: it may have any number of stages and replicas, or take the cores as one device.
    """
    cluster = _cluster(folder / "cluster.json", num_ranks)
    one = _profile(folder, raced, 1, num_ranks, raced.sizes, tell)
    all_cores = _profile(folder, raced, num_ranks, num_ranks, raced.sizes[-2:], tell)
    size = raced.minibatch_size
    choice = bapipe.plan([one, all_cores], cluster, minibatch_size=size)
    parallel = bapipe.plan(one, cluster, minibatch_size=size, num_stages=1)
    schedules = tuple(dict.fromkeys((*BY_HAND.values(), "eager-1f1b")))
    piped = bapipe.plan(one, cluster, minibatch_size=size, schedules=schedules, num_stages=num_ranks, replicas=False)
    plans = {CHOICE: choice}
    for name, plan in ((PARALLEL, parallel), (PIPELINE, piped)):
        if plan.order != choice.order or plan.stages != choice.stages:
            plans[name] = plan
    step_ns = {name: plan.prediction.step_ns for name, plan in plans.items()}
    step_ns |= {name: _simulated_step_ns(piped, schedule, one) for name, schedule in BY_HAND.items()}
    return Promised(plans=plans, by_hand=plans.get(PIPELINE, choice), step_ns=step_ns)


def in_words(plan: Plan) -> str:
    """Returns what a plan does, in a line."""
    cut = ", ".join(f"to {stage.layers[-1]} on {' and '.join(stage.devices)}" for stage in plan.stages)
    threads = plan.settings.threads if isinstance(plan.settings, Settings) else 1
    return f"{plan.schedule}, {plan.num_microbatches} x {plan.microbatch_size}, {cut}, threads: {threads}"


def _cluster(path: Path, num_ranks: int) -> Cluster:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, local_cluster(num_ranks, "cpu"))
    return read(path, Cluster)


def _profile(
    folder: Path, raced: Raced, num_threads: int, num_cores: int, sizes: tuple[int, ...], tell: Callable[[str], None]
) -> ModelProfile:
    """The layers' times with so many threads, other processes training on the rest of the cores."""
    path = folder / f"{raced.model}-{num_threads}.json"
    if not path.exists():
        tell(f"measuring the layers of {raced.model}, threads: {num_threads}")
        measured = profile_model(
            raced.model,
            raced.arguments,
            microbatch_sizes=sizes,
            settings=Settings(threads=num_threads),
            num_co_runners=num_cores - num_threads,
        )
        write(path, measured)
    return read(path, ModelProfile)


def _simulated_step_ns(plan: Plan, schedule: str, profile: ModelProfile) -> int:
    """Returns the simulated step time of a plan's stages under another schedule."""
    ranks = tuple((rank,) for rank in range(len(plan.stages)))
    table = SCHEDULES[schedule](len(plan.stages), plan.num_microbatches)
    table = distribute_replicas(table, ranks, len(plan.cluster.devices))
    costs = build_stages(plan.stages, {profile.device.kind: profile}, plan.cluster, plan.microbatch_size)
    return simulate_schedule(table, costs, plan.cluster).step_ns
