"""What people look at: tables of plans and profiles, a text Gantt chart, a trace for Perfetto."""

from bapipe.report.comparisons import comparison_json, render_comparison
from bapipe.report.formatting import empty_table, mib, ms, number
from bapipe.report.plans import pareto_table, plan_json, render_plan
from bapipe.report.profiles import render_cluster, render_profile
from bapipe.report.runs import evaluation_words, render_run, run_json
from bapipe.report.text_gantt import PHASE_NAMES, encode_trace, gantt

__all__ = [
    "PHASE_NAMES",
    "comparison_json",
    "empty_table",
    "encode_trace",
    "evaluation_words",
    "gantt",
    "mib",
    "ms",
    "number",
    "pareto_table",
    "plan_json",
    "render_cluster",
    "render_comparison",
    "render_plan",
    "render_profile",
    "render_run",
    "run_json",
]
