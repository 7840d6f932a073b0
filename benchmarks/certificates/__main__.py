"""Looks for plans that beat the lower bound of a certificate, or the plan itself.

    python -m benchmarks.certificates [--large 20] [--small 100] [--seed 0] [--results FILE] [--time-limit SECONDS]
        [--layers 300 1000] [--devices 2 128] [--seconds 20]

Large problems are random chains of that many layers on that many devices (small numbers more often): alike or unlike,
on one or several hosts, of one or two kinds, with plenty of memory or little, with and without replicas, under
schedules with one or two stages per device. Each is planned, then plans of the same space are made without the search:
equal shares of time, layers or bytes for the first devices of the cluster, and groups of random sizes, improved by hill
climbing on the cuts, with the simulator alone, for the given seconds of compute.

Small problems have up to five layers and three devices, and every feature of profiles, clusters and options that
planning knows; every plan is tried. Where a device lacks memory, stages recompute whole: of devices with several, any
of them.

Prints a line for each large problem, and for each small one with a fault. A plan below the lower bound, one that fits
where the search says that none does, and a small problem whose best plan was missed are faults: the command then ends
with code 1. With a file of results, one line of JSON per problem, problems that are in it are not run again.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec

import bapipe
from bapipe.errors import BapipeError, Infeasible
from bapipe.planner.compute.deadline import OutOfTime
from benchmarks import parser_of
from benchmarks.certificates.challenger import Challenger
from benchmarks.certificates.every_plan import least_step_ns
from benchmarks.certificates.judge import Judge
from benchmarks.certificates.problems import RandomProblem, large_problem, small_problem


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one problem.

    Attributes:
        step_ns, bound_ns: of the search; None if it says that nothing fits, or that it found nothing in time.
        found_ns: the fastest plan from outside the search, None if none fits.
        fault: "" if all is well.
        seconds: the compute time of the search.
    """

    kind: str
    seed: int
    in_words: str
    step_ns: int | None
    bound_ns: int | None
    found_ns: int | None
    fault: str
    seconds: float


def searched(problem: RandomProblem) -> tuple[int | None, int | None, str]:
    """Returns the step time and the bound of a search, or why there is none."""
    try:
        plan = bapipe.plan([*problem.profiles.values()], problem.cluster, problem.options)
    except Infeasible:
        return None, None, "nothing fits"
    except OutOfTime:
        return None, None, "no plan in time"
    except BapipeError as error:
        return None, None, f"refused: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return None, None, f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    return plan.prediction.step_ns, plan.certificate.lower_bound_ns, ""


def fault_of(step_ns: int | None, bound_ns: int | None, found_ns: int | None, reason: str) -> str:
    """Returns what is wrong with an answer, given the fastest plan from outside."""
    if reason.startswith("refused") or reason in ("nothing fits", "no plan in time"):
        return "" if found_ns is None else f"{reason}, but a plan does"
    if step_ns is None or bound_ns is None:
        return reason
    if found_ns is not None and found_ns < bound_ns:
        return "BELOW THE BOUND"
    return ""


def large(seed: int, arguments: argparse.Namespace) -> Outcome:
    """Plans a large problem and looks for a faster plan."""
    problem = large_problem(seed, tuple(arguments.layers), tuple(arguments.devices), arguments.time_limit)
    began_s = time.process_time()
    step_ns, bound_ns, reason = searched(problem)
    seconds = time.process_time() - began_s
    judge = Judge(problem.profiles, problem.cluster.sequential, problem.options)
    challenger = Challenger(judge, Random(seed), arguments.seconds)
    challenger.run()
    found_ns = None if challenger.best is None else challenger.best[0]
    fault = fault_of(step_ns, bound_ns, found_ns, reason)
    if challenger.best is not None:
        assert judge.simulated_ns(challenger.best[1]) == found_ns
    return Outcome(
        kind="large",
        seed=seed,
        in_words=problem.in_words,
        step_ns=step_ns,
        bound_ns=bound_ns,
        found_ns=found_ns,
        fault=fault,
        seconds=seconds,
    )


def small(seed: int) -> Outcome:
    """Plans a small problem and tries every plan."""
    problem = small_problem(seed)
    began_s = time.process_time()
    step_ns, bound_ns, reason = searched(problem)
    seconds = time.process_time() - began_s
    found_ns = least_step_ns(Judge(problem.profiles, problem.cluster.sequential, problem.options))
    fault = fault_of(step_ns, bound_ns, found_ns, reason)
    if step_ns is not None and found_ns is not None and not fault:
        # Plans from outside recompute whole stages only, so the search may find a faster one.
        fault = "" if step_ns <= found_ns else f"the search found {step_ns}, and there is {found_ns}"
    return Outcome(
        kind="small",
        seed=seed,
        in_words=problem.in_words,
        step_ns=step_ns,
        bound_ns=bound_ns,
        found_ns=found_ns,
        fault=fault,
        seconds=seconds,
    )


def line_of(outcome: Outcome) -> str:
    """Returns a line of output."""
    head = f"{outcome.kind} {outcome.seed}: {outcome.in_words}"
    if outcome.step_ns is None or outcome.bound_ns is None:
        return f"{head}: {outcome.fault or 'nothing fits'}"
    gap = outcome.step_ns / max(outcome.bound_ns, 1) - 1
    better = 0.0 if outcome.found_ns is None else max(outcome.step_ns / max(outcome.found_ns, 1) - 1, 0.0)
    return (
        f"{head}: step {outcome.step_ns / 1e6:,.1f} ms, gap {gap:.1%}, better {better:.1%}, {outcome.seconds:.1f} s"
        f"{f'  {outcome.fault}' if outcome.fault else ''}"
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """Returns what all large or all small problems say."""
    timed = [each for each in outcomes if each.step_ns is not None and each.bound_ns]
    gaps = sorted(each.step_ns / each.bound_ns - 1 for each in timed if each.step_ns and each.bound_ns)
    better = [each.step_ns / each.found_ns - 1 for each in timed if each.found_ns and each.step_ns]
    num_faults = sum(bool(each.fault) for each in outcomes)
    if not gaps:
        return f"{len(outcomes)} problems, {num_faults} faults"
    return (
        f"{len(outcomes)} problems, {num_faults} faults; gap median {gaps[len(gaps) // 2]:.1%}, nine tenths within "
        f"{gaps[len(gaps) * 9 // 10]:.1%}, largest {gaps[-1]:.1%}; a plan from outside is faster in "
        f"{sum(each > 0.001 for each in better)}, by at most {max([0.0, *better]):.1%}"
    )


def known_outcomes(path: Path | None) -> dict[tuple[str, int], Outcome]:
    """Returns the outcomes of a file of results; a last line that was cut off is left out."""
    if path is None or not path.exists():
        return {}
    outcomes = []
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            outcomes.append(msgspec.json.decode(line, type=Outcome))
    return {(each.kind, each.seed): each for each in outcomes}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--large", type=int, default=20, help="how many large problems")
    parser.add_argument("--small", type=int, default=100, help="how many small problems")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first problem of each kind")
    parser.add_argument("--results", type=Path, help="a file of outcomes to continue")
    parser.add_argument("--layers", type=int, nargs=2, default=(300, 1000))
    parser.add_argument("--devices", type=int, nargs=2, default=(2, 128))
    parser.add_argument("--seconds", type=float, default=20.0, help="to look for a faster plan of a large problem")
    parser.add_argument("--time-limit", type=float, help="seconds of each search; without, its fixed amount of work")
    arguments = parser.parse_args()
    outcomes = known_outcomes(arguments.results)
    wanted = [("small", arguments.seed + i) for i in range(arguments.small)]
    wanted += [("large", arguments.seed + i) for i in range(arguments.large)]
    for kind, seed in wanted:
        if (kind, seed) in outcomes:
            continue
        outcome = outcomes[kind, seed] = small(seed) if kind == "small" else large(seed, arguments)
        if arguments.results is not None:
            with arguments.results.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
        if kind == "large" or outcome.fault:
            print(line_of(outcome), flush=True)
    for kind in ("small", "large"):
        of_kind = [outcomes[each] for each in wanted if each[0] == kind]
        if of_kind:
            print(f"{kind}: {summary(of_kind)}")
    sys.exit(1 if any(outcomes[each].fault for each in wanted) else 0)


if __name__ == "__main__":
    main()
