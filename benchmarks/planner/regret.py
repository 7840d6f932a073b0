"""How much slower a simulated step is with a simpler rule's cuts than with the best known ones.

    python -m benchmarks.planner.regret FOLDER

FOLDER holds the workloads that `benchmarks.planner` names, read as `benchmarks.planner.as_profiles` describes.
Each is cut into 2, 4 and 8 stages for 1F1B with 8 micro-batches, PipeDream's models over links of 1 and of 12 GB/s, the
others over the links of their files, by

    even layers         equal numbers of layers per stage
    equal parameters    the smallest maximum number of parameters
    min-max time        the smallest max F + B, transfers left out; also the minimum of sum(F + B) + (M-1) max(F + B)
    min-max with cuts   the smallest maximum of F + B and of the transfers, there and back, at either end
    1F1B-AS, ...        the minimum of a closed form for equal stages, taken at the largest F + B and the largest
                        one-way transfer SR: BaPipe's 1F1B-AS (M+N-1)(F+B), 1F1B-SO and 1F1B-SNO, which add
                        2SR(N-1) and 2SR(N+M-2-ceil((M-1)/N)); GPipe's sum f + (M-1) max f + sum b + (M-1) max b

Regret is step time / best known step time - 1; the best known is the minimum of bapipe's plan for as many stages, whose
gap to its bound is in the table, and of every rule. The rules cut the layers in the order of the file.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe.formats.cluster import Bandwidth, Cluster, Device
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.throughput.loads import Boundaries, StageCostSums
from bapipe.schedules import SCHEDULES
from bapipe.simulator.interval_costs import transfer_ns
from bapipe.simulator.simulate import simulate_schedule
from bapipe.simulator.stage_cost import build_stages
from benchmarks import parser_of
from benchmarks.planner.as_profiles import NUM_MICROBATCHES, workloads

MICROBATCHES = NUM_MICROBATCHES

MAX_SECONDS = 5.0
"""Time limit of a search; most searches take far less; the table has the gaps of the others."""

MAX_TRIED = 64
"""About how many values of max f are tried for GPipe's closed form, evenly among all possible ones."""

Edges = Sequence[int]
"""(0, ..., number of layers): stage s holds the layers edges[s] to edges[s+1], the last one left out."""


def cluster(num_devices: int, gigabytes: float) -> Cluster:
    link = Bandwidth(bytes_per_s=round(gigabytes * 1e9), latency_ns=20_000)
    devices = [Device(name=f"d{i}", host="h", kind="v100", memory_bytes=2**50) for i in range(num_devices)]
    return Cluster(devices=tuple(devices), intra_host=link, inter_host=link)


def step_ns(profile: ModelProfile, where: Cluster, edges: Edges) -> int:
    """Returns the simulated step time of 1F1B with these cuts."""
    stages = [
        StagePlan(layers=tuple(layer.name for layer in profile.layers[a:b]), devices=(device.name,))
        for (a, b), device in zip(pairwise(edges), where.devices, strict=True)
    ]
    costs = build_stages(stages, {"v100": profile}, where, profile.microbatch_sizes[0])
    return simulate_schedule(SCHEDULES["1f1b"](len(stages), MICROBATCHES), costs, where).step_ns


def min_max_cuts(costs: Any, num_stages: int) -> tuple[float, Edges]:
    """Returns the cuts with the smallest maximum cost, and that cost; `costs[a, b]` is that of the layers a to b."""
    best, origin = costs[0].copy(), []
    for _ in range(num_stages - 1):
        table = np.maximum(best[:, None], costs)
        origin.append(table.argmin(axis=0))
        best = table.min(axis=0)
    edges = [costs.shape[0] - 1]
    for places in reversed(origin):
        edges.append(int(places[edges[-1]]))
    return float(best[-1]), (0, *reversed(edges))


class Line:
    """A profile's layers in a line: the costs of every interval of them, in nanoseconds; infinite if it is empty."""

    def __init__(self, profile: ModelProfile, link: Bandwidth) -> None:
        count = len(profile.layers)
        measured = profile.at(profile.microbatch_sizes[0])
        self.f = self._between([m.forward_ns for m in measured])
        self.b = self._between([m.whole_backward_ns for m in measured])
        self.params = self._between([layer.param_bytes for layer in profile.layers])
        line = Boundaries([(1 << i) - 1 for i in range(count + 1)], [[i] for i in range(count)], count)
        sums = StageCostSums(line, profile, profile.microbatch_sizes[0], 1.0)
        self.sent = transfer_ns(sums.send_bytes, link).astype(float)
        self.back = transfer_ns(sums.grad_bytes, link).astype(float)

    def _between(self, values: Sequence[int]) -> Any:
        sums = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=float))])
        return np.where(np.arange(len(sums))[:, None] < np.arange(len(sums)), sums - sums[:, None], np.inf)


def even_layers(line: Line, num_stages: int) -> Edges:
    count = len(line.sent) - 1
    return [count * s // num_stages for s in range(num_stages + 1)]


def equal_parameters(line: Line, num_stages: int) -> Edges:
    return min_max_cuts(line.params, num_stages)[1]


def min_max_time(line: Line, num_stages: int) -> Edges:
    return min_max_cuts(line.f + line.b, num_stages)[1]


def min_max_with_cuts(line: Line, num_stages: int) -> Edges:
    ends = np.maximum(line.sent, line.back)
    return min_max_cuts(np.maximum(line.f + line.b, np.maximum(ends[:, None], ends[None, :])), num_stages)[1]


def closed_form(work: int, transfers: Callable[[int], int]) -> Callable[[Line, int], Edges]:
    """Minimizes (M+N-work)(F+B) + transfers(N) SR: for each SR, the smallest max F + B over cuts with no larger SR."""

    def rule(line: Line, num_stages: int) -> Edges:
        times, best = line.f + line.b, (np.inf, even_layers(line, num_stages))
        num_rounds, num_transfers = MICROBATCHES + num_stages - work, transfers(num_stages)
        min_time, edges = min_max_cuts(times, num_stages)
        if num_transfers == 0:
            return edges
        for limit in np.unique(line.sent):
            if num_rounds * min_time + num_transfers * limit >= best[0]:
                break
            allowed = line.sent <= limit
            costs = np.where(allowed[:, None] & allowed[None, :], times, np.inf)
            value, edges = min_max_cuts(costs, num_stages)
            best = min(best, (num_rounds * value + num_transfers * limit, edges), key=lambda pair: pair[0])
        return best[1]

    return rule


def gpipe_form(line: Line, num_stages: int) -> Edges:
    """Minimizes max f + max b; the sums are the same for all cuts.

    Its max f lies between the minimum of max f over all cuts and the max f of the cuts with the smallest max b.
    """
    lowest, edges = min_max_cuts(line.f, num_stages)
    min_b, edges_of_b = min_max_cuts(line.b, num_stages)
    highest = max(line.f[a, b] for a, b in pairwise(edges_of_b))
    found = [(highest + min_b, edges_of_b), (lowest + max(line.b[a, b] for a, b in pairwise(edges)), edges)]
    values = np.unique(line.f[(line.f >= lowest) & (line.f <= highest)])
    for limit in values[:: -(-len(values) // MAX_TRIED) or 1]:
        value, edges = min_max_cuts(np.where(line.f <= limit, line.b, np.inf), num_stages)
        if np.isfinite(value):
            found.append((limit + value, edges))
    return min(found, key=lambda pair: pair[0])[1]


RULES: Mapping[str, Callable[[Line, int], Edges]] = {
    "even layers": even_layers,
    "equal parameters": equal_parameters,
    "min-max time": min_max_time,
    "min-max with cuts": min_max_with_cuts,
    "1F1B-AS form": closed_form(1, lambda n: 0),
    "1F1B-SO form": closed_form(1, lambda n: 2 * (n - 1)),
    "1F1B-SNO form": closed_form(1, lambda n: 2 * (n + MICROBATCHES - 2 - ceil((MICROBATCHES - 1) / n))),
    "GPipe form": gpipe_form,
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="where the workloads are")
    folder = parser.parse_args().folder
    regrets: dict[str, list[float]] = {rule: [] for rule in [*RULES, "bapipe"]}
    gaps: list[float] = []
    each = Table(title="regret by workload", box=SIMPLE_HEAD, title_justify="left")
    for column in ("workload", "layers", "GB/s", "stages", "best ms", "gap", "CPU s", *RULES):
        each.add_column(column, justify="right")
    for name, profile, links in workloads(folder):
        for gigabytes, num_stages in product(links, (2, 4, 8)):
            devices = cluster(num_stages, gigabytes)
            start = time.process_time()
            plan = best_plan(profile, devices, Deadline(MAX_SECONDS))
            seconds = time.process_time() - start
            line = Line(profile, devices.intra_host)
            steps = {rule: step_ns(profile, devices, cut(line, num_stages)) for rule, cut in RULES.items()}
            steps["bapipe"] = plan.prediction.step_ns
            best = min(steps.values())
            gaps.append(plan.certificate.gap)
            for rule, took in steps.items():
                regrets[rule].append(took / best - 1)
            each.add_row(
                *(name, str(len(profile.layers)), str(gigabytes), str(num_stages), f"{best / 1e6:.1f}"),
                *(f"{gaps[-1]:.2%}", f"{seconds:.2f}", *(f"{steps[rule] / best - 1:.1%}" for rule in RULES)),
            )
            spent = time.process_time() - start
            print(f"{name} {gigabytes} GB/s {num_stages} stages: {spent:.1f} s", file=sys.stderr)
    table = Table(title="regret over all workloads", box=SIMPLE_HEAD, title_justify="left")
    for column in ("rule", "mean", "worst", "best known in"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule, found in sorted(regrets.items(), key=lambda item: mean(item[1])):
        hits = sum(regret < 1e-9 for regret in found)
        table.add_row(rule, f"{mean(found):.1%}", f"{max(found):.1%}", f"{hits} of {len(found)}")
    out = Console(width=200)
    out.print(each)
    out.print(table)
    proven = sum(gap == 0 for gap in gaps)
    out.print(f"bapipe's plans: {proven} of {len(gaps)} proven optimal; largest gap {max(gaps):.1%}")


def best_plan(profile: ModelProfile, devices: Cluster, deadline: Deadline) -> Plan:
    """Returns bapipe's plan with one stage per device."""
    size = profile.microbatch_sizes[0]
    return bapipe.plan(
        profile,
        devices,
        minibatch_size=size * MICROBATCHES,
        microbatch_size=size,
        num_stages=len(devices.devices),
        schedules=["1f1b"],
        replicas=False,
        recompute=False,
        deadline=deadline,
    )


if __name__ == "__main__":
    main()
