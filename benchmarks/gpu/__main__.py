"""Measures what one GPU shows of bapipe, and writes it into a folder; goes on where it stopped.

    python -m benchmarks.gpu FOLDER [--device cuda] [--seconds 540] [--small] [--only layers.resnet50 ...]

In order: facts of the machine; losses and gradients of every schedule with all stages on one GPU; two ranks on one GPU,
with transfers through host memory and, where NCCL allows it, by NCCL; then, for each of five models in bfloat16, TF32
and float32, its profile at each training size (beside the whole step, and the stash and peak of the allocator), and
steps of one and two stages, predicted and measured, as a whole and by action.

Each part has a file in FOLDER/results; a part whose file is there is not done again (remove the file to repeat it), and
one that takes too long, or fails, has its error there. Profiles are in FOLDER/profiles, and FOLDER/summary.md has the
tables. `--device cpu --small` does all of it with tiny models, to see that it works. It needs torch and the packages
of bapipe, but no installation: a checkout as PYTHONPATH will do.
"""  # fmt: skip

import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks import parser_of

NEEDED = ("torch", "numpy", "msgspec", "networkx", "rich")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where results are and go")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no part after this time, and end then")
    parser.add_argument("--small", action="store_true", help="tiny models, which take seconds on a CPU")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="NAME", help="parts whose names begin with one of these"
    )
    given = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"missing packages: {', '.join(missing)}; install them, or put them on PYTHONPATH")
    from benchmarks.gpu.run import run  # not at the top: it needs those packages

    sys.exit(run(given.folder, given.device, given.seconds, is_small=given.small, prefixes=given.only))


if __name__ == "__main__":
    main()
