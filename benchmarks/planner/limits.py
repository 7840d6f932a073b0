"""How well time limits are kept: random problems that are hard for a limit.

    python -m benchmarks.planner.limits [--cases 40] [--seed 0]

Chains of 40 to 1,000 layers on 8 to 200 devices, alike and unlike, half of them without overlap of transfers, with up
to 1,024 micro-batches, under one or three schedules or a searched order, with limits of 1 to 20 seconds. Compiling code
is not counted. Each line has the seconds beyond the limit, and the gap of the plan; the last one how many
are within a tenth of the limit and 0.3 seconds.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random

import bapipe
from bapipe.errors import BapipeError
from bapipe.planner.compute.deadline import COMPILING
from bapipe.planner.inputs.options import SEARCH
from bapipe.schedules import ALL
from benchmarks import parser_of
from benchmarks.planner import scale

PART, SECONDS = 0.1, 0.3
"""A limit is kept if it is exceeded by no more than this part of it and these seconds, which loading takes."""


def cases(num_cases: int, seed: int) -> Iterator[tuple[scale.Case, float]]:
    """Yields problems, and their limits in seconds."""
    random = Random(seed)
    for _ in range(num_cases):
        names = random.sample(list(ALL), random.choice([1, 1, 3]))
        case = scale.Case(
            inputs=partial(scale.chain, random.choice([40, 100, 200, 400, 1000])),
            num_devices=random.choice([8, 16, 40, 64, 100, 200]),
            minibatch_size=random.choice([64, 256, 512, 1024]),
            schedules=(*names, *([SEARCH] if random.random() < 0.2 else [])),
            replicas=random.random() < 0.5,
            per_host=8,
            is_unlike=random.random() < 0.5,
            overlaps=random.random() < 0.5,
            output_bytes=2 * scale.MB,
        )
        yield case, random.choice([1.0, 2.0, 5.0, 10.0, 20.0])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(" layers devices micro-batches limit s beyond s   gap % schedules")
    num_kept, beyond_s = 0, []
    for case, limit_s in cases(arguments.cases, arguments.seed):
        profile, cluster, options = scale.problem_of(case, seed=0)
        began_s, compiled_s = time.monotonic(), COMPILING.of_all_s
        try:
            plan = bapipe.plan(profile, cluster, replace(options, time_limit_s=limit_s))
            gap = f"{100 * plan.certificate.gap:.1f}"
        except BapipeError:
            gap = "no plan"
        over_s = time.monotonic() - began_s - (COMPILING.of_all_s - compiled_s) - limit_s
        num_kept += over_s <= PART * limit_s + SECONDS
        beyond_s.append(over_s)
        names = ", ".join(case.schedules)
        shape = f"{len(case.inputs()):7d} {case.num_devices:7d} {case.minibatch_size:13d}"
        print(f"{shape} {limit_s:7g} {max(0.0, over_s):8.1f} {gap:>7} {names}", flush=True)
    print(f"{num_kept} of {len(beyond_s)} limits kept, the worst exceeded by {max(0.0, *beyond_s):.1f} s")


if __name__ == "__main__":
    main()
