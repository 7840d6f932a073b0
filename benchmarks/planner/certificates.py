"""Looks for plans that beat the lower bound of a certificate, or the plan itself, where problems are large.

    python -m benchmarks.planner.certificates [--problems 20] [--seed 0] [--layers 300 380] [--devices 4 10]
        [--seconds 20] [--schedules 1f1b gpipe] [--alike]

Random chains of that many layers on devices of unequal speed, half of them with a slow first device; tensors of 1 KB to
32 MB on links of 1 to 100 GB/s, parameters of 4 to 40 MB, 8 to 64 micro-batches. Each is planned with the default
budget. Then plans of the same space are made without the search: for the first 2, 3, ... devices of the cluster, cuts
in proportion to the speeds, improved by hill climbing on the cuts from three starts, each with the simulator only, for
the given seconds. Prints a line per problem: the gap, and by how much a plan so found is faster than the search's
(`better`). A plan below the lower bound is a defect: the command then ends with code 1.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from msgspec.structs import replace

import bapipe
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.plan import StagePlan
from bapipe.formats.profile import DeviceKind, LayerMeasurement, LayerProfile, Measurement, ModelProfile
from bapipe.schedules import ALL
from bapipe.schedules.placement import permute_ranks
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages

MB = 10**6

CUT_MOVES = (-16, -8, -4, -2, -1, 1, 2, 4, 8, 16)

Cuts = tuple[int, ...]
"""(0, ..., number of layers): stage s holds the layers cuts[s] to cuts[s + 1], the last one left out."""


def random_chain(random: Random, num_layers: int) -> ModelProfile:
    """A chain whose layers differ by a factor of ten, in blocks that repeat or without order."""
    largest = 10 ** random.uniform(3, 7.5)
    period = random.choice([1, 4, 12, num_layers])
    parameters = random.randrange(4 * MB, 40 * MB)
    layers = [(random.randrange(100_000, 1_000_000), round(largest * random.random())) for _ in range(period)]
    return ModelProfile(
        model="chain",
        device=DeviceKind(kind="gpu", name="none", memory_bytes=2**40),
        dtype="float32",
        optimizer="sgd",
        layers=tuple(
            LayerProfile(
                name=f"l{i}",
                kind="Layer",
                inputs=(f"t{i}",),
                outputs=(f"t{i + 1}",),
                param_bytes=parameters,
                optimizer_state_bytes=0,
            )
            for i in range(num_layers)
        ),
        measurements=(
            Measurement(
                microbatch_size=1,
                layers=tuple(
                    LayerMeasurement(
                        forward_ns=forward_ns,
                        input_grad_ns=forward_ns,
                        weight_grad_ns=forward_ns,
                        stash_bytes=output_bytes,
                        output_bytes=(output_bytes,),
                    )
                    for forward_ns, output_bytes in (layers[i % period] for i in range(num_layers))
                ),
            ),
        ),
    )


def random_cluster(random: Random, num_devices: int, *, alike: bool) -> Cluster:
    """Devices on one host, alike or of unequal speed; in half of the clusters of unequal ones the first is slow."""
    speeds = [1.0 if alike else round(random.uniform(0.6, 1.0), 2) for _ in range(num_devices)]
    if not alike and random.random() < 0.5:
        speeds[0] = round(random.uniform(0.2, 0.5), 2)
    link = Bandwidth(bytes_per_s=round(10 ** random.uniform(9, 11)), latency_ns=10_000)
    device = Device(name="d", host="h", kind="gpu", memory_bytes=2**40)
    return Cluster(
        devices=tuple(replace(device, name=f"d{i}", speed=speed) for i, speed in enumerate(speeds)),
        intra_host=link,
        inter_host=link,
    )


class Challenger:
    """Plans of one problem without replicas, made from cuts and judged by the simulator alone."""

    def __init__(self, profile: ModelProfile, cluster: Cluster, num_microbatches: int) -> None:
        self.profile, self.cluster, self.num_microbatches = profile, cluster, num_microbatches
        self.names = [layer.name for layer in profile.layers]

    def table(self, schedule: str, num_devices: int) -> Schedule:
        """Returns a schedule on the first devices of the cluster."""
        return permute_ranks(
            ALL[schedule](num_devices, self.num_microbatches), range(num_devices), len(self.cluster.devices)
        )

    def step_ns(self, cuts: Cuts, table: Schedule) -> int:
        """Returns the step time of cuts into the stages of a schedule."""
        stages = tuple(
            StagePlan(layers=tuple(self.names[begin:end]), devices=(self.cluster.devices[rank].name,))
            for (begin, end), (rank,) in zip(pairwise(cuts), table.devices, strict=True)
        )
        costs = build_stages(stages, {"gpu": self.profile}, self.cluster, 1)
        return simulate_schedule(table, costs, self.cluster).step_ns

    def proportional_cuts(self, table: Schedule, shares: Callable[[int], float] = lambda stage: 1.0) -> Cuts:
        """Returns cuts that give each stage work in proportion to its device's speed times a share."""
        times = [layer.forward_ns for layer in self.profile.measurements[0].layers]
        rates = [self.cluster.devices[rank].speed * shares(s) for s, (rank,) in enumerate(table.devices)]
        cuts, done, target = [0], 0, 0.0
        for s, rate in enumerate(rates[:-1]):
            target += rate / sum(rates) * sum(times)
            end = cuts[-1]
            last = len(times) - (len(rates) - 1 - s)
            while end < last and (end == cuts[-1] or done + times[end] / 2 < target):
                done += times[end]
                end += 1
            cuts.append(end)
        return (*cuts, len(times))

    def climb(self, cuts: Cuts, table: Schedule, deadline: float) -> int:
        """Returns the step time after moving cuts, one at a time, as long as that helps and time is left."""
        best = self.step_ns(cuts, table)
        improved = True
        while improved:
            improved = False
            for i in range(1, len(cuts) - 1):
                for move in CUT_MOVES:
                    moved = (*cuts[:i], cuts[i] + move, *cuts[i + 1 :])
                    if not cuts[i - 1] < moved[i] < cuts[i + 1]:
                        continue
                    if time.monotonic() > deadline:
                        return best
                    step_ns = self.step_ns(moved, table)
                    if step_ns < best:
                        best, cuts, improved = step_ns, moved, True
        return best

    def best_step_ns(self, schedules: Sequence[str], seconds: float) -> int:
        """Returns the shortest step time found: of proportional cuts, then by hill climbing."""
        deadline = time.monotonic() + seconds
        tables = [self.table(name, n) for name in schedules for n in range(2, len(self.cluster.devices) + 1)]
        tried = [(self.step_ns(self.proportional_cuts(table), table), table) for table in tables]
        best, table = min(tried, key=lambda each: each[0])
        # Early stages have more micro-batches in flight and wait less, so both slopes are worth a start.
        starts = [self.proportional_cuts(table, _one_plus(slope)) for slope in (0, -0.02, 0.02)]
        return min(best, *(self.climb(start, table, deadline) for start in starts))


def _one_plus(slope: float) -> Callable[[int], float]:
    return lambda stage: 1 + slope * stage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, nargs=2, default=(300, 380))
    parser.add_argument("--devices", type=int, nargs=2, default=(4, 10))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"], choices=list(ALL))
    parser.add_argument("--alike", action="store_true", help="devices of equal speed")
    arguments = parser.parse_args()
    gaps, better, num_false = [], [], 0
    for seed in range(arguments.seed, arguments.seed + arguments.problems):
        random = Random(seed)
        profile = random_chain(random, random.randint(*arguments.layers))
        cluster = random_cluster(random, random.randint(*arguments.devices), alike=arguments.alike)
        num_microbatches = random.choice([8, 16, 32, 64])
        began = time.process_time()
        options = bapipe.PlanOptions(minibatch_size=num_microbatches, schedules=arguments.schedules, replicas=False)
        plan = bapipe.plan(profile, cluster, options)
        seconds = time.process_time() - began
        found = Challenger(profile, cluster, num_microbatches).best_step_ns(arguments.schedules, arguments.seconds)
        step_ns, bound_ns = plan.prediction.step_ns, plan.certificate.lower_bound_ns
        gaps.append(step_ns / bound_ns - 1)
        better.append(max(step_ns / found - 1, 0.0))
        num_false += found < bound_ns
        print(
            f"seed {seed}: {len(profile.layers)} layers, {len(cluster.devices)} devices, {num_microbatches} "
            f"micro-batches: step {step_ns / 1e6:,.1f} ms, gap {gaps[-1]:.1%}, better {better[-1]:.1%}, "
            f"{seconds:.1f} s{'  BELOW THE BOUND' if found < bound_ns else ''}",
            flush=True,
        )
    print(
        f"{len(gaps)} problems: {num_false} below the bound; gap mean {sum(gaps) / len(gaps):.1%}, "
        f"max {max(gaps):.1%}; "
        f"a faster plan found in {sum(each > 0.001 for each in better)}, at most {max(better):.1%} faster"
    )
    sys.exit(1 if num_false else 0)


if __name__ == "__main__":
    main()
