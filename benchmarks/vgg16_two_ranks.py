"""VGG-16 on two CPU ranks: speed-up over one process, against the cut at half the layers, and the error of predictions.

    python benchmarks/vgg16_two_ranks.py [--minibatch-size 32] [--microbatches 4 8] [--rounds 3] [--steps 5]

Every rank and the one process compute with one thread, at the same micro-batch size. The three ways to train take
turns, so that all see the same machine; figures are medians over the rounds of each round's typical step.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import bapipe
from bapipe import api
from bapipe.cost import stages_of
from bapipe.schedules import SCHEDULES
from bapipe.search.placing import spread
from bapipe.simulate import judge


@dataclass
class Way:
    """A way to train, what its plan promises, and the typical step of each round."""

    name: str
    plan: bapipe.Plan
    step_ns: list[int] = field(default_factory=list)

    @property
    def measured_ns(self) -> float:
        return median(self.step_ns)


def recut(plan: bapipe.Plan, profile: bapipe.ModelProfile, cuts: Sequence[int]) -> bapipe.Plan:
    """The plan with its layers cut elsewhere, on the first devices, judged anew."""
    names = [layer.name for layer in profile.layers]
    ends = [*cuts, len(names)]
    stages = tuple(
        bapipe.StagePlan(layers=tuple(names[a:b]), devices=(device.name,))
        for a, b, device in zip([0, *cuts], ends, plan.cluster.devices, strict=False)
    )
    table = spread(
        SCHEDULES[plan.schedule](len(stages), plan.num_microbatches),
        tuple((rank,) for rank in range(len(stages))),
        len(plan.cluster.devices),
    )
    costs = stages_of(stages, {profile.device.kind: profile}, plan.cluster, plan.microbatch_size)
    return msgspec.structs.replace(
        plan,
        stages=stages,
        order=tuple(tuple(map(str, actions)) for actions in table.order),
        prediction=judge(table, costs, plan.cluster).prediction(plan.minibatch_size),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatch-size", type=int, default=32)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    console = Console(width=110)

    sizes = sorted({given.minibatch_size // m for m in given.microbatches})
    cluster = api.local_cluster(2, "cpu")
    profile = api.profile_model("vgg16", {}, microbatch_sizes=sizes)
    half = (len(profile.layers) - 1) // 2  # of the model's own layers; the last one is the loss
    figures = []
    for m in given.microbatches:
        best = bapipe.plan(
            profile,
            cluster,
            minibatch_size=given.minibatch_size,
            microbatch_size=given.minibatch_size // m,
            num_stages=2,
        )
        ways = [
            Way("one process", recut(best, profile, [])),
            Way("half the layers", recut(best, profile, [half])),
            Way("bapipe's plan", best),
        ]
        for _ in range(given.rounds):
            for way in ways:
                result = bapipe.run(way.plan, data="mnist", steps=given.steps)
                way.step_ns.append(result.typical_step_ns)
        single, ideal = ways[0], 2 * m / (m + 1)
        table = Table(title=f"{m} micro-batches of {best.microbatch_size}", title_justify="left", box=SIMPLE_HEAD)
        for column in ("", "first stage", "predicted ms", "measured ms", "error", "speed-up", "of the ideal"):
            table.add_column(column, justify="left" if column in ("", "first stage") else "right")
        for way in ways:
            predicted, measured = way.plan.prediction.step_ns, way.measured_ns
            speed_up = single.measured_ns / measured
            table.add_row(
                way.name,
                f"to {way.plan.stages[0].layers[-1]}",
                f"{predicted / 1e6:,.0f}",
                f"{measured / 1e6:,.0f}  ({min(way.step_ns) / 1e6:,.0f} to {max(way.step_ns) / 1e6:,.0f})",
                f"{predicted / measured - 1:+.1%}",
                f"{speed_up:.2f}",
                "" if way is single else f"{speed_up / ideal:.0%}",
            )
            figures.append(
                {
                    "microbatches": m,
                    "way": way.name,
                    "predicted_ns": predicted,
                    "measured_ns": way.step_ns,
                    "speed_up": speed_up,
                    "ideal": ideal,
                }
            )
        console.print(table)
        for other in best.alternatives:
            console.print(f"  {other.name}: predicted {other.step_ns / 1e6:,.0f} ms, {other.why_not}", highlight=False)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
