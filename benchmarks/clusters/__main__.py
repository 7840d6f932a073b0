"""Published training runs, predicted and measured: seconds a step, errors, and the order of plans on the same devices.

    python -m benchmarks.clusters FOLDER [--paradl LOGS ANALYSIS]

FOLDER is a checkout of github.com/eth-easl/sailor (MIT licence, tested with commit cf2c8e3), or a folder with its
`llm_info.json`, `profiles`, `Metis`, `providers` and `validation` only. LOGS is a checkout of ankahira/paraDL (commit
cc23ef0), ANALYSIS one of TruongThaoNguyen/paraDL-analysis (commit ce36803). docs/clusters.md has the rules of the
predictions.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bapipe.errors import BapipeError
from benchmarks import parser_of
from benchmarks.clusters.deepspeed import Step, predict
from benchmarks.clusters.paradl import paradl_table
from benchmarks.clusters.runs import Run, left_out, read_runs
from benchmarks.clusters.sailor_files import SailorFiles
from benchmarks.clusters.tables import ENGINE, compared, errors, order, others, remarks

out = Console(width=150)


def groups_of(runs: Iterable[Run]) -> Mapping[str, Sequence[Run]]:
    """Returns runs by what is averaged together: by model, and those of several kinds of GPU."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        title = "OPT-350M, several kinds of GPU" if run.is_mixed else f"{run.model}, GH200"
        groups.setdefault(title, []).append(run)
    return groups


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of eth-easl/sailor, or its data")
    parser.add_argument("--paradl", type=Path, nargs=2, metavar=("LOGS", "ANALYSIS"), help="checkouts of ParaDL")
    arguments = parser.parse_args()
    try:
        compare(SailorFiles(arguments.folder))
        if arguments.paradl:
            out.print(paradl_table(*arguments.paradl))
    except BapipeError as error:
        sys.exit(str(error))


def compare(files: SailorFiles) -> None:
    """Prints all tables."""
    runs = read_runs(files)
    reasons = left_out(runs, files)
    kept = [run for run in runs if run.name not in reasons]
    steps: dict[str, Step] = {run.name: predict(run, files) for run in kept}
    out.print(ENGINE, highlight=False)
    for title, group in groups_of(kept).items():
        out.print(compared(title, group, steps))
    out.print(errors(groups_of(kept), steps))
    out.print(order(kept, steps))
    out.print(others(runs, reasons))
    for line in remarks(runs, files):
        out.print(f"- {line}", highlight=False)


if __name__ == "__main__":
    main()
