"""When nothing fits: the plan that comes nearest, and what each of its devices lacks."""

from collections.abc import Sequence

from bapipe.search.problem import Problem


def closest(problems: Sequence[Problem], layer_names: Sequence[str]) -> str:
    """Returns a message about the plan whose worst device lacks the fewest bytes."""
    cuts_of = [_least_lack(problem) for problem in problems]
    best = min(range(len(problems)), key=lambda i: max(_lacks(problems[i], cuts_of[i])))
    problem, cuts = problems[best], cuts_of[best]
    devices = []
    for s, rank in enumerate(problem.ranks):
        need, has = problem.peak_bytes(s, cuts[s], cuts[s + 1]), problem.memory_bytes[s]
        short = f"{need - has:,} bytes short" if need > has else "fits"
        name = problem.cluster.devices[rank].name
        devices.append(
            f"{name} needs {need:,} bytes for '{layer_names[cuts[s]]}' to '{layer_names[cuts[s + 1] - 1]}' "
            f"and has {has:,} ({short})"
        )
    return (
        f"no plan fits in memory; the closest is {problem.schedule} with {problem.num_stages} "
        f"{'stage' if problem.num_stages == 1 else 'stages'} and micro-batches of {problem.microbatch_size}: "
        f"{'; '.join(devices)}. Try more devices, smaller micro-batches, or a smaller mini-batch"
    )


def _lacks(problem: Problem, cuts: Sequence[int]) -> list[int]:
    return [problem.peak_bytes(s, cuts[s], cuts[s + 1]) - problem.memory_bytes[s] for s in range(problem.num_stages)]


def _least_lack(problem: Problem) -> tuple[int, ...]:
    """Returns the cuts that minimise the largest lack of a device, by dynamic programming in O(stages * layers**2)."""
    p, n = problem.num_stages, problem.num_layers
    best: dict[int, tuple[int, tuple[int, ...]]] = {n: (-problem.memory_bytes[-1], ())}  # by first layer of the rest
    for s in reversed(range(p)):
        last = s == p - 1
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for a in range(s, n - (p - 1 - s)):
            options = [n] if last else [z for z in best if z > a]
            longer[a] = min(
                (max(problem.peak_bytes(s, a, z) - problem.memory_bytes[s], best[z][0]), (z, *best[z][1]))
                for z in options
            )
        best = longer
    return (0, *best[0][1])
