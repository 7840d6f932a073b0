"""What people look at: tables of plans and profiles, a text Gantt chart, a trace for Perfetto."""

from bapipe.report.comparisons import comparison_json, comparison_parts
from bapipe.report.formatting import empty_table, mib, ms, number
from bapipe.report.plans import pareto_table, plan_json, plan_parts
from bapipe.report.profiles import cluster_parts, profile_parts
from bapipe.report.runs import evaluation_words, outcome_json, outcome_parts
from bapipe.report.text_gantt import NAME, gantt, trace

__all__ = [
    "NAME",
    "cluster_parts",
    "comparison_json",
    "comparison_parts",
    "empty_table",
    "evaluation_words",
    "gantt",
    "mib",
    "ms",
    "number",
    "outcome_json",
    "outcome_parts",
    "pareto_table",
    "plan_json",
    "plan_parts",
    "profile_parts",
    "trace",
]
