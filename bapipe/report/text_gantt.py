"""Draws a timeline as a Gantt chart of text."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from bapipe.printable import counted, printable
from bapipe.report.formatting import folded, ms
from bapipe.schedules.table import Phase
from bapipe.simulator.timeline import Span, Timeline, Update

FILL = {Phase.FORWARD: "░", Phase.BACKWARD: "▓", Phase.INPUT_GRAD: "▒", Phase.WEIGHT_GRAD: "█"}

PHASE_NAMES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.INPUT_GRAD: "input gradient",
    Phase.WEIGHT_GRAD: "weight gradient",
}

UPDATE = "u"

MAX_NAME = 40
"""Longest name of a device that is shown whole."""


def gantt(timeline: Timeline, width: int) -> str:
    """Returns a line of about `width` characters for each rank with a stage, to scale; of very many not for all.

    A rank that runs forward and backward at the same time has a line for each.
    Every action begins with the number of its micro-batch if it fits: ░ F, ▓ B, ▒ I, █ W, u update.
    """
    working = {span.rank for span in timeline.spans}
    names = {rank: printable(timeline.devices[rank], MAX_NAME) for rank in working}
    margin = max(map(len, names.values()), default=0)
    num_columns = max(width - margin - 1, 10)
    updates: defaultdict[int, list[Update]] = defaultdict(list)
    for update in timeline.updates:
        updates[update.rank].append(update)
    lines, step_ns = [], timeline.step_ns
    first, num_left_out, last = folded(sorted(working))
    for rank in [*first, *last]:
        if num_left_out and rank == last[0]:
            lines.append(f"{'…':>{margin}} {counted(num_left_out, 'more device')}")
        lanes = timeline.lanes(rank)
        for lane, text in enumerate(_lane_lines(lanes, updates[rank], max(step_ns, 1), num_columns)):
            device = "" if lane else names[rank]
            lines.append(f"{device:>{margin}} {text}")
    phases = {span.action.phase for span in timeline.spans}
    legend = "  ".join(f"{FILL[phase]} {PHASE_NAMES[phase]}" for phase in Phase if phase in phases)
    return "\n".join([*lines, f"{'':>{margin}} {legend}  {UPDATE} update  (0 to {ms(step_ns)})"])


def _lane_lines(
    lanes: Iterable[Sequence[Span]], updates: Sequence[Update], step_ns: int, num_columns: int
) -> list[str]:
    """Returns the lines of one rank: one, or two if it runs forward and backward at the same time."""

    def paint(line: list[str], start_ns: int, end_ns: int, fill: str, label: str) -> None:
        start, stop = start_ns * num_columns // step_ns, end_ns * num_columns // step_ns
        # A label needs one character of fill after it, so that it does not run into the next label.
        text = label if len(label) < stop - start or len(label) == stop - start == 1 else ""
        line[start:stop] = (text + fill * (stop - start - len(text)))[: stop - start]

    lines = []
    for spans in lanes:
        line = [" "] * num_columns
        for span in spans:
            paint(line, span.start_ns, span.end_ns, FILL[span.action.phase], str(span.action.microbatch))
        for update in updates:
            paint(line, update.start_ns, update.end_ns, UPDATE, "")
        lines.append("".join(line).rstrip())
    return lines
