"""How much slower a step is under a simpler rule's cuts than under the best known ones, by the judge.

    python -m benchmarks.planner.regret FOLDER

FOLDER holds PipeDream's V100 profiles, `pipedream/<model>/graph.txt`, from https://github.com/msr-fiddle/pipedream at
7db6a1c under the MIT licence. Each is cut into 2, 4 and 8 stages for 1F1B with 8 micro-batches, over links of 1 and of
12 GB/s, by

    even layers         as many layers a stage
    equal parameters    the least largest number of parameters
    min-max time        the least largest F + B, transfers left out; also the least sum(F + B) + (M-1) max(F + B)
    min-max with cuts   the least largest of F + B and the transfers, there and back, at either end
    1F1B-AS, ...        the least value of a closed form for equal stages, taken at the largest F + B and the largest
                        one-way transfer SR: BaPipe's 1F1B-AS (M+N-1)(F+B), 1F1B-SO and 1F1B-SNO, which add
                        2SR(N-1) and 2SR(N+M-2-ceil((M-1)/N)); GPipe's sum f + (M-1) max f + sum b + (M-1) max b

Regret is step time / best known step time - 1; the best known is the least of bapipe's plan for as many stages, whose
gap to its bound is in the table, and of every rule.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bapipe import api
from bapipe.cluster import Bandwidth, Cluster, Device
from bapipe.cost import stages_of
from bapipe.importers import Origin, read_foreign
from bapipe.plan import StagePlan
from bapipe.profile import ModelProfile
from bapipe.schedules import SCHEDULES
from bapipe.search.steady import Cuts, Runs, transfer_ns
from bapipe.simulate import judge

MICROBATCHES = 8
BATCH = {"gnmt": 32, "resnet101": 64}
"""Samples of the pass that was measured, where it is not 128."""

Edges = Sequence[int]
"""(0, ..., number of layers): stage s holds the layers edges[s] to edges[s+1], the last one left out."""


def cluster(num_devices: int, gigabytes: float) -> Cluster:
    link = Bandwidth(bytes_per_s=round(gigabytes * 1e9), latency_ns=20_000)
    devices = [Device(name=f"d{i}", host="h", kind="v100", memory_bytes=2**40) for i in range(num_devices)]
    return Cluster(devices=tuple(devices), intra_host=link, inter_host=link)


def step_ns(profile: ModelProfile, where: Cluster, edges: Edges) -> int:
    """Returns what the judge says of 1F1B with these cuts."""
    stages = [
        StagePlan(layers=tuple(layer.name for layer in profile.layers[a:b]), devices=(device.name,))
        for (a, b), device in zip(pairwise(edges), where.devices, strict=True)
    ]
    costs = stages_of(stages, {"v100": profile}, where, profile.microbatch_sizes[0])
    return judge(SCHEDULES["1f1b"](len(stages), MICROBATCHES), costs, where).step_ns


def least_largest(costs: Any, num_stages: int) -> tuple[float, Edges]:
    """Returns the cuts with the least largest cost, and that cost; `costs[a, b]` is that of the layers a to b."""
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
    """A profile's layers in a line: what lies between any two of them, in nanoseconds; infinite where nothing does."""

    def __init__(self, profile: ModelProfile, link: Bandwidth) -> None:
        count = len(profile.layers)
        measured = profile.at(profile.microbatch_sizes[0])
        self.f = self._between([m.forward_ns for m in measured])
        self.b = self._between([m.whole_backward_ns for m in measured])
        self.params = self._between([layer.param_bytes for layer in profile.layers])
        line = Cuts([(1 << i) - 1 for i in range(count + 1)], [[i] for i in range(count)], count)
        runs = Runs(line, profile, profile.microbatch_sizes[0], 1.0)
        self.sent = transfer_ns(runs.send_bytes, link).astype(float)
        self.back = transfer_ns(runs.grad_bytes, link).astype(float)

    def _between(self, values: Sequence[int]) -> Any:
        sums = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=float))])
        return np.where(np.arange(len(sums))[:, None] < np.arange(len(sums)), sums - sums[:, None], np.inf)


def even_layers(line: Line, num_stages: int) -> Edges:
    count = len(line.sent) - 1
    return [count * s // num_stages for s in range(num_stages + 1)]


def equal_parameters(line: Line, num_stages: int) -> Edges:
    return least_largest(line.params, num_stages)[1]


def min_max_time(line: Line, num_stages: int) -> Edges:
    return least_largest(line.f + line.b, num_stages)[1]


def min_max_with_cuts(line: Line, num_stages: int) -> Edges:
    ends = np.maximum(line.sent, line.back)
    return least_largest(np.maximum(line.f + line.b, np.maximum(ends[:, None], ends[None, :])), num_stages)[1]


def closed_form(work: int, transfers: Callable[[int], int]) -> Callable[[Line, int], Edges]:
    """The least (M+N-work)(F+B) + transfers(N) SR: for each SR, the least largest F + B over cuts that take no more."""

    def rule(line: Line, num_stages: int) -> Edges:
        found = []
        for most in np.unique(line.sent):
            allowed = line.sent <= most
            costs = np.where(allowed[:, None] & allowed[None, :], line.f + line.b, np.inf)
            value, edges = least_largest(costs, num_stages)
            total = (MICROBATCHES + num_stages - work) * value + transfers(num_stages) * most
            found.append((total, edges))
        return min(found, key=lambda pair: pair[0])[1]

    return rule


def gpipe_form(line: Line, num_stages: int) -> Edges:
    """The sums are the same for all cuts: the least max f + max b, over all that max f can be."""
    found = []
    for most in np.unique(line.f[np.isfinite(line.f)]):
        value, edges = least_largest(np.where(line.f <= most, line.b, np.inf), num_stages)
        found.append((most + value, edges))
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


def workloads(folder: Path) -> Iterator[tuple[str, ModelProfile]]:
    for path in sorted((folder / "pipedream").glob("*/graph.txt")):
        name = path.parent.name
        batch = BATCH.get(name, 128)
        origin = Origin(
            model=name,
            source="msr-fiddle/pipedream at 7db6a1c",
            kind="v100",
            device_name="V100",
            memory_bytes=2**40,
            batch_size=batch,
            sizes=(batch // MICROBATCHES,),
            optimizer="sgd",
        )
        yield name, read_foreign(path, origin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the workloads are")
    folder = parser.parse_args().folder
    regrets: dict[str, list[float]] = {rule: [] for rule in [*RULES, "bapipe"]}
    each = Table(title="regret by workload", box=SIMPLE_HEAD, title_justify="left")
    for column in ("workload", "GB/s", "stages", "best ms", "gap", "CPU s", *RULES):
        each.add_column(column, justify="right")
    for name, profile in workloads(folder):
        size = profile.microbatch_sizes[0]
        for gigabytes in (1, 12):
            for num_stages in (2, 4, 8):
                where = cluster(num_stages, gigabytes)
                start = time.process_time()
                plan = api.plan(
                    profile,
                    where,
                    minibatch_size=size * MICROBATCHES,
                    microbatch_size=size,
                    num_stages=num_stages,
                    schedules=["1f1b"],
                )
                seconds = time.process_time() - start
                line = Line(profile, where.intra_host)
                steps = {rule: step_ns(profile, where, cut(line, num_stages)) for rule, cut in RULES.items()}
                steps["bapipe"] = plan.prediction.step_ns
                best = min(steps.values())
                for rule, took in steps.items():
                    regrets[rule].append(took / best - 1)
                each.add_row(
                    *(name, str(gigabytes), str(num_stages), f"{best / 1e6:.1f}", f"{plan.certificate.gap:.2%}"),
                    *(f"{seconds:.2f}", *(f"{steps[rule] / best - 1:.1%}" for rule in RULES)),
                )
                print(f"{name} {gigabytes} GB/s {num_stages} stages: {seconds:.1f} s", file=sys.stderr)
    table = Table(title="regret over all workloads", box=SIMPLE_HEAD, title_justify="left")
    for column in ("rule", "mean", "worst", "best known in"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule, found in sorted(regrets.items(), key=lambda item: mean(item[1])):
        hits = sum(regret < 1e-9 for regret in found)
        table.add_row(rule, f"{mean(found):.1%}", f"{max(found):.1%}", f"{hits} of {len(found)}")
    out = Console(width=190)
    out.print(each)
    out.print(table)


if __name__ == "__main__":
    main()
