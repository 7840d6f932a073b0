"""The command lines that make the plan of a page."""

import shlex

from bapipe.explorer.state import State
from bapipe.formats.cluster import Cluster
from bapipe.formats.plan import Plan
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.results.decision import Decision, decision_of


def command_lines(
    decision: Decision, state: State, given: Cluster, source: tuple[str, ...], start: Plan | None
) -> list[str]:
    """Returns the commands that make the plan of a state; none if no command can.

    They cannot if the cluster was changed, if the layers are in another order than those of the plan to begin with, or
    if the order of the actions is not that of a named schedule: such a plan is downloaded instead.

    Args:
        given: the cluster that the page was opened with.
        source: the arguments that the page was opened with: what `bapipe edit` takes with a plan to begin with, else
            what `bapipe plan` takes.
        start: the plan that the page began with, if it did with one.
    """
    if not source or decision.own_table is not None or not _has_given_cluster(state, given):
        return []
    before = None if start is None else decision_of(start)
    if before is not None and before.layers != decision.layers:
        return []
    edit = ["bapipe", "edit", *(source if start is not None else ["plan.json"])]
    if before is None or before.cuts != decision.cuts:
        edit += [word for begin in decision.cuts for word in ("--cut", decision.layers[begin])] or ["--no-cuts"]
    for name in ("schedule", "minibatch_size", "microbatch_size"):
        if before is None or getattr(before, name) != getattr(decision, name):
            edit += [f"--{name.replace('_', '-')}", str(getattr(decision, name))]
    if before is None or before.devices != decision.devices:
        edit += [w for s, group in enumerate(decision.devices) for w in ("--place", f"stage {s} on {','.join(group)}")]
    # What other cuts, devices and schedules leave of recomputation is not told apart here: it is said of every stage.
    if before is None or (before.stages != decision.stages and any(before.recompute + decision.recompute)):
        edit += [word for s, stage in enumerate(decision.stages) for word in _recomputation(s, stage)]
    first = [["bapipe", "plan", *source, "-o", "plan.json"]] if start is None else []
    return [shlex.join(words) for words in (*first, [*edit, "-o", "mine.json"])]


def _recomputation(s: int, stage: StagePlan) -> list[str]:
    """Returns the options that give a stage its recomputed layers, whatever it recomputes before."""
    if stage.recomputed == stage.layers:
        return ["--recompute", str(s)]
    return ["--keep", str(s), *(word for name in stage.recomputed for word in ("--recompute-layer", name))]


def _has_given_cluster(state: State, given: Cluster) -> bool:
    same_links = state.bandwidth == 1 and state.latency == 1
    return same_links and not state.speeds and not state.memory_bytes and state.num_devices == len(given.devices)
