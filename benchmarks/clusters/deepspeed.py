"""A step of DeepSpeed's pipeline engine on groups of GPUs, by the rules in docs/clusters.md."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.importers import ImportMetadata
from bapipe.importers.sailor import group_profile, kind_of
from bapipe.simulator.allreduce import ring_ns
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage, StageCost
from bapipe.simulator.stage_cost import build_stages
from benchmarks.clusters.links import member_bytes_per_s, slower_links
from benchmarks.clusters.runs import Run
from benchmarks.clusters.sailor_files import SailorFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A predicted step: the pipeline, then all-reduce and update."""

    pipeline_ns: int
    sum_and_update_ns: int

    @property
    def ns(self) -> int:
        return self.pipeline_ns + self.sum_and_update_ns


def predict(run: Run, files: SailorFiles) -> Step:
    """Returns the predicted step of a run."""
    plan = plan_of(run)
    profiles = {
        kind_of(gpu, members): profile_of(run, gpu, members, files)
        for gpu, members in sorted({group for stage in run.replicas for group in stage})
    }
    stages = build_stages(plan.stages, profiles, plan.cluster, run.microbatch_size)
    gathered = with_gathers(run, stages, files)
    timeline = simulate_schedule(plan.table, gathered, plan.cluster)
    return Step(
        pipeline_ns=max(span.end_ns for span in timeline.spans),
        sum_and_update_ns=max(
            sum_and_update_ns(stage, ranks, plan.cluster)
            for stage, ranks in zip(gathered, plan.table.devices, strict=True)
        ),
    )


def profile_of(run: Run, gpu: str, members: int, files: SailorFiles) -> ModelProfile:
    """Returns the profile of a group at the micro-batch size of a run."""
    metadata = ImportMetadata(
        model=run.model,
        source="Sailor",
        kind=gpu,
        device_name=gpu,
        memory_bytes=0,
        batch_size=1,
        sizes=(run.microbatch_size,),
        optimizer="adamw",
    )
    return group_profile(files.times(run.model, gpu)[0], files.models, metadata, members)


def plan_of(run: Run) -> Plan:
    """Returns the plan of a run: 1F1B on groups that wait while they transfer, each on a host of its own."""
    names = iter(range(sum(map(len, run.replicas))))
    stages = [[(f"host{next(names)}", group) for group in stage] for stage in run.replicas]
    groups = {name: group for stage in stages for name, group in stage}
    fastest = max(member_bytes_per_s(gpu, members) for gpu, members in groups.values())
    devices = tuple(
        Device(
            name=name,
            host=name,
            kind=kind_of(gpu, members),
            memory_bytes=0,
            overlaps_transfers=False,
            members=tuple(f"{name}.{member}" for member in range(members)),
        )
        for name, (gpu, members) in groups.items()
    )
    between = Bandwidth(bytes_per_s=fastest, latency_ns=0)
    return Plan(
        model=run.model,
        factory=None,
        arguments={},
        profiles={},
        cluster=Cluster(devices=devices, intra_host=between, inter_host=between, links=slower_links(groups)),
        minibatch_size=run.minibatch_size,
        microbatch_size=run.microbatch_size,
        num_microbatches=run.minibatch_size // run.microbatch_size,
        schedule="1f1b",
        stages=tuple(
            StagePlan(layers=tuple(f"layer{index}" for index in layers), devices=tuple(name for name, _ in replicas))
            for layers, replicas in zip(run.stages, stages, strict=True)
        ),
    )


def with_gathers(run: Run, stages: Sequence[Stage], files: SailorFiles) -> tuple[Stage, ...]:
    """Returns the stages with what the members gather in F and in B: the whole of what each received a share of."""
    last = len(stages) - 1

    def gather_ns(share_bytes: int, group: tuple[str, int]) -> int:
        gpu, members = group
        link = Bandwidth(bytes_per_s=files.ring_bytes_per_s(gpu, members), latency_ns=0)
        return (members - 1) * link.transfer_ns(share_bytes)

    def with_gather(cost: StageCost, s: int, group: tuple[str, int]) -> StageCost:
        received = gather_ns(stages[s - 1].send_bytes, group) if s else 0
        gradient = gather_ns(stages[s].grad_bytes, group) if s < last else 0
        return replace(cost, forward_ns=cost.forward_ns + received, input_grad_ns=cost.input_grad_ns + gradient)

    return tuple(
        replace(stage, costs=tuple(with_gather(c, s, g) for c, g in zip(stage.costs, run.replicas[s], strict=True)))
        for s, stage in enumerate(stages)
    )


def sum_and_update_ns(stage: Stage, ranks: Sequence[int], cluster: Cluster) -> int:
    """Returns how long a stage sums its gradients over the replicas, and updates its parameters."""
    num_bytes = stage.costs[0].gradient_bytes
    sum_ns = ring_ns(num_bytes, ranks, cluster) if len(ranks) > 1 else 0
    return sum_ns + max(cost.update_ns for cost in stage.costs)
