"""The plan with the least memory, the fewest devices, or the most copies of a block, by searches for the shortest step.

Each of the three asks for the first of some problems, from the most wanted to the easiest, that has a plan which is
fast enough: under rising memory limits, on more devices, with fewer copies. The search for the shortest step answers
for one problem: its plan is fast enough, or its lower bound says that none is. A plan for one problem is one for every
easier problem, so bisection finds the first. (Of many unlike devices not all orders are searched, so that a plan on
fewer of them may be none of those searched for more: then fewer devices are asked about, each number by itself.)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from itertools import takewhile
from math import floor

import msgspec

from bapipe.errors import BapipeError, Infeasible
from bapipe.formats.certificate import ReachedGoal
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Alternative, Plan, with_certificate
from bapipe.planner.baselines import compared_with
from bapipe.planner.compute.deadline import Deadline
from bapipe.planner.goal_question import ANY_NS, NUM_SHARES, Answer, Question, Search, has_same_plans, proven_ns
from bapipe.planner.inputs.device_grouping import Grouping, groupings
from bapipe.planner.inputs.goal import Goal
from bapipe.planner.inputs.options import SEARCH, PlanOptions, limit_that_leaves
from bapipe.planner.inputs.profiles import Profiles, by_kind, listed
from bapipe.planner.inputs.repeat_block import block_layers, repeat_block
from bapipe.planner.inputs.sub_clusters import SubClusters, sub_clusters, with_devices
from bapipe.planner.inputs.validation import names_looped
from bapipe.planner.results.searched_space import ChosenDevicesSpace, is_of_action_orders, left_out
from bapipe.planner.results.solution import Solution, make_plan, sort_alternatives
from bapipe.progress import SearchProgress
from bapipe.units import decimal

MAX_LAYERS = 2_000
"""Maximum number of layers of a model with copies of a block: a search of as many takes seconds."""


def reach_goal(
    profiles: Profiles,
    cluster: Cluster,
    options: PlanOptions,
    goal: Goal,
    *,
    search: Search,
    deadline: Deadline,
    progress: SearchProgress | None = None,
) -> Plan:
    """Returns the plan that reaches a goal, with what is proven about it as the `goal` of its certificate.

    Args:
        search: the search for the shortest step.
        deadline: ends it with the best plan so far.

    Raises:
        Infeasible: nothing fits in memory, or nothing is fast enough.
        OutOfTime: the deadline passed before any plan was found that fits and is fast enough.
        BapipeError: as the search for the shortest step; and options that do not go with the goal.
    """
    if goal.least == "devices":
        grouping = _only_grouping(profiles, cluster, options)
        profiles, cluster, options = grouping.profiles, grouping.cluster, replace(options, group=None)
    if goal.largest is not None:
        for profile in listed(profiles):
            repeat_block(profile, goal.largest, 2)  # raises BapipeError before anything is searched
    progress = progress or _ignore
    question = Question(
        profiles=profiles, cluster=cluster, options=options, search=search, deadline=deadline, progress=progress
    )
    fastest = search(profiles, cluster, options, deadline.share(NUM_SHARES), progress)
    space = fastest.space if goal.least == "memory" else None
    question = replace(question, limit_ns=_limit_ns(goal, fastest), space=space)
    if fastest.objective_ns > question.limit_ns:
        raise _too_slow(goal, fastest, question)
    if goal.least == "memory":
        return _least_memory(question, fastest)
    if goal.least == "devices":
        return _fewest_devices(question, fastest)
    assert goal.largest is not None
    return _most_copies(question, fastest, goal.largest)


def first_with_plan(
    wanted: Sequence[int],
    known: Solution,
    ask: Callable[[int], Answer],
    value_of: Callable[[Solution, int], int],
    *,
    first_stride: int,
) -> tuple[Solution, int, int]:
    """Returns the plan for the most wanted of some problems that has one; its number; and the first one not refuted.

    Args:
        wanted: the numbers of the problems, from the most wanted to the easiest; a plan for one is one for all easier.
        known: a plan for the easiest.
        value_of: the most wanted problem that a plan, found for some problem, is a plan for.
        first_stride: how many problems lie between the first that is asked and that of the known plan. It doubles as
            long as there are plans.
    """
    best, best_at = known, wanted.index(value_of(known, wanted[-1]))
    untried = not_refuted = 0
    stride = first_stride
    while untried < best_at:
        at = max(untried, best_at - stride)
        answer = ask(wanted[at])
        if answer.solution is not None:
            best, best_at = answer.solution, min(at, wanted.index(value_of(answer.solution, wanted[at])))
            stride = max(1, min(2 * stride, (best_at - untried) // 2))
            continue
        untried = at + 1
        not_refuted = untried if answer.is_refuted else not_refuted
        stride = 1  # the best so far may be the first, and what is left then needs one more proof only
    return best, wanted[best_at], wanted[not_refuted]


def _least_memory(question: Question, fastest: Solution) -> Plan:
    def within(num_bytes: int) -> Question:
        limit = limit_that_leaves(num_bytes, question.options.memory_margin)
        return replace(question, options=replace(question.options, memory_limit_bytes=limit))

    def ask(num_bytes: int) -> Answer:
        return within(num_bytes).ask()

    def ask_for_any(num_bytes: int) -> Answer:
        return replace(within(num_bytes), limit_ns=ANY_NS).ask()

    def least(known: Solution, ask: Callable[[int], Answer]) -> tuple[Solution, int, int]:
        peak = known.prediction.peak_bytes
        return first_with_plan(
            range(peak + 1), known, ask, lambda found, _: found.prediction.peak_bytes, first_stride=max(1, peak // 2)
        )

    best, limit, bound = least(fastest, ask)
    if question.limit_ns < ANY_NS and not _is_monotone(question):  # then it is known what any plan needs, however slow
        _, _, bound = least(best, ask_for_any)
    best = within(limit).fastest(best)
    # Alternatives, and the bound if it is of the same space, are of the devices' own memory, not only of what the plan
    # was searched in.
    alternatives = _with_fastest(best, fastest, fastest.alternatives)
    best = replace(best, alternatives=compared_with(alternatives, best.prediction))
    if has_same_plans(best.space, fastest.space) and not is_of_action_orders(best.space):
        best = replace(best, lower_bound_ns=min(best.objective_ns, fastest.lower_bound_ns), space=fastest.space)
    # The fastest plan within the limit may need less than the one that was found to fit there.
    reached = ReachedGoal(quantity="memory", value=best.prediction.peak_bytes, bound=bound)
    return _with_goal(best, question, reached)


def _is_monotone(question: Question) -> bool:
    """Returns whether no plan is faster under less memory, where more stages recompute.

    Where actions and transfers wait for one another in the order in which they become ready, a step may get shorter
    because one of them takes longer (Graham 1969, Bounds on Multiprocessing Timing Anomalies).
    """
    if not question.options.recompute:
        return True
    return not names_looped(question.options) and all(device.overlaps_transfers for device in question.cluster.devices)


def _with_fastest(best: Solution, fastest: Solution, others: tuple[Alternative, ...]) -> tuple[Alternative, ...]:
    """Returns alternatives and the fastest plan, if it is another one: it shows what the saving costs."""
    if fastest.stages == best.stages and fastest.prediction.step_ns == best.prediction.step_ns:
        return others
    step_ns, num_devices = fastest.prediction.step_ns, len(fastest.used_ranks)
    on = f", on {num_devices} device{'s' * (num_devices > 1)}" if num_devices != len(best.used_ranks) else ""
    itself = Alternative(
        name="fastest",
        step_ns=step_ns,
        peak_bytes=fastest.prediction.peak_bytes,
        feasible=True,
        why_not=f"{1 - step_ns / max(best.prediction.step_ns, 1):.1%} faster{on}",
    )
    return sort_alternatives((itself, *others))


def _fewest_devices(question: Question, fastest: Solution) -> Plan:
    from bapipe.planner.stages.devices import ns_per_sample  # loads numpy

    times_ns = ns_per_sample(by_kind(question.profiles), question.cluster)
    num_devices = len(question.cluster.devices)
    in_order = not _any_order_counts(question, question.cluster)
    choices = cache(partial(sub_clusters, question.cluster, ns_per_sample=times_ns, in_order=in_order))

    @cache
    def ask(num_devices: int) -> Answer:
        is_refuted = True
        for part in choices(num_devices).clusters:
            answer = replace(question, cluster=part).ask()
            if answer.solution is not None:
                return answer
            is_refuted = is_refuted and answer.is_refuted
        return Answer(is_refuted=is_refuted)

    numbers = range(_fewest_for_stages(question.options), num_devices + 1)
    covering = num_devices
    if in_order:
        covered = takewhile(lambda number: _covers_fewer(question, choices(number).clusters), numbers)
        covering = max(covered, default=numbers[0] - 1)
    best, value, bound = fewest_with_plan(numbers, covering, fastest, ask)
    best = _fastest_on_any(question, choices(value), best)
    best = replace(best, alternatives=_with_fastest(best, fastest, best.alternatives))
    refuted = range(max(numbers[0], min(covering, bound - 1)), bound)  # each by itself, the first one with all fewer
    has_all = all(choices(number).has_all for number in refuted)
    value = len(best.used_ranks)  # what could not be decided before may be found now
    reached = ReachedGoal(
        quantity="devices", value=value, bound=min(bound, value), of="" if has_all else "the fastest devices"
    )
    return _with_goal(best, question, reached)


def _any_order_counts(question: Question, cluster: Cluster) -> bool:
    """Returns whether plans may take devices in any order: they are alike, or few enough to try all orders."""
    from bapipe.planner.branch_and_bound.space import tries_all_orders  # these load numpy
    from bapipe.planner.throughput.load_search import is_homogeneous
    from bapipe.planner.throughput.orders import searches_all_orders

    if is_homogeneous(cluster, question.options.limits(cluster)):
        return True
    has_all = tries_all_orders if question.options.objective == "step" else searches_all_orders
    return has_all(by_kind(question.profiles), cluster, question.options)


def _covers_fewer(question: Question, clusters: Sequence[Cluster]) -> bool:
    """Returns whether what is searched for some devices has every plan that is searched for fewer of them.

    Of many unlike devices stages take those of some orders, of few any in any order: those of fewer may be others.
    """
    return all(_any_order_counts(question, cluster) for cluster in clusters)


def fewest_with_plan(
    numbers: range, covering: int, known: Solution, ask: Callable[[int], Answer]
) -> tuple[Solution, int, int]:
    """Returns a plan on the fewest devices; their number; and the first number of devices that is not refuted.

    Args:
        numbers: of devices that may have a plan.
        covering: up to so many devices each number is refuted with all fewer ones, above each by itself.
        known: a plan on any of the devices.
    """

    def first(most: int, known: Solution) -> tuple[Solution, int, int]:
        wanted, stride = range(numbers[0], most + 1), max(1, most // 2)
        return first_with_plan(wanted, known, ask, lambda found, _: len(found.used_ranks), first_stride=stride)

    best, value, bound = first(numbers[-1], known)
    if value <= covering:
        return best, value, bound
    of_covering = ask(covering) if covering in numbers else Answer()
    if of_covering.solution is not None:
        return first(covering, of_covering.solution)
    for number in range(covering + 1 if of_covering.is_refuted else numbers[0], value):
        answer = ask(number)
        if answer.solution is not None:
            return answer.solution, len(answer.solution.used_ranks), number
        if not answer.is_refuted:
            return best, value, number
    return best, value, value


def _fastest_on_any(question: Question, choices: SubClusters, known: Solution) -> Solution:
    """Returns the fastest plan on any of some choices of devices, at least as fast as a known one.

    The devices of the known plan are searched first, with half of the time. The bound is of all choices, or of the
    plan's own devices if nothing is proven of the others.
    """
    used = with_devices(known.cluster, known.used_ranks)
    is_only_choice = choices.has_all and len(choices.clusters) == 1
    others = [] if is_only_choice else [part for part in choices.clusters if part != used]
    first = question.deadline.share(2) if others else question.deadline
    best = replace(question, cluster=used, deadline=first).fastest(known)
    found, bounds_ns = [best], [proven_ns(best)]
    with_others = [replace(question, cluster=part) for part in others]
    possible = [each for each in with_others if each.least_ns < best.objective_ns]
    for number, each in enumerate(possible):
        share = question.deadline.share(len(possible) - number)
        faster, bound_ns = replace(each, deadline=share).faster_than(best.objective_ns)
        bounds_ns.append(bound_ns)
        if faster is not None:
            found.append(faster)
            best = min(best, faster, key=lambda one: one.objective_ns)
    bound_ns = min(bounds_ns)
    if is_of_action_orders(best.space) or not bound_ns or is_only_choice:
        return best
    space = ChosenDevicesSpace(
        num_chosen=len(used.devices),
        num_devices=len(question.cluster.devices),
        num_choices=len(choices.clusters) if choices.has_all else None,
        left_out=tuple(dict.fromkeys(words for each in found for words in left_out(each.space))),
        of_best=best.space,
    )
    return replace(best, lower_bound_ns=min(best.objective_ns, bound_ns), space=space)


def _fewest_for_stages(options: PlanOptions) -> int:
    """Returns a number of devices that stages need in any case: one each, or one for two of a looped schedule."""
    return -(-(options.num_stages or 1) // (2 if names_looped(options) else 1))


def _most_copies(question: Question, fastest: Solution, block: str) -> Plan:
    profiles = listed(question.profiles)
    num_layers, num_in_block = len(profiles[0].layers), len(block_layers(profiles[0], block))
    most = max(1, 1 + (MAX_LAYERS - num_layers) // num_in_block)

    def with_copies(copies: int) -> Question:
        return replace(question, profiles=tuple(repeat_block(profile, block, copies) for profile in profiles))

    def ask(copies: int) -> Answer:
        return with_copies(copies).ask()

    best, value, bound = first_with_plan(range(most, 0, -1), fastest, ask, lambda _, copies: copies, first_stride=1)
    best = with_copies(value).fastest(best) if value > 1 else best
    reached = ReachedGoal(
        quantity="copies",
        value=value,
        bound=0 if bound == most else bound,
        of=block,
        max_layers=MAX_LAYERS if value == most else msgspec.UNSET,
    )
    return _with_goal(best, question, reached)


def _with_goal(best: Solution, question: Question, reached: ReachedGoal) -> Plan:
    if question.limit_ns < ANY_NS:
        reached = msgspec.structs.replace(reached, limit_ns=question.limit_ns)
    plan = make_plan(best)
    return with_certificate(plan, msgspec.structs.replace(plan.certificate, goal=reached))


def _limit_ns(goal: Goal, fastest: Solution) -> int:
    """Returns the longest step, or the largest load, that is fast enough."""
    if goal.within is not None:
        return min(ANY_NS, floor(fastest.objective_ns * (1 + decimal(goal.within))))
    if goal.min_throughput is not None:
        limit_ns = floor(fastest.minibatch_size * 10**9 / Fraction(goal.min_throughput))
        if limit_ns >= ANY_NS:
            return ANY_NS
        # A nanosecond more may still be what a plan shows as this throughput, which is rounded.
        return limit_ns + (fastest.minibatch_size * 1e9 / (limit_ns + 1) >= goal.min_throughput)
    return ANY_NS


def _too_slow(goal: Goal, fastest: Solution, question: Question) -> Infeasible:
    num_samples, best_ns, bound_ns = fastest.minibatch_size * 1e9, fastest.objective_ns, fastest.bound_of_all_ns
    rate, most = (num_samples / max(ns, 1) for ns in (best_ns, bound_ns))
    most *= 1 + 5e-6  # so that six digits do not round it down
    message = (
        f"no plan was found that reaches `min_throughput` {goal.min_throughput:g} samples/s: the fastest has {rate:.6g}"
    )
    # The bound may be of the stages of one plan, or of the named schedules only.
    if SEARCH in question.options.schedules:
        return Infeasible(f"{message}; ask for less, or plan for more devices", is_proven=False)
    if bound_ns == best_ns:
        most_of_all = "which is proven to be the most of the plans searched"
        return Infeasible(f"{message}, {most_of_all}; ask for less, or plan for more devices")
    return Infeasible(
        f"{message}, and none has more than {most:.6g}; ask for less, or {question.deadline.advice}",
        is_proven=bound_ns > question.limit_ns,
    )


def _only_grouping(profiles: Profiles, cluster: Cluster, options: PlanOptions) -> Grouping:
    """Returns the only grouping of the devices.

    Raises:
        BapipeError: there are several, or constraints name devices.
    """
    possible = groupings(profiles, cluster, options.group)
    if len(possible) > 1:
        has_groups = any(device.num_members > 1 for each in possible for device in each.cluster.devices)
        raise BapipeError(
            f"`least` devices counts devices of one size, and the profiles are of {len(possible)} "
            f"({'; '.join(each.name for each in possible)}): give one profile of each kind{', or `group`' * has_groups}"
        )
    for text in options.constraints:
        if " on " in text:
            raise BapipeError(f"`least` devices chooses the devices: leave out `constraints` '{text}'")
    return possible[0]


def _ignore(num_simulated: int, best_ns: int, bound_ns: int) -> None:
    """Reports no progress."""
