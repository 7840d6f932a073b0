"""`bapipe.simulate`: a plan's predicted timeline, its profiles given in any form."""

from bapipe.formats.plan import Plan, check_plan
from bapipe.planner.inputs.profiles import Profiles, by_kind
from bapipe.planner.inputs.validation import check_figures
from bapipe.simulator.simulate import simulate as simulate_by_kind
from bapipe.simulator.timeline import Timeline


def simulate(plan: Plan, profiles: Profiles) -> Timeline:
    """Returns the predicted timeline of one step of a plan; see `bapipe.simulator.simulate`.

    Raises:
        BapipeError: as there; or figures of the profiles or of the plan's cluster with which a step would take years.
    """
    check_plan(plan)
    of_kind = by_kind(profiles)
    check_figures(of_kind, plan.cluster, plan.minibatch_size)
    return simulate_by_kind(plan, of_kind)
