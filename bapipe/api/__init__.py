"""What users and the command line call: profile a model, plan it, judge the plan, run it."""

from bapipe.api.comparing import Comparison, compare
from bapipe.api.given import ASSUMED_LINK, Tell, alike, by_kind, local_cluster, probed_cluster
from bapipe.api.planning import certify, decide, explain, kept_plan, pareto, plan, simulate, unit_timeline
from bapipe.api.profiling import kept_profile, profile, profile_model
from bapipe.api.running import export, run
from bapipe.api.threads import fewest_threads, used, ways

__all__ = [
    "ASSUMED_LINK",
    "Comparison",
    "Tell",
    "alike",
    "by_kind",
    "certify",
    "compare",
    "decide",
    "explain",
    "export",
    "fewest_threads",
    "kept_plan",
    "kept_profile",
    "local_cluster",
    "pareto",
    "plan",
    "probed_cluster",
    "profile",
    "profile_model",
    "run",
    "simulate",
    "unit_timeline",
    "used",
    "ways",
]
