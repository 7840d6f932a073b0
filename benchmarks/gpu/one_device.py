"""Plans whose stages all run on one device, in the order in which a schedule starts its actions on several."""

from dataclasses import replace

from msgspec import structs

import bapipe
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage import Stage, StageCost

LINK = Bandwidth(bytes_per_s=370 * 10**9, latency_ns=12_000)


def alike_devices(profile: ModelProfile, num: int) -> Cluster:
    """Returns so many devices of the profiled kind on one host."""
    kind = profile.device
    devices = tuple(
        Device(name=f"{kind.kind}{index}", host="host", kind=kind.kind, memory_bytes=kind.memory_bytes)
        for index in range(num)
    )
    return Cluster(devices=devices, intra_host=LINK, inter_host=LINK)


def plan_on_one_device(
    profile: ModelProfile, schedule: str, *, num_ranks: int, microbatch_size: int, num_microbatches: int
) -> Plan:
    """Returns the plan of a schedule for `num_ranks` devices, cut evenly, with all of its stages on the first one."""
    minibatch_size = microbatch_size * num_microbatches
    made = bapipe.make(
        profile,
        alike_devices(profile, num_ranks),
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        schedule=schedule,
    )
    cluster = alike_devices(profile, 1)
    order = serial(made.table).order
    return Plan(
        model=made.model,
        factory=made.factory,
        arguments=made.arguments,
        profiles=made.profiles,
        settings=made.settings,
        cluster=cluster,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        stages=tuple(structs.replace(stage, devices=(cluster.devices[0].name,)) for stage in made.stages),
        order=tuple(tuple(map(str, actions)) for actions in order),
    )


def serial(table: Schedule) -> Schedule:
    """Returns a schedule's actions on one rank, as they start if all take equally long."""
    cost = StageCost(forward_ns=10, input_grad_ns=10, weight_grad_ns=10)
    link = Bandwidth(bytes_per_s=1, latency_ns=0)  # nothing is sent
    devices = tuple(Device(name=str(rank), host="host", kind="cpu", memory_bytes=1) for rank in range(len(table.order)))
    stages = [Stage(costs=(cost,) * len(ranks)) for ranks in table.devices]
    timeline = simulate_schedule(table, stages, Cluster(devices=devices, intra_host=link, inter_host=link))
    spans = sorted(timeline.spans, key=lambda span: (span.start_ns, span.end_ns, span.rank))
    return replace(table, devices=((0,),) * table.num_stages, order=(tuple(span.action for span in spans),))
