"""Tables and pictures of plans, profiles, clusters, timelines and runs.

Nothing here prints: `render_*` functions yield tables of rich and lines of text, `*_json` functions return plain
values, and the others return strings or bytes. The command line writes them.

- `formatting`: numbers, units and empty tables.
- `plans`, `profiles`, `profile_diff`, `comparisons`, `runs`: one subject each, as tables and as JSON.
- `remarks`: what else a reader of a plan should know.
- `plan_changes`: the differences between two plans. `idle_time`: why devices are idle.
- `text_gantt`: a timeline drawn as text.
- `chrome_trace`: timelines written as a trace for Perfetto, and read back.
- `layer_diagram`: the layers of a model with the tensors alive between them.
"""

from bapipe.report.chrome_trace import encode_trace
from bapipe.report.comparisons import comparison_json, render_comparison
from bapipe.report.formatting import empty_table, fit_table, html_text, mib, ms, rows_below
from bapipe.report.plans import pareto_table, plan_json, render_plan
from bapipe.report.profiles import render_cluster, render_profile
from bapipe.report.runs import evaluation_words, render_run, run_json
from bapipe.report.text_gantt import PHASE_NAMES, gantt
from bapipe.report.variations import variations_table, worth_words
from bapipe.units import number, number_down

__all__ = [
    "PHASE_NAMES",
    "comparison_json",
    "empty_table",
    "encode_trace",
    "evaluation_words",
    "fit_table",
    "gantt",
    "html_text",
    "mib",
    "ms",
    "number",
    "number_down",
    "pareto_table",
    "plan_json",
    "render_cluster",
    "render_comparison",
    "render_plan",
    "render_profile",
    "render_run",
    "rows_below",
    "run_json",
    "variations_table",
    "worth_words",
]
