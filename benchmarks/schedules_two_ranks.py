"""Every named schedule on two CPU ranks: does the judge rank them as reality does?

    python benchmarks/schedules_two_ranks.py [--minibatch-size 32] [--microbatch-size 8] [--rounds 3] [--steps 4]

VGG-16 on 64x64 images, one thread a rank. Each schedule runs the best cut for it; the schedules take turns, and figures
are medians over the rounds of each round's typical step. Kendall's tau is 1 where both orders agree, -1 where they are
opposite.
"""

import argparse
import json
from itertools import combinations
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe import api
from bapipe.schedules import ALL, SCHEDULES


def kendall_tau(pairs: list[tuple[float, float]]) -> float:
    """Rank correlation of (predicted, measured) pairs."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatch-size", type=int, default=32)
    parser.add_argument("--microbatch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=list(ALL))
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()

    cluster = api.local_cluster(2, "cpu")
    profile = api.profile_model("vgg16", {}, microbatch_sizes=[given.microbatch_size])
    plans = {
        name: bapipe.plan(
            profile,
            cluster,
            minibatch_size=given.minibatch_size,
            schedules=[name],
            num_stages=2 if name in SCHEDULES else 4,
        )
        for name in given.schedules
    }
    measured: dict[str, list[int]] = {name: [] for name in plans}
    for _ in range(given.rounds):
        for name, plan in plans.items():
            measured[name].append(bapipe.run(plan, data="mnist", steps=given.steps).typical_step_ns)

    table = Table(box=SIMPLE_HEAD)
    for column in ("schedule", "predicted ms", "measured ms", "least", "most", "error"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    pairs = []
    for name, plan in sorted(plans.items(), key=lambda item: median(measured[item[0]])):
        predicted, times = plan.prediction.step_ns, measured[name]
        pairs.append((predicted, median(times)))
        figures = (predicted, median(times), min(times), max(times))
        table.add_row(name, *(f"{ns / 1e6:,.0f}" for ns in figures), f"{predicted / median(times) - 1:+.1%}")
    console = Console(width=100)
    console.print(table)
    console.print(f"Kendall's tau {kendall_tau(pairs):.2f}")
    if given.json:
        with open(given.json, "w") as file:
            json.dump(
                {n: {"predicted_ns": plans[n].prediction.step_ns, "measured_ns": measured[n]} for n in plans}, file
            )


if __name__ == "__main__":
    main()
