"""When nothing fits: the least infeasible plan, the shortfall of each of its devices, and what would help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.partition_space import disagree_at_cuts
from bapipe.planner.branch_and_bound.problem import Layout, Problem, Root, SearchResult
from bapipe.planner.branch_and_bound.space import search_space, tries_all_orders, tries_any_order
from bapipe.planner.compute.deadline import UNLIMITED, Deadline
from bapipe.planner.inputs.options import PlanOptions
from bapipe.planner.inputs.validation import microbatch_sizes, names_looped
from bapipe.planner.stages.device_orders import device_orders
from bapipe.planner.stages.intervals import INF, IntArray
from bapipe.planner.stages.placements import StagePlacement, in_postorder
from bapipe.printable import and_others

TRY = "Try more devices, smaller micro-batches, or a smaller mini-batch"


Closest = tuple[Problem, Layout, dict[int, int]]
"""A layout of a problem, and the bytes that each rank in use lacks; negative if it fits."""


def fitting_layout(closest: Closest | None) -> SearchResult | None:
    """Returns the layout with the smallest shortfall as a result if it fits; its bound is not proven and so nothing."""
    if closest is None or max(closest[2].values()) > 0:
        return None
    problem, layout, _ = closest
    return SearchResult(problem=problem, layout=layout, step_ns=problem.step_ns(layout), lower_bound_ns=0)


def least_infeasible(problems: Sequence[Problem], deadline: Deadline = UNLIMITED) -> Closest | None:
    """Returns the layout with the smallest shortfall of its worst device, and the shortfall of each device in bytes.

    Each stage is taken alone, as the search does. None if constraints leave no layout. O(placements * boundaries**2)
    per problem.

    Raises:
        OutOfTime: the deadline passed before.
    """
    best: tuple[int, Problem, Layout, dict[int, int]] | None = None
    for problem in problems:
        # The roots of a problem have placements in common, which one programme solves once.
        shortfalls = _ShortfallDP(problem, deadline)
        for root in problem.roots:
            layout = shortfalls.best_layout(root)
            if layout is None:
                continue
            # `Problem.layout` recomputes nothing in a stage that never fits, although that may reduce its shortfall.
            layout = _recompute_if_better(problem, layout)
            shortfall = problem.shortfall_bytes(layout)
            if best is None or max(shortfall.values()) < best[0]:
                best = (max(shortfall.values()), problem, layout, shortfall)
    return None if best is None else best[1:]


def _recompute_if_better(problem: Problem, layout: Layout) -> Layout:
    """Returns the layout, which also recomputes stages that do not fit even so, if that reduces their shortfall."""
    if layout.fits or not problem.lower_bound.costs.memory.may_recompute:
        return layout
    nothing = (frozenset[int](),) * len(layout.placements)
    all_layers = tuple(frozenset(range(begin, end)) for begin, end in pairwise(layout.cuts))
    plain, recomputed = (
        problem.shortfall_bytes(replace(layout, recompute=recompute)) for recompute in (nothing, all_layers)
    )
    chosen = []
    for ranks, of_stage, whole in zip(problem.ranks(layout.placements), layout.recompute, all_layers, strict=True):
        # Replicas of a stage recompute together; the worst of them decides.
        worst = max(plain[rank] for rank in ranks)
        lacks_less = worst > 0 and max(recomputed[rank] for rank in ranks) < worst
        chosen.append(of_stage or (whole if lacks_less else of_stage))
    return replace(layout, recompute=tuple(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShortfallToGo:
    """For a placement, per boundary at which its stage begins: the optimum, and the choices that give it.

    Attributes:
        shortfall_bytes: the minimum over layouts of the maximum shortfall from here on. [boundaries]
        ends: where the stage then ends. [boundaries - 1]
        successors: the number of the placement that then follows. [boundaries - 1]
    """

    shortfall_bytes: IntArray
    ends: IntArray
    successors: IntArray


class _ShortfallDP:
    """Backward dynamic programme: the minimum over layouts of the maximum shortfall, per placement and boundary."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem, self.costs, self.deadline = problem, problem.lower_bound.costs, deadline
        self._solved: dict[StagePlacement, _ShortfallToGo] = {}

    def best_layout(self, root: Root) -> Layout | None:
        """Returns the layout with the minimum, None if all are forbidden."""
        placement = min(root.first_placements, key=lambda first: int(self._to_go(first).shortfall_bytes[0]))
        if self._to_go(placement).shortfall_bytes[0] >= INF:
            return None
        boundaries, placements = [0], [placement]
        while True:  # follow the choices that give the minimum
            to_go, begin = self._to_go(placements[-1]), boundaries[-1]
            boundaries.append(int(to_go.ends[begin]))
            if placements[-1].is_last:
                return self.problem.layout(boundaries, tuple(placements))
            placements.append(placements[-1].successors[int(to_go.successors[begin])])

    def _to_go(self, placement: StagePlacement) -> _ShortfallToGo:
        for other in in_postorder([placement], lambda each: each in self._solved):
            self.deadline.check()
            self._solved[other] = self._solve(other)
        return self._solved[placement]

    def _solve(self, placement: StagePlacement) -> _ShortfallToGo:
        intervals = self.costs.intervals
        following = np.full((1, intervals.num_boundaries), INF, dtype=np.int64)
        if placement.is_last:
            following[0, -1] = -INF  # no stage follows the last boundary
        elif placement.successors:  # else the devices that remain cannot make the stages that must follow
            following = np.array([self._solved[other].shortfall_bytes for other in placement.successors])
        # The choice of the successor depends on the end of the stage alone. [successors, boundaries] -> [boundaries]
        best_successor = np.argmin(following, axis=0)  # [boundaries]
        # Bottleneck programme: the worse of this stage and of what follows its end. [intervals]
        shortfall = np.maximum(self.costs.memory.shortfall_bytes(placement), following.min(axis=0)[intervals.ends])
        # The minimum over the ends of each begin; a row of the intervals starts with the end begin + 1.
        begins = range(intervals.num_boundaries - 1)
        ends = [int(np.argmin(shortfall[intervals.row(begin)])) + begin + 1 for begin in begins]
        return _ShortfallToGo(
            shortfall_bytes=intervals.every.min_per_begin(shortfall),
            ends=np.array(ends),
            successors=np.array([int(best_successor[end]) for end in ends]),
        )


def infeasible_error(
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    closest: Closest | None,
    deadline: Deadline,
    *,
    has_tried_all: bool,
) -> BapipeError:
    """Returns an error about the plan whose worst device lacks the fewest bytes, and what would help.

    If constraints leave no plan at all, it is about these.

    Args:
        has_tried_all: whether a search has tried all plans.
    """
    if closest is None:
        return ConstraintsUnmet(_contradiction(profiles, cluster, options))
    problem, layout, shortfall = closest
    names = [layer.name for layer in next(iter(profiles.values())).layers]
    num_stages = len(layout.placements)
    has_unlike_cuts = disagree_at_cuts(profiles, cluster, microbatch_sizes(profiles, cluster, options))
    most = " with the most bytes that any kind of device has at its cuts" if has_unlike_cuts else ""
    # What devices with several stages hold together is known of whole plans only, and not all of those were tried.
    is_proof = has_tried_all and not names_looped(options)
    tried, none_fits = _tried_devices(profiles, cluster, options), "fits" if is_proof else "was found that fits"
    return Infeasible(
        f"no plan{tried} {none_fits} in memory{most}; the closest is "
        f"{problem.schedule} with {num_stages} {'stage' if num_stages == 1 else 'stages'} and micro-batches of "
        f"{problem.microbatch_size}: "
        f"{'; '.join(_device_texts(problem, layout, shortfall, names))}. "
        f"{_advice(profiles, cluster, options, shortfall, deadline)}",
        is_proven=is_proof and not tried and not has_unlike_cuts,
    )


def _tried_devices(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> str:
    """Returns on which devices no plan fits, if not on any: others may."""
    if tries_all_orders(profiles, cluster, options):
        return ""
    if tries_any_order(profiles, cluster, options):
        return " on the devices in the orders that were tried, of too many to try all,"
    orders = [order.words for order in device_orders(profiles, cluster, options)]
    return f" on the first devices, {', or '.join(orders)}, of too many choices to try all,"


def _contradiction(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> str:
    """Returns which constraint to drop: any of those without which there is a plan."""
    culprits = []
    for i, text in enumerate(options.constraints):
        # Without one constraint at a time: several may contradict each other, and dropping any one of them helps.
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
    """Returns what the devices that lack most need, for which layers, and what they have."""
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
    profiles: Mapping[str, ModelProfile],
    cluster: Cluster,
    options: PlanOptions,
    shortfall: Mapping[int, int],
    deadline: Deadline,
) -> str:
    """Returns what would change without each of the options that restrict the search, as far as time allows."""
    # Each option alone, as the user would change it.
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
        short = max(closest[2].values()) if closest else INF
        if short < max(shortfall.values()):
            effects.append(f"with {name} {'it would fit' if short <= 0 else f'{short:,} bytes would be lacking'}")
    text = f"{'; '.join(effects)}. " if effects else ""
    return f"{text[:1].upper()}{text[1:]}{_too_large_layer(profiles, cluster, options) or TRY}"


def _too_large_layer(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> str:
    """Returns a sentence about the largest layer if it alone exceeds every memory limit, else nothing."""
    layers = next(iter(profiles.values())).layers
    # Activations are left out, so the sentence is certain.
    sizes = [layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in layers]
    num_bytes, max_limit = max(sizes), max(options.limits(cluster))
    largest = layers[sizes.index(num_bytes)]
    if num_bytes <= max_limit:
        return ""
    return (
        f"'{largest.name}' alone takes {num_bytes:,} bytes for its parameters, gradients and optimizer state, more "
        f"than any device may hold ({max_limit:,}): only devices with more memory, or smaller layers, would do"
    )
