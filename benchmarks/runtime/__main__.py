"""Plans of bapipe on two CPU ranks, compared with hand-written torch: is the prediction right, is the plan fastest?

    python -m benchmarks.runtime [FOLDER] [--model vgg16 resnet50 gnmt8] [--rounds 4] [--steps 2] [--json FILE]

One thread per rank, unless one process takes both cores. All configurations run alternately in the same two processes,
several rounds of a few steps; the first step of a round does not count. The table shows the median, the minimum and
the maximum of all others. The layers are profiled first; profiles that FOLDER already contains are not measured again.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.runtime.models import MODELS, Raced
from benchmarks.runtime.plans import Promised, in_words, promise
from benchmarks.runtime.race import NUM_RANKS, Outcome, Race, race


def tell_of(model: str, text: str) -> None:
    tell(f"{model}: {text}")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(raced: Raced, promised: Promised, found: Outcome, console: Console) -> None:
    table = Table(
        title=f"{raced.model} {raced.arguments}, mini-batches of {raced.minibatch_size}",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("configuration")
    for column in ("predicted ms", "measured ms", "min", "max", "predicted / measured", "fastest / this"):
        table.add_column(column, justify="right")
    fastest = min(median(times) for times in found.step_ns.values())
    for name, times in found.step_ns.items():
        predicted, measured = promised.step_ns.get(name), median(times)
        table.add_row(
            name,
            "" if predicted is None else f"{predicted / 1e6:,.0f}",
            *(f"{ns / 1e6:,.0f}" for ns in (measured, min(times), max(times))),
            "" if predicted is None else f"{predicted / measured:.1%}",
            f"{fastest / measured:.1%}",
        )
    console.print(table)
    for name, plan in promised.plans.items():
        console.print(f"{name}: {in_words(plan)}", highlight=False)
    console.print(f"the overhead of the runtime, torch's part included, is {found.overhead:.2%} of a two-stage step\n")


def figures(promised: Promised, found: Outcome) -> dict[str, object]:
    ways = {
        way: {"predicted_ns": promised.step_ns.get(way), "measured_ns": times} for way, times in found.step_ns.items()
    }
    plans = {way: in_words(plan) for way, plan in promised.plans.items()}
    return {"ways": ways, "plans": plans, "overhead": found.overhead}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    everything = {}
    with tempfile.TemporaryDirectory() as own:
        for model in given.model:
            raced = MODELS[model]
            promised = promise(raced, NUM_RANKS, given.folder or Path(own), tell)
            asked = Race(
                raced=raced,
                plans=promised.plans,
                by_hand=promised.by_hand,
                rounds=given.rounds,
                steps=given.steps,
            )
            found = race(asked, partial(tell_of, model))
            report(raced, promised, found, Console(width=110))
            everything[model] = figures(promised, found)
    if given.json:
        given.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
