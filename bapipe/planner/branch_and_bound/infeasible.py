"""If nothing fits: the least infeasible plan, the shortfall of each of its devices, and what would help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ProfilesByKind
from bapipe.planner.branch_and_bound.partition_space import disagree_at_cuts
from bapipe.planner.branch_and_bound.problem import Layout, Problem, Root, SearchResult
from bapipe.planner.branch_and_bound.space import search_space, tries_all_orders, tries_any_order
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import microbatch_sizes, names_looped
from bapipe.planner.results.no_plan import what_to_try
from bapipe.planner.stages.device_orders import device_orders
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement, in_postorder
from bapipe.printable import and_others


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosestLayout:
    """The layout whose worst device lacks the fewest bytes.

    Attributes:
        shortfall_bytes: what each rank in use lacks; 0 or negative if it has enough memory.
    """

    problem: Problem
    layout: Layout
    shortfall_bytes: Mapping[int, int]

    @property
    def worst_bytes(self) -> int:
        """What the worst rank lacks."""
        return max(self.shortfall_bytes.values())


def fitting_layout(closest: ClosestLayout | None) -> SearchResult | None:
    """Returns the closest layout as a result with the lower bound 0, None if it does not fit."""
    if closest is None or closest.worst_bytes > 0:
        return None
    step_ns = closest.problem.step_ns(closest.layout)
    return SearchResult(problem=closest.problem, layout=closest.layout, step_ns=step_ns, lower_bound_ns=0)


def least_infeasible(problems: Sequence[Problem], deadline: Deadline = UNLIMITED) -> ClosestLayout | None:
    """Returns the layout whose worst device lacks the fewest bytes; None if the constraints allow no layout.

    Memory is counted stage by stage, as in the search: exact only if no device has several stages.
    O(placements * boundaries**2) per problem.

    Raises:
        OutOfTime: the deadline passed before the end.
    """
    best: ClosestLayout | None = None
    for problem in problems:
        # The roots of a problem have placements in common; these are solved once.
        shortfalls = _ShortfallDP(problem, deadline)
        for root in problem.roots:
            layout = shortfalls.best_layout(root)
            if layout is None:
                continue
            # `Problem.layout` recomputes nothing in a stage that cannot fit, although that may reduce its shortfall.
            layout = _recompute_if_better(problem, layout)
            found = ClosestLayout(problem=problem, layout=layout, shortfall_bytes=problem.shortfall_bytes(layout))
            if best is None or found.worst_bytes < best.worst_bytes:
                best = found
    return best


def _recompute_if_better(problem: Problem, layout: Layout) -> Layout:
    """Returns the layout, with whole stages recomputed that cannot fit, where that reduces their shortfall."""
    if layout.fits or not problem.lower_bound.costs.memory.may_recompute:
        return layout
    nothing = (frozenset[int](),) * len(layout.placements)
    all_layers = tuple(frozenset(range(begin, end)) for begin, end in pairwise(layout.cuts))
    plain, recomputed = (
        problem.shortfall_bytes(replace(layout, recompute=recompute)) for recompute in (nothing, all_layers)
    )
    chosen = []
    for ranks, of_stage, whole in zip(problem.ranks(layout.placements), layout.recompute, all_layers, strict=True):
        # All replicas of a stage recompute the same layers; the worst replica decides.
        worst = max(plain[rank] for rank in ranks)
        lacks_less = worst > 0 and max(recomputed[rank] for rank in ranks) < worst
        chosen.append(of_stage or (whole if lacks_less else of_stage))
    return replace(layout, recompute=tuple(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShortfallToGo:
    """The optimum for a stage on a placement and all later ones, for each boundary at which the stage begins.

    Attributes:
        shortfall_bytes: the maximum shortfall of these stages, minimized over their layouts. [boundaries]
        ends: where the stage ends in the optimum. [boundaries - 1]
        successors: the index of the next placement in the optimum. [boundaries - 1]
    """

    shortfall_bytes: IntArray
    ends: IntArray
    successors: IntArray


class _ShortfallDP:
    """A backward dynamic programme that minimizes the maximum shortfall, per placement and boundary."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem, self.costs, self.deadline = problem, problem.lower_bound.costs, deadline
        self._solved: dict[StagePlacement, _ShortfallToGo] = {}

    def best_layout(self, root: Root) -> Layout | None:
        """Returns a layout that minimizes the maximum shortfall; None if the constraints forbid all."""
        placement = min(root.first_placements, key=lambda first: int(self._to_go(first).shortfall_bytes[0]))
        if self._to_go(placement).shortfall_bytes[0] >= INF:
            return None
        boundaries, placements = [0], [placement]
        while True:  # follow the optimal choices
            to_go, begin = self._to_go(placements[-1]), boundaries[-1]
            boundaries.append(int(to_go.ends[begin]))
            if placements[-1].is_last:
                return self.problem.layout(boundaries, tuple(placements))
            placements.append(placements[-1].successors[int(to_go.successors[begin])])

    def _to_go(self, placement: StagePlacement) -> _ShortfallToGo:
        """Returns the optimum for a placement, after solving all that can follow it."""
        for other in in_postorder([placement], lambda each: each in self._solved):
            self.deadline.check()
            self._solved[other] = self._solve(other)
        return self._solved[placement]

    def _solve(self, placement: StagePlacement) -> _ShortfallToGo:
        """Computes the optimum for a placement from that of its successors."""
        intervals = self.costs.intervals
        following = np.full((1, intervals.num_boundaries), INF, dtype=np.int64)
        if placement.is_last:
            following[0, -1] = -INF  # no stage follows the last boundary
        elif placement.successors:  # else too few devices remain for the stages that must follow
            following = np.array([self._solved[other].shortfall_bytes for other in placement.successors])
        # The best successor depends only on the end of the stage. [successors, boundaries] -> [boundaries]
        best_successor = np.argmin(following, axis=0)  # [boundaries]
        # The maximum shortfall of this stage and of those after its end. [intervals]
        shortfall = np.maximum(self.costs.memory.shortfall_bytes(placement), following.min(axis=0)[intervals.ends])
        # The best end for each begin; a row of intervals starts with the end begin + 1.
        begins = range(intervals.num_boundaries - 1)
        ends = [int(np.argmin(shortfall[intervals.row(begin)])) + begin + 1 for begin in begins]
        return _ShortfallToGo(
            shortfall_bytes=intervals.every.min_per_begin(shortfall),
            ends=np.array(ends),
            successors=np.array([int(best_successor[end]) for end in ends]),
        )


def infeasible_error(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    closest: ClosestLayout | None,
    deadline: Deadline,
    *,
    has_tried_all: bool,
) -> BapipeError:
    """Returns the error that nothing fits: it names the closest plan, and what would help.

    If the constraints allow no plan at all, the error is about them.

    Args:
        closest: from `least_infeasible`; None if the constraints allow no plan.
        has_tried_all: whether a search has tried all plans.
    """
    if closest is None:
        return ConstraintsUnmet(_contradiction(profiles, cluster, options))
    problem, layout, shortfall = closest.problem, closest.layout, closest.shortfall_bytes
    names = [layer.name for layer in next(iter(profiles.values())).layers]
    num_stages = len(layout.placements)
    has_unlike_cuts = disagree_at_cuts(profiles, cluster, microbatch_sizes(profiles, cluster, options))
    most = " with the most bytes that any kind of device has at its cuts" if has_unlike_cuts else ""
    # The memory of devices with several stages is only known for whole plans, and not all of these were tried.
    is_proof = has_tried_all and not names_looped(options)
    tried, none_fits = _tried_devices(profiles, cluster, options), "fits" if is_proof else "was found that fits"
    return Infeasible(
        f"no plan{tried} {none_fits} in memory{most}; the closest is "
        f"{problem.schedule} with {num_stages} {'stage' if num_stages == 1 else 'stages'} and micro-batches of "
        f"{problem.microbatch_size}: "
        f"{'; '.join(_device_texts(problem, layout, shortfall, names))}. "
        f"{_advice(profiles, cluster, options, shortfall, deadline, problem.microbatch_size)}",
        is_proven=is_proof and not tried and not has_unlike_cuts,
    )


def _tried_devices(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> str:
    """Returns on which choices of devices no plan fits, in words; '' if that is so for all."""
    if tries_all_orders(profiles, cluster, options):
        return ""
    if tries_any_order(profiles, cluster, options):
        return " on the devices in the orders that were tried, of too many to try all,"
    orders = [order.words for order in device_orders(profiles, cluster, options)]
    return f" on the first devices, {', or '.join(orders)}, of too many choices to try all,"


def _contradiction(profiles: ProfilesByKind, cluster: Cluster, options: PlanOptions) -> str:
    """Returns the error text if the constraints allow no plan: it names those that can be dropped to get one."""
    culprits = []
    for i, text in enumerate(options.constraints):
        # One constraint is left out at a time. If several contradict each other, leaving out any of them helps.
        fewer = replace(options, constraints=(*options.constraints[:i], *options.constraints[i + 1 :]))
        if least_infeasible(search_space(profiles, cluster, fewer).problems) is not None:
            culprits.append(f"'{text}'")
    drop = (
        f"{'drop' if len(culprits) < 2 else 'drop one of'} {', '.join(culprits)}" if culprits else "drop some of them"
    )
    stages = "" if options.num_stages is None else f" with `num_stages` {options.num_stages}"
    rules = ", ".join(f"'{text}'" for text in options.constraints)
    return f"no plan{stages} keeps the constraints {rules}: {drop}, or allow more stages or devices"


def _device_texts(problem: Problem, layout: Layout, shortfall: Mapping[int, int], names: Sequence[str]) -> list[str]:
    """Returns a text for each of the devices that lack most: the bytes that they need and have, and their layers."""
    limits = {rank: cls.limit_bytes for cls in problem.classes for rank in cls.ranks}
    layers_of: dict[int, list[str]] = {rank: [] for rank in shortfall}
    ranks_of_stage = problem.ranks(layout.placements)
    for ranks, (begin, end), recompute in zip(ranks_of_stage, pairwise(layout.cuts), layout.recompute, strict=True):
        for rank in ranks:
            text = f"'{names[begin]}' to '{names[end - 1]}'"
            layers_of[rank].append(f"{text} ({_recomputed(recompute, end - begin)})" if recompute else text)
    lacking = sorted((rank for rank, short in shortfall.items() if short > 0), key=lambda rank: -shortfall[rank])
    texts = [
        f"{problem.cluster.devices[rank].name} needs {limits[rank] + shortfall[rank]:,} bytes for "
        f"{' and '.join(layers_of[rank])} and has {limits[rank]:,} ({shortfall[rank]:,} bytes short)"
        for rank in lacking
    ]
    return and_others(texts, "devices lack memory, too")


def _recomputed(layers: frozenset[int], num_layers: int) -> str:
    return "recomputed" if len(layers) == num_layers else f"{len(layers)} of {num_layers} layers recomputed"


def _advice(
    profiles: ProfilesByKind,
    cluster: Cluster,
    options: PlanOptions,
    shortfall: Mapping[int, int],
    deadline: Deadline,
    microbatch_size: int,
) -> str:
    """Returns how lifting each restriction of the options by itself would help, as far as time allows."""
    changes = {}
    if not options.recompute:
        changes["recomputation"] = replace(options, recompute=True)
    if not options.replicas:
        changes["stages on several devices"] = replace(options, replicas=True)
    if options.num_stages is not None:
        changes["another number of stages"] = replace(options, num_stages=None)
    if options.microbatch_size is not None:
        changes["other micro-batch sizes"] = replace(options, microbatch_size=None)
    effects = []
    for name, changed in changes.items():
        try:
            closest = least_infeasible(search_space(profiles, cluster, changed, deadline).problems, deadline)
        except BapipeError:
            continue
        short = closest.worst_bytes if closest else INF
        if short < max(shortfall.values()):
            effects.append(f"with {name} {'it would fit' if short <= 0 else f'{short:,} bytes would be lacking'}")
    text = f"{'; '.join(effects)}. " if effects else ""
    layers = next(iter(profiles.values())).layers
    return f"{text[:1].upper()}{text[1:]}{what_to_try(layers, options.limits(cluster), microbatch_size)}"
