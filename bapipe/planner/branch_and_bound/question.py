"""The problems that options ask to solve."""

from collections.abc import Mapping

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.space import Space, space
from bapipe.planner.constraints import check_constraints, parse_constraints
from bapipe.planner.options import PlanOptions
from bapipe.planner.validation import microbatch_sizes, named_schedules


def space_of(profiles: Mapping[str, ModelProfile], cluster: Cluster, options: PlanOptions) -> Space:
    """Returns the problems to solve.

    Raises:
        BapipeError: constraints that cannot be met, or a number of stages that there cannot be.
    """
    rules = parse_constraints(options.constraints)
    check_constraints(rules, next(iter(profiles.values())), cluster)
    made = space(
        profiles,
        cluster,
        minibatch_size=options.minibatch_size,
        sizes=microbatch_sizes(profiles, cluster, options),
        schedules=named_schedules(options),
        limits=options.limits(cluster),
        num_stages=options.num_stages,
        replicas=options.replicas,
        recompute=options.recompute,
        constraints=rules,
    )
    if not any(problem.starts for problem in made.problems):
        asked = "any number of" if options.num_stages is None else options.num_stages
        num_layers = len(next(iter(profiles.values())).layers)
        raise BapipeError(
            f"{asked} stages asked for; {len(cluster.devices)} devices, {num_layers} layers and "
            f"{', '.join(named_schedules(options))} allow {', '.join(map(str, made.stage_counts)) or 'none'}"
            f"{f' where {options.in_words}' if options.constraints else ''}"
        )
    return made
