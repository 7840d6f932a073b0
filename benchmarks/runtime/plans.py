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
from bapipe.planner.inputs.clusters import local_cluster
from bapipe.profiler.options import ProfileOptions
from bapipe.profiler.profile import profile_model
from bapipe.schedules import SCHEDULES
from bapipe.schedules.placement import distribute_replicas
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages
from benchmarks.runtime.models import Workload

CHOICE, PARALLEL, PIPELINE = "bapipe's choice", "bapipe, data parallel", "bapipe, two stages"
BY_HAND = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """Plans by the name of their configuration, and the predicted step time of each that can be simulated.

    Attributes:
        by_hand: the plan with one stage per rank, which torch's own schedules run too.
    """

    plans: dict[str, Plan]
    by_hand: Plan
    step_ns: dict[str, int]


def make_plans(workload: Workload, num_ranks: int, folder: Path, log: Callable[[str], None]) -> PlannedWorkload:
    """Returns the plans of a model; missing ones are made from a measurement and written to the folder.

    The first is planned without restrictions: any number of stages and replicas, cores one by one or together.
    """
    cluster = _cluster(folder / "cluster.json", num_ranks)
    one_core = _profile(folder, workload, 1, num_ranks, workload.sizes, log)
    all_cores = _profile(folder, workload, num_ranks, num_ranks, workload.sizes[-2:], log)
    size = workload.minibatch_size
    choice = bapipe.plan([one_core, all_cores], cluster, minibatch_size=size)
    parallel = bapipe.plan(one_core, cluster, minibatch_size=size, num_stages=1)
    schedules = tuple(dict.fromkeys((*BY_HAND.values(), "eager-1f1b")))
    pipeline = bapipe.plan(
        one_core, cluster, minibatch_size=size, schedules=schedules, num_stages=num_ranks, replicas=False
    )
    plans = {CHOICE: choice}
    for name, plan in ((PARALLEL, parallel), (PIPELINE, pipeline)):
        if plan.order != choice.order or plan.stages != choice.stages:
            plans[name] = plan
    step_ns = {name: plan.prediction.step_ns for name, plan in plans.items()}
    step_ns |= {name: _simulated_step_ns(pipeline, schedule, one_core) for name, schedule in BY_HAND.items()}
    return PlannedWorkload(plans=plans, by_hand=plans.get(PIPELINE, choice), step_ns=step_ns)


def describe(plan: Plan) -> str:
    """Returns one line that describes a plan."""
    cut = ", ".join(f"to {stage.layers[-1]} on {' and '.join(stage.devices)}" for stage in plan.stages)
    threads = plan.settings.threads if isinstance(plan.settings, Settings) else 1
    return f"{plan.schedule}, {plan.num_microbatches} x {plan.microbatch_size}, {cut}, threads: {threads}"


def _cluster(path: Path, num_ranks: int) -> Cluster:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, local_cluster(num_ranks, "cpu"))
    return read(path, Cluster)


def _profile(
    folder: Path,
    workload: Workload,
    num_threads: int,
    num_cores: int,
    sizes: tuple[int, ...],
    log: Callable[[str], None],
) -> ModelProfile:
    """Returns a profile of devices of `num_threads` threads, measured while co-runners train on the other cores."""
    path = folder / f"{workload.model}-{num_threads}.json"
    if not path.exists():
        log(f"measuring the layers of {workload.model}, threads: {num_threads}")
        measured = profile_model(
            workload.model,
            workload.arguments,
            ProfileOptions(microbatch_sizes=sizes, settings=Settings(threads=num_threads)),
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
