"""Plans of bapipe on two CPU ranks, compared with hand-written torch: is the prediction right, is the plan fastest?

    python -m benchmarks.runtime [FOLDER] [--model vgg16 resnet50 gnmt8] [--rounds 4] [--steps 2] [--json FILE]

One thread per rank, unless one process takes both cores. All configurations run alternately in the same two processes,
several rounds of a few steps; the first step of a round does not count. The table shows the median, the minimum and
the maximum of all others. The layers are profiled first; profiles that FOLDER already contains are not measured again.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import parser_of
from benchmarks.runtime.compare import NUM_RANKS, Comparison, Outcome, compare
from benchmarks.runtime.models import MODELS, Workload
from benchmarks.runtime.plans import PlannedWorkload, describe, make_plans


def log_of(model: str, text: str) -> None:
    log(f"{model}: {text}")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(workload: Workload, planned: PlannedWorkload, outcome: Outcome, console: Console) -> None:
    table = Table(
        title=f"{workload.model} {workload.arguments}, mini-batches of {workload.minibatch_size}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("configuration")
    for column in ("predicted ms", "measured ms", "min", "max", "predicted / measured", "fastest / this"):
        table.add_column(column, justify="right")
    fastest = min(median(times) for times in outcome.step_ns.values())
    for name, times in outcome.step_ns.items():
        predicted, measured = planned.step_ns.get(name), median(times)
        table.add_row(
            name,
            "" if predicted is None else f"{predicted / 1e6:,.0f}",
            *(f"{ns / 1e6:,.0f}" for ns in (measured, min(times), max(times))),
            "" if predicted is None else f"{predicted / measured:.1%}",
            f"{fastest / measured:.1%}",
        )
    console.print(table)
    for name, plan in planned.plans.items():
        console.print(f"{name}: {describe(plan)}", highlight=False)
    console.print(f"overhead of the runtime, torch's part included: {outcome.overhead:.2%} of a two-stage step\n")


def figures(planned: PlannedWorkload, outcome: Outcome) -> dict[str, object]:
    configurations = {
        name: {"predicted_ns": planned.step_ns.get(name), "measured_ns": times}
        for name, times in outcome.step_ns.items()
    }
    plans = {name: describe(plan) for name, plan in planned.plans.items()}
    return {"configurations": configurations, "plans": plans, "overhead": outcome.overhead}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    everything = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.model:
            workload = MODELS[model]
            planned = make_plans(workload, NUM_RANKS, args.folder or Path(scratch), log)
            comparison = Comparison(
                workload=workload,
                plans=planned.plans,
                by_hand=planned.by_hand,
                rounds=args.rounds,
                steps=args.steps,
            )
            outcome = compare(comparison, partial(log_of, model))
            report(workload, planned, outcome, Console(width=110))
            everything[model] = figures(planned, outcome)
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
