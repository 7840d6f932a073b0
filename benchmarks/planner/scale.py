"""How long large plans take: seconds, memory, and the gap to the bound.

    python -m benchmarks.planner.scale [--seed 0] [--only NAME ...] [--list]

Every case is a random graph: F and B of a node lie within a factor of four, or are those of all others; tensors are 1
to 16 MB, links carry 12 GB/s. Objectives: the time of a step, along the profile's order of the nodes, and the largest
load of a device, over cuts of the graph. Seconds are of compute; memory is the most that this process has had so far.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.estimates import estimate
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.layer_shape import LayerShape
from bapipe.formats.measurement import LayerMeasurement, Measurement
from bapipe.formats.plan import Objective
from bapipe.formats.profile import DeviceKind, ModelProfile
from bapipe.graph.downsets import downsets
from bapipe.graph.layer_graph import contract, of_layers
from benchmarks import parser_of

MB = 10**6
GIB = 2**30

Inputs = list[tuple[str, ...]]
"""The tensors that each layer uses."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph on some devices.

    Attributes:
        per_host: devices of a host.
        groups: numbers of members of groups that the devices are looked at as, besides single devices; layers are then
            split by their channels, and the devices of a host have links of 300 GB/s.
        is_unlike: whether speeds are between 0.6 and 1, the first device's 0.4.
        overlaps: whether devices compute while they transfer.
        are_equal: whether F, I and W of each layer take 0.5 ms.
        output_bytes: of each tensor; None for 1 to 16 MB.
    """

    inputs: Callable[[], Inputs]
    num_devices: int
    minibatch_size: int
    objective: Objective = "step"
    schedules: tuple[str, ...] = ("1f1b", "gpipe")
    replicas: bool = True
    per_host: int = 10**6
    groups: tuple[int, ...] = ()
    is_unlike: bool = False
    overlaps: bool = True
    are_equal: bool = False
    param_bytes: int = MB
    output_bytes: int | None = None
    memory_bytes: int = 32 * GIB


def chain(num_layers: int) -> Inputs:
    return [("x",), *((f"l{i}",) for i in range(num_layers - 1))]


def blocks(num_nodes: int, length: int) -> Inputs:
    """Repeats three branches of `length` nodes between a node that forks and one that joins."""
    inputs: Inputs = [("x",)]
    while len(inputs) + 3 * length + 1 <= num_nodes:
        fork, ends = len(inputs) - 1, []
        for _ in range(3):
            inputs.append((f"l{fork}",))
            inputs += [(f"l{len(inputs) + i - 1}",) for i in range(length - 1)]
            ends.append(f"l{len(inputs) - 1}")
        inputs.append(tuple(ends))
    return inputs + [(f"l{i - 1}",) for i in range(len(inputs), num_nodes)]


def _chain_of(num_layers: int) -> Callable[[], Inputs]:
    return lambda: chain(num_layers)


_UNLIKE_DEVICES = Case(
    inputs=_chain_of(100),
    num_devices=40,
    minibatch_size=256,
    replicas=False,
    per_host=8,
    is_unlike=True,
    output_bytes=2 * MB,
)

CASES = {
    "chain": Case(inputs=_chain_of(1000), num_devices=64, minibatch_size=32),
    "chain, throughput": Case(inputs=_chain_of(1000), num_devices=64, minibatch_size=32, objective="throughput"),
    "branches of 2": Case(inputs=lambda: blocks(800, 2), num_devices=8, minibatch_size=32),
    "branches of 2, throughput": Case(
        inputs=lambda: blocks(800, 2), num_devices=8, minibatch_size=32, objective="throughput"
    ),
    "branches of 6": Case(inputs=lambda: blocks(800, 6), num_devices=8, minibatch_size=32),
    "branches of 6, throughput": Case(
        inputs=lambda: blocks(800, 6), num_devices=8, minibatch_size=32, objective="throughput"
    ),
    "128 devices": Case(inputs=_chain_of(100), num_devices=128, minibatch_size=256),
    "256 devices": Case(inputs=_chain_of(100), num_devices=256, minibatch_size=256, per_host=8),
    "512 devices": Case(inputs=_chain_of(200), num_devices=512, minibatch_size=1024, per_host=8),
    "512 devices, groups": Case(
        inputs=_chain_of(200), num_devices=512, minibatch_size=1024, per_host=8, groups=(2, 4, 8)
    ),
    "large parameters": Case(inputs=_chain_of(1000), num_devices=64, minibatch_size=32, param_bytes=32 * MB),
    "large tensors": Case(inputs=_chain_of(1004), num_devices=64, minibatch_size=64, output_bytes=32 * MB),
    "unlike devices": Case(inputs=_chain_of(310), num_devices=10, minibatch_size=16, is_unlike=True, replicas=False),
    "interleaved": Case(
        inputs=_chain_of(260), num_devices=8, minibatch_size=32, schedules=("interleaved-1f1b",), replicas=False
    ),
    "zb-v": Case(inputs=_chain_of(200), num_devices=8, minibatch_size=32, schedules=("zb-v",), replicas=False),
    **{
        f"{schedule}, 40 unlike devices": replace(_UNLIKE_DEVICES, schedules=(schedule,))
        for schedule in ("interleaved-1f1b", "dualpipe-v")
    },
    **{
        f"{schedule}, 64 alike devices": replace(
            _UNLIKE_DEVICES,
            inputs=_chain_of(200),
            num_devices=64,
            schedules=(schedule,),
            is_unlike=False,
            are_equal=True,
        )
        for schedule in ("interleaved-1f1b", "zb-v")
    },
    "1f1b without overlap": replace(_UNLIKE_DEVICES, schedules=("1f1b",), overlaps=False),
}


def profile_of(
    random: Random, inputs: Inputs, *, param_bytes: int = MB, output_bytes: int | None = None, are_equal: bool = False
) -> ModelProfile:
    """Layers l0, l1, ... that use the given tensors."""

    def measured() -> LayerMeasurement:
        forward = 500_000 if are_equal else random.randrange(50_000, 200_000)
        return LayerMeasurement(
            forward_ns=forward,
            input_grad_ns=forward,
            weight_grad_ns=forward,
            stash_bytes=random.randrange(MB, 16 * MB),
            output_bytes=(output_bytes or random.randrange(MB, 16 * MB),),
        )

    return ModelProfile(
        model="random",
        device=DeviceKind(kind="gpu", name="none", memory_bytes=32 * GIB),
        dtype="float32",
        optimizer="sgd",
        layers=tuple(
            LayerProfile(
                name=f"l{i}",
                kind="Layer",
                inputs=own,
                outputs=(f"l{i}",),
                param_bytes=param_bytes,
                optimizer_state_bytes=0,
                shape=LayerShape(in_channels=1024, out_channels=1024),
            )
            for i, own in enumerate(inputs)
        ),
        measurements=(Measurement(microbatch_size=1, layers=tuple(measured() for _ in inputs)),),
    )


def cluster_of(random: Random, case: Case) -> Cluster:
    """The devices of a case; links between hosts are as fast as those within."""
    link = Bandwidth(bytes_per_s=12 * 10**9, latency_ns=10_000)
    speeds = [1.0] * case.num_devices
    if case.is_unlike:
        speeds = [0.4, *(round(random.uniform(0.6, 1.0), 2) for _ in speeds[1:])]
    devices = tuple(
        Device(
            name=f"d{i}",
            host=f"h{i // case.per_host}",
            kind="gpu",
            memory_bytes=case.memory_bytes,
            speed=speed,
            overlaps_transfers=case.overlaps,
        )
        for i, speed in enumerate(speeds)
    )
    within = Bandwidth(bytes_per_s=300 * 10**9, latency_ns=5_000) if case.groups else link
    return Cluster(devices=devices, intra_host=within, inter_host=link)


def problem_of(case: Case, seed: int) -> tuple[ModelProfile, Cluster, bapipe.PlanOptions]:
    """Returns the random graph of a case, its devices, and the options to plan with."""
    random = Random(seed)
    profile = profile_of(
        random,
        case.inputs(),
        param_bytes=case.param_bytes,
        output_bytes=case.output_bytes,
        are_equal=case.are_equal,
    )
    cluster = cluster_of(random, case)
    options = bapipe.PlanOptions(
        minibatch_size=case.minibatch_size,
        microbatch_size=1,
        objective=case.objective,
        schedules=case.schedules,
        replicas=case.replicas,
    )
    return profile, cluster, options


def row(name: str, case: Case, seed: int) -> list[str]:
    """Plans a case; returns its row of the table."""
    profile, cluster, options = problem_of(case, seed)
    sets = downsets(contract(of_layers(profile), ())[0], 100_000)
    start_s = time.process_time()
    plan = bapipe.plan([profile, *(estimate(profile, "tensor", k, cluster) for k in case.groups)], cluster, options)
    seconds = time.process_time() - start_s
    ns = plan.prediction.load_ns if case.objective == "throughput" else plan.prediction.step_ns
    assert isinstance(ns, int)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    return [
        *(name, str(len(profile.layers)), str(case.num_devices), f"{len(sets):,}" if sets else "more than 100,000"),
        *(f"{ns / 1e6:.3f}", f"{plan.certificate.gap:.2%}", str(len(plan.stages)), f"{seconds:.1f}", f"{peak_mb:,.0f}"),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return
    table = Table(box=SIMPLE_HEAD)
    for column in ("case", "layers", "devices", "downsets", "ms", "gap", "stages", "CPU seconds", "MB"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name in arguments.only:
        table.add_row(*row(name, CASES[name], arguments.seed))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
