"""When nothing fits: the plan that comes nearest, and what each of its devices lacks."""

from collections.abc import Sequence

from bapipe.memory import peak_memory
from bapipe.search.problem import Problem


def closest(problems: Sequence[Problem], layer_names: Sequence[str]) -> str:
    """Returns a message about the plan whose worst device lacks the fewest bytes."""
    candidates = [(problem, cuts, _needs(problem, cuts)) for problem in problems for cuts in [_least_lack(problem)]]
    problem, cuts, needs = min(
        candidates, key=lambda c: max(need - has for need, has in zip(c[2], c[0].memory_bytes, strict=True))
    )
    devices = []
    for place, (rank, need, has) in enumerate(zip(problem.ranks, needs, problem.memory_bytes, strict=True)):
        short = f"{need - has:,} bytes short" if need > has else "fits"
        own = [s for s in range(problem.num_stages) if problem.places[s] == place]
        layers = " and ".join(f"'{layer_names[cuts[s]]}' to '{layer_names[cuts[s + 1] - 1]}'" for s in own)
        name = problem.cluster.devices[rank].name
        devices.append(f"{name} needs {need:,} bytes for {layers} and has {has:,} ({short})")
    return (
        f"no plan fits in memory; the closest is {problem.schedule} with {problem.num_stages} "
        f"{'stage' if problem.num_stages == 1 else 'stages'} and micro-batches of {problem.microbatch_size}: "
        f"{'; '.join(devices)}. Try more devices, smaller micro-batches, or a smaller mini-batch"
    )


def _needs(problem: Problem, cuts: Sequence[int]) -> list[int]:
    peaks = peak_memory(problem.table, problem.stages(cuts))
    return [peaks[rank].total for rank in problem.ranks]


def _least_lack(problem: Problem) -> tuple[int, ...]:
    """Returns the cuts that minimise the largest lack, each stage taken alone, by dynamic programming.

    O(stages * layers**2).
    """
    p, n = problem.num_stages, problem.num_layers
    limits = [problem.memory_bytes[place] for place in problem.places]
    best: dict[int, tuple[int, tuple[int, ...]]] = {n: (-limits[-1], ())}  # by first layer of the rest
    for s in reversed(range(p)):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for a in problem.legal_cuts if s > 0 else (0,):
            options = [
                (max(problem.peak_bytes(s, a, z) - limits[s], lack), (z, *rest))
                for z, (lack, rest) in best.items()
                if z > a
            ]
            if options:
                longer[a] = min(options)
        best = longer
    return (0, *best[0][1])
