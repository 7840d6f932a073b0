"""When nothing fits: the plan that comes nearest, what each of its devices lacks, and what would help."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.intervals import INF, IntArray
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.problem import Layout, Problem, Root
from bapipe.planner.branch_and_bound.space import SearchSpace, search_space
from bapipe.planner.options import PlanOptions

TRY = "Try more devices, smaller micro-batches, or a smaller mini-batch"


def least_infeasible(problems: Sequence[Problem]) -> tuple[Problem, Layout, dict[int, int]] | None:
    """Returns the layout whose worst device lacks the fewest bytes, each stage taken alone, and what its devices lack.

    None where constraints leave none. O(slots * places**2) for each problem.
    """
    best: tuple[int, Problem, Layout, dict[int, int]] | None = None
    for problem in problems:
        lacks = _ShortfallDP(problem)
        for start in problem.starts:
            layout = lacks.least(start)
            if layout is None:
                continue
            layout = _recomputing(problem, layout)
            found = problem.lacks(layout)
            if best is None or max(found.values()) < best[0]:
                best = (max(found.values()), problem, layout, found)
    return None if best is None else best[1:]


def _recomputing(problem: Problem, layout: Layout) -> Layout:
    """Returns the layout with recomputation also where a stage does not fit even so, but lacks less."""
    if layout.slots[0].place is not None or not problem.bounds.pieces.may_recompute:
        return layout
    plain, again = (problem.lacks(replace(layout, recompute=(flag,) * len(layout.slots))) for flag in (False, True))
    flags = []
    for ranks in problem.ranks(layout.slots):
        short = max(plain[rank] for rank in ranks)
        flags.append(short > 0 and max(again[rank] for rank in ranks) < short)
    return replace(layout, recompute=tuple(flags))


class _ShortfallDP:
    """For every slot and place, the least largest lack of the slots from there on."""

    def __init__(self, problem: Problem) -> None:
        self.pieces = problem.bounds.pieces
        self.problem = problem
        self._found: dict[int, tuple[StagePlacement, IntArray, IntArray, IntArray]] = {}

    def least(self, start: Root) -> Layout | None:
        slot = min(start.first, key=lambda slot: int(self.of(slot)[1][0]))
        if self.of(slot)[1][0] >= INF:
            return None
        places, slots = [0], [slot]
        while True:
            _, _, ends, following = self.of(slots[-1])
            at = places[-1]
            places.append(int(ends[at]))
            if slots[-1].last:
                return self.problem.layout(places, tuple(slots))
            slots.append(slots[-1].next[int(following[at])])

    def of(self, slot: StagePlacement) -> tuple[StagePlacement, IntArray, IntArray, IntArray]:
        """The slot, its least lack at every place, where its stage then ends, and the number of the next slot."""
        if id(slot) not in self._found:
            self._found[id(slot)] = self._make(slot)
        return self._found[id(slot)]

    def _make(self, slot: StagePlacement) -> tuple[StagePlacement, IntArray, IntArray, IntArray]:
        grid = self.pieces.grid
        if slot.last:
            rest = np.full((1, grid.num_places), INF, dtype=np.int64)
            rest[0, -1] = -INF
        else:
            rest = np.array([self.of(other)[1] for other in slot.next])
        following = np.argmin(rest, axis=0)
        lacks = np.maximum(self.pieces.lacks(slot), rest.min(axis=0)[grid.ends])
        ends = [int(np.argmin(lacks[grid.row(place)])) + place + 1 for place in range(grid.num_places - 1)]
        least = grid.least(lacks)
        number = np.array([int(following[end]) for end in ends])
        return slot, least, np.array(ends), number


def infeasible_error(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions, space: SearchSpace
) -> BapipeError:
    """Returns an error about the plan whose worst device lacks the fewest bytes, and what would help.

    Where constraints leave none at all, it is about these.
    """
    found = least_infeasible(space.problems)
    if found is None:
        return BapipeError(_contradiction(profiles, cluster, options))
    problem, layout, lacks = found
    names = [layer.name for layer in next(iter(profiles.values())).layers]
    num_stages = len(layout.slots)
    return Infeasible(
        f"no plan fits in memory; the closest is {problem.schedule} with {num_stages} "
        f"{'stage' if num_stages == 1 else 'stages'} and micro-batches of {problem.microbatch_size}: "
        f"{'; '.join(_devices(problem, layout, lacks, names))}. {_advice(profiles, cluster, options, lacks)}"
    )


def _contradiction(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> str:
    """Says which of the constraints to drop: one of those without which there is a plan."""
    culprits = []
    for i, text in enumerate(options.constraints):
        fewer = replace(options, constraints=(*options.constraints[:i], *options.constraints[i + 1 :]))
        if least_infeasible(search_space(profiles, cluster, fewer).problems) is not None:
            culprits.append(f"'{text}'")
    drop = (
        f"{'drop' if len(culprits) < 2 else 'drop one of'} {', '.join(culprits)}" if culprits else "drop some of them"
    )
    stages = "" if options.num_stages is None else f" with --stages {options.num_stages}"
    rules = ", ".join(f"'{text}'" for text in options.constraints)
    return f"no plan{stages} keeps the constraints {rules}: {drop}, or allow more stages or devices"


def _devices(problem: Problem, layout: Layout, lacks: Mapping[int, int], names: Sequence[str]) -> list[str]:
    limit = {rank: own.limit_bytes for own in problem.classes for rank in own.ranks}
    held: dict[int, list[str]] = {rank: [] for rank in lacks}
    spans = list(pairwise(layout.cuts))
    for ranks, (start, stop), again in zip(problem.ranks(layout.slots), spans, layout.recompute, strict=True):
        for rank in ranks:
            text = f"'{names[start]}' to '{names[stop - 1]}'"
            held[rank].append(f"{text} (recomputed)" if again else text)
    return [
        f"{problem.cluster.devices[rank].name} needs {limit[rank] + lack:,} bytes for {' and '.join(held[rank])} and "
        f"has {limit[rank]:,} ({f'{lack:,} bytes short' if lack > 0 else 'fits'})"
        for rank, lack in lacks.items()
    ]


def _advice(
    profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions, lacks: Mapping[int, int]
) -> str:
    """What each thing that the options hold fixed would do."""
    changes = {}
    if not options.recompute:
        changes["recomputation"] = replace(options, recompute=True)
    if not options.replicas:
        changes["stages on several devices"] = replace(options, replicas=True)
    if options.num_stages is not None:
        changes["another number of stages"] = replace(options, num_stages=None)
    if options.microbatch_size is not None:
        changes["other micro-batch sizes"] = replace(options, microbatch_size=None)
    said = []
    for name, changed in changes.items():
        try:
            found = least_infeasible(search_space(profiles, cluster, changed).problems)
        except BapipeError:
            continue
        short = max(found[2].values()) if found else INF
        if short < max(lacks.values()):
            said.append(f"with {name} {'it would fit' if short <= 0 else f'{short:,} bytes would be lacking'}")
    helps = f"{'; '.join(said)}. " if said else ""
    return f"{helps[:1].upper()}{helps[1:]}{_too_large(profiles, cluster, options) or TRY}"


def _too_large(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> str:
    """Says so where one layer alone is more than any device may hold."""
    layers = next(iter(profiles.values())).layers
    largest = max(layers, key=lambda layer: 2 * layer.param_bytes + layer.optimizer_state_bytes)
    num_bytes, most = 2 * largest.param_bytes + largest.optimizer_state_bytes, max(options.limits(cluster))
    if num_bytes <= most:
        return ""
    return (
        f"'{largest.name}' alone takes {num_bytes:,} bytes for its parameters, gradients and optimizer state, more "
        f"than any device may hold ({most:,}): only devices with more memory, or smaller layers, would do"
    )
