"""A simulated step as the JSON that the page draws: columns of numbers rather than a record for each action."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat

from msgspec import UNSET

from bapipe.formats.cluster import Cluster
from bapipe.formats.prediction import Memory, Prediction
from bapipe.formats.profile import ModelProfile
from bapipe.planner.analysis.critical_path import critical_path, time_shares
from bapipe.report.idle_time import idle_ns_by_cause
from bapipe.report.layer_diagram import layer_rows
from bapipe.schedules.table import Action
from bapipe.simulator.interval_costs import cut_bytes
from bapipe.simulator.timeline import Span, SpanColumns, StepColumns, Timeline, Update

Json = dict[str, object]

MAX_SHARES = 4
"""How many parts of the critical path are named, the longest first."""


def timeline_json(step: StepColumns) -> Json:
    """Returns the actions of each rank, transfers, all-reduces and updates, each as columns; memory if it is known."""
    sources, targets, _, _, microbatches, starts_ns, ends_ns = step.transfers
    return {
        "spans": [_spans(spans) for spans in step.spans],
        "lanes": [spans.num_lanes for spans in step.spans],
        "transfers": {
            "source": sources,
            "target": targets,
            "microbatch": microbatches,
            "start": starts_ns,
            "end": ends_ns,
        },
        "updates": _columns(
            ("rank", "stage", "start", "end"), [(u.rank, u.stage, u.start_ns, u.end_ns) for u in step.updates]
        ),
        "syncs": _columns(
            ("stage", "bucket", "bytes", "start", "end"),
            [(s.stage, s.bucket, s.num_bytes, s.start_ns, s.end_ns) for s in step.syncs],
        ),
        "memory": [
            {"fixed": _fixed(peak), "stash": stashes, "workspace": workspaces}
            for peak, (stashes, workspaces) in zip(step.memory, step.usage, strict=False)
        ],
        "length": step.step_ns,
    }


def recorded_json(recorded: Iterable[tuple[str, Timeline]]) -> list[Json]:
    """Returns recorded steps with their titles."""
    return [{"title": title, "timeline": timeline_json(timeline.columns())} for title, timeline in recorded]


def _spans(spans: SpanColumns) -> Json:
    return {**_actions(spans.actions), "start": spans.starts_ns, "end": spans.ends_ns}


@lru_cache(maxsize=1024)
def _actions(actions: tuple[Action, ...]) -> Json:
    """Returns the actions of a rank; most changes of a plan leave their order as it is."""
    stages, phases, microbatches = zip(*actions, strict=True) if actions else ((),) * 3
    return {"stage": stages, "phase": "".join(phases), "microbatch": microbatches}


def _columns(names: Sequence[str], rows: Sequence[Sequence[object]]) -> Json:
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def _fixed(memory: Memory) -> int:
    """What a device holds all through the step."""
    return memory.total - memory.stash - memory.workspace


def step_json(prediction: Prediction, step: StepColumns, cluster: Cluster, bound: Json) -> Json:
    """Returns what the page shows of a step while a cut is dragged.

    Args:
        bound: a lower bound on the step of every plan.
    """
    return {
        "step": prediction.step_ns,
        "rate": prediction.samples_per_s,
        "bubble": prediction.bubble,
        "bound": bound,
        "ranks": ranks_json(prediction, cluster),
        "timeline": timeline_json(step),
    }


def explained(answer: Json, prediction: Prediction, timeline: Timeline, cluster: Cluster) -> Json:
    """Returns what the page shows of a step with the critical path and the causes of idle times."""
    return answer | {
        "ranks": ranks_json(prediction, cluster, idle_ns_by_cause(timeline)),
        "path": path_json(timeline),
    }


def path_json(timeline: Timeline) -> Json:
    """Returns the critical path: the times of its events by rank, and what it consists of."""
    events = critical_path(timeline)
    path = [(event.rank, event.start_ns, event.end_ns) for event in events if isinstance(event, Span | Update)]
    shares = time_shares(timeline, events)
    total_ns = sum(ns for _, ns in shares) or 1
    return {"events": path, "shares": [[name, ns / total_ns] for name, ns in shares[:MAX_SHARES]]}


def ranks_json(prediction: Prediction, cluster: Cluster, idle: Sequence[Mapping[str, int]] = ()) -> list[Json]:
    """Returns a row for each device: times, peak memory and its limit, and why it is idle if that is known."""
    return [
        {
            "device": device.name,
            "kind": device.kind,
            "host": device.host,
            "members": [] if device.members is UNSET else list(device.members),
            "speed": device.speed,
            "busy": rank.busy_ns,
            "sync": rank.sync_ns,
            "idle": rank.idle_ns,
            "causes": causes,
            "peak": rank.peak_bytes,
            "limit": device.memory_bytes,
        }
        for device, rank, causes in zip(cluster.devices, prediction.ranks, idle or repeat({}), strict=False)
    ]


def model_json(profile: ModelProfile) -> Json:
    """Returns the layers of a model with the tensors between them: what its profiles have in common."""
    rows = layer_rows(profile)
    return {
        "model": profile.model,
        "layers": [{"name": row.layer.name, "kind": row.layer.kind} for row in rows],
        "rails": _rails([row.rails for row in rows]),
    }


def _rails(rails: Sequence[Sequence[str | None]]) -> list[tuple[int, int, int]]:
    """Returns for each tensor its rail, the layer that makes it, and the layer that uses it last."""
    begun: dict[tuple[int, str], int] = {}
    found = []
    for row, tensors in enumerate([*rails, ()]):
        alive = {(rail, tensor) for rail, tensor in enumerate(tensors) if tensor is not None}
        found += [(key[0], begun.pop(key), row) for key in sorted(set(begun) - alive)]
        begun |= dict.fromkeys(alive - set(begun), row)
    return found


def layers_json(profile: ModelProfile, microbatch_size: int) -> Json:
    """Returns times and bytes of every layer at a micro-batch size, and the bytes that each cut would send."""
    measured = profile.at(microbatch_size)
    send, _ = cut_bytes(profile, microbatch_size)
    return {
        "F": [m.forward_ns for m in measured],
        "I": [m.input_grad_ns for m in measured],
        "W": [m.weight_grad_ns for m in measured],
        "stash": [m.stash_bytes for m in measured],
        "params": [layer.param_bytes for layer in profile.layers],
        "cut": send.tolist(),
        "measured": microbatch_size in profile.microbatch_sizes,
    }
