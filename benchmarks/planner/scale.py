"""How long large plans take: seconds, and the gap to the bound.

    python -m benchmarks.planner.scale [--seed 0]

A chain of 1,000 layers on 64 devices, and operator graphs of 800 nodes on 8: blocks of three branches that fork and
join, of 2 and of 6 nodes each; both have more downsets than the search looks at. F and B of a node lie within a factor
of four, tensors are 1 to 16 MB, links carry 12 GB/s; 32 micro-batches. Then a chain of 100 layers on 128 devices with
256 micro-batches. Both objectives: the time of a step, along the profile's order of the nodes, and the largest load of
a device, over cuts of the graph.
"""

import argparse
import time
from random import Random
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.profile import DeviceKind, LayerMeasurement, LayerProfile, Measurement, ModelProfile
from bapipe.graph.downsets import downsets
from bapipe.graph.layer_graph import contract, of_layers

MB = 10**6

OBJECTIVES: tuple[Literal["step", "throughput"], ...] = ("step", "throughput")


def profile_of(random: Random, inputs: list[tuple[str, ...]]) -> ModelProfile:
    """Layers l0, l1, ... that use the given tensors."""

    def measured() -> LayerMeasurement:
        forward = random.randrange(50_000, 200_000)
        return LayerMeasurement(
            forward_ns=forward,
            input_grad_ns=forward,
            weight_grad_ns=forward,
            stash_bytes=random.randrange(MB, 16 * MB),
            output_bytes=(random.randrange(MB, 16 * MB),),
        )

    return ModelProfile(
        model="random",
        device=DeviceKind(kind="gpu", name="none", memory_bytes=32 * 2**30),
        dtype="float32",
        optimizer="sgd",
        layers=tuple(
            LayerProfile(
                name=f"l{i}", kind="Layer", inputs=own, outputs=(f"l{i}",), param_bytes=MB, optimizer_state_bytes=0
            )
            for i, own in enumerate(inputs)
        ),
        measurements=(Measurement(microbatch_size=1, layers=tuple(measured() for _ in inputs)),),
    )


def chain(num_layers: int) -> list[tuple[str, ...]]:
    return [("x",), *((f"l{i}",) for i in range(num_layers - 1))]


def blocks(num_nodes: int, length: int) -> list[tuple[str, ...]]:
    """Repeats three branches of `length` nodes between a node that forks and one that joins."""
    inputs: list[tuple[str, ...]] = [("x",)]
    while len(inputs) + 3 * length + 1 <= num_nodes:
        fork, ends = len(inputs) - 1, []
        for _ in range(3):
            inputs.append((f"l{fork}",))
            inputs += [(f"l{len(inputs) + i - 1}",) for i in range(length - 1)]
            ends.append(f"l{len(inputs) - 1}")
        inputs.append(tuple(ends))
    return inputs + [(f"l{i - 1}",) for i in range(len(inputs), num_nodes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    random = Random(parser.parse_args().seed)
    link = Bandwidth(bytes_per_s=12 * 10**9, latency_ns=10_000)
    table = Table(box=SIMPLE_HEAD)
    for column in ("graph", "layers", "devices", "downsets", "objective", "ms", "gap", "stages", "CPU seconds"):
        table.add_column(column, justify="left" if column in ("graph", "objective") else "right")
    shapes = {
        "chain": (chain(1000), 64, 32),
        "branches of 2": (blocks(800, 2), 8, 32),
        "branches of 6": (blocks(800, 6), 8, 32),
        "chain of 100": (chain(100), 128, 256),
    }
    for name, (inputs, num_devices, minibatch_size) in shapes.items():
        profile = profile_of(random, inputs)
        devices = [Device(name=f"d{i}", host="h", kind="gpu", memory_bytes=32 * 2**30) for i in range(num_devices)]
        cluster = Cluster(devices=tuple(devices), intra_host=link, inter_host=link)
        sets = downsets(contract(of_layers(profile), ())[0], 100_000)
        cuts = f"{len(sets):,}" if sets else "more than 100,000"
        for objective in OBJECTIVES:
            start = time.process_time()
            plan = bapipe.plan(profile, cluster, minibatch_size=minibatch_size, microbatch_size=1, objective=objective)
            seconds = time.process_time() - start
            ns = plan.prediction.step_ns if objective == "step" else plan.prediction.load_ns
            assert isinstance(ns, int)
            table.add_row(
                *(name, str(len(inputs)), str(num_devices), cuts, objective, f"{ns / 1e6:.3f}"),
                *(f"{plan.certificate.gap:.2%}", str(len(plan.stages)), f"{seconds:.1f}"),
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
