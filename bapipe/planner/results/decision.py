"""What a plan decides, apart from what follows from it; and the step that follows, by the simulator."""

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import msgspec

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.layer_profile import LayerProfile
from bapipe.formats.plan import Plan
from bapipe.formats.profile import ProfilesByKind
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.inputs.validation import check_num_forwards
from bapipe.schedules.placement import place_schedule
from bapipe.schedules.table import Schedule
from bapipe.simulator.simulate import simulate_columns
from bapipe.simulator.stage_cost import build_stages
from bapipe.simulator.tied_weights import inseparable_layers
from bapipe.simulator.timeline import StepColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decisions of a plan.

    Attributes:
        layers: in the order in which they are cut into stages.
        cuts: how many layers are before each cut, ascending. [stages - 1]
        devices: the names of the devices of each stage. [stages]
        recompute: whether a stage recomputes its forward. [stages]
        recompute_layers: layers of stages that recompute these only; other stages recompute all of their layers.
        own_table: the order of the actions if it is not that of the named schedule.

    Raises:
        BapipeError: too many actions in a step.
    """

    layers: tuple[str, ...]
    cuts: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...]
    recompute: tuple[bool, ...]
    schedule: str
    minibatch_size: int
    microbatch_size: int
    own_table: Schedule | None = None
    recompute_layers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_num_forwards(len(self.devices), self.num_microbatches)

    @property
    def num_microbatches(self) -> int:
        return self.minibatch_size // self.microbatch_size

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """The stages as a plan lists them."""
        intervals = pairwise((0, *self.cuts, len(self.layers)))
        return tuple(
            stage_plan(self.layers[begin:end], devices, recompute=recompute, recompute_layers=self.recompute_layers)
            for (begin, end), devices, recompute in zip(intervals, self.devices, self.recompute, strict=True)
        )

    def table(self, cluster: Cluster) -> Schedule:
        """Returns the order of the actions; raises InvalidSchedule if the schedule cannot have these stages."""
        if self.own_table is not None:
            return self.own_table
        index = cluster.index
        ranks = tuple(tuple(index[name] for name in replicas) for replicas in self.devices)
        return _placed(self.schedule, ranks, self.num_microbatches, len(cluster.devices))

    def following_schedule(self) -> "Decision":
        """Returns the decision with the order of the named schedule."""
        return replace(self, own_table=None)


_placed = lru_cache(maxsize=32)(place_schedule)
"""Most changes of a plan leave its order as it is."""


def stage_plan(
    layers: tuple[str, ...], devices: tuple[str, ...], *, recompute: bool, recompute_layers: AbstractSet[str]
) -> StagePlan:
    """Returns a stage that recomputes those of its layers that are in `recompute_layers`; if none is, all."""
    named = tuple(name for name in layers if name in recompute_layers) if recompute else ()
    only_some = 0 < len(named) < len(layers)
    return StagePlan(
        layers=layers, devices=devices, recompute=recompute, recompute_layers=named if only_some else msgspec.UNSET
    )


def stage_plans(
    layers: Sequence[str],
    cuts: Sequence[int],
    devices: Iterable[Sequence[int]],
    recompute: Iterable[Collection[int]],
    cluster: Cluster,
) -> tuple[StagePlan, ...]:
    """Returns the stages of a plan that a search has found.

    Args:
        cuts: stage s has the layers cuts[s] to cuts[s + 1], the last one left out. [stages + 1]
        devices: the ranks of each stage. [stages]
        recompute: the indices of the layers that each stage recomputes. [stages]
    """
    return tuple(
        stage_plan(
            tuple(layers[begin:end]),
            tuple(cluster.devices[rank].name for rank in ranks),
            recompute=bool(again),
            recompute_layers={layers[i] for i in again},
        )
        for (begin, end), ranks, again in zip(pairwise(cuts), devices, recompute, strict=True)
    )


def decision_of(plan: Plan) -> Decision:
    """Returns the decisions of a plan."""
    ends = [0]
    for stage in plan.stages:
        ends.append(ends[-1] + len(stage.layers))
    decision = Decision(
        layers=tuple(name for stage in plan.stages for name in stage.layers),
        cuts=tuple(ends[1:-1]),
        devices=tuple(stage.devices for stage in plan.stages),
        recompute=tuple(stage.recompute for stage in plan.stages),
        recompute_layers=frozenset(
            name for stage in plan.stages if len(stage.recomputed) < len(stage.layers) for name in stage.recomputed
        ),
        schedule=plan.schedule,
        minibatch_size=plan.minibatch_size,
        microbatch_size=plan.microbatch_size,
    )
    try:
        if decision.table(plan.cluster) == plan.table:
            return decision
    except BapipeError:
        pass  # a searched order: its name is not that of a schedule
    return replace(decision, own_table=plan.table)


def check_decision(decision: Decision, profiles: ProfilesByKind, cluster: Cluster) -> None:
    """Raises BapipeError unless every stage has layers and known devices, and the sizes divide."""
    num_layers = len(decision.layers)
    for begin, end in pairwise((0, *decision.cuts, num_layers)):
        if begin >= end:
            raise BapipeError(
                f"cuts after {', '.join(map(str, decision.cuts))} of {num_layers} layers leave a stage without layers: "
                "want ascending cuts between the first and the last layer"
            )
    check_devices(decision.devices, cluster)
    if decision.minibatch_size % decision.microbatch_size:
        raise BapipeError(
            f"a mini-batch of {decision.minibatch_size} does not divide into micro-batches of "
            f"{decision.microbatch_size}: change `minibatch_size` or `microbatch_size`"
        )
    layers = next(iter(profiles.values())).layers
    _check_inseparable(decision, layers)
    _check_replicas(decision, layers)


def check_devices(devices: Sequence[Sequence[str]], cluster: Cluster) -> None:
    """Raises BapipeError unless every stage has devices of the cluster, each once."""
    known = cluster.index
    for s, replicas in enumerate(devices):
        if not replicas or len(set(replicas)) < len(replicas):
            raise BapipeError(f"stage {s} has {'a device twice' if replicas else 'no device'}: name each device once")
        for name in replicas:
            if name not in known:
                raise BapipeError(f"stage {s}: the cluster has no device '{name}'; it has {', '.join(known)}")


def _check_inseparable(decision: Decision, layers: Sequence[LayerProfile]) -> None:
    stage_of = {name: s for s, stage in enumerate(decision.stages) for name in stage.layers}
    for a, b in inseparable_layers(layers):
        first, second = layers[a].name, layers[b].name
        if stage_of.get(first) != stage_of.get(second):
            raise BapipeError(
                f"'{first}' and '{second}' are in different stages, but share a buffer that training may change, or "
                "memory that one of them changes in place, or parameters of unknown size: move a cut so that they "
                "stay together"
            )


def _check_replicas(decision: Decision, layers: Sequence[LayerProfile]) -> None:
    without_replicas = {layer.name for layer in layers if not layer.allows_replicas}
    for s, stage in enumerate(decision.stages):
        layer = next((name for name in stage.layers if name in without_replicas), None)
        if len(stage.devices) > 1 and layer is not None:
            raise BapipeError(
                f"stage {s} has {len(stage.devices)} replicas and layer '{layer}', in which a forward leaves values "
                "that the next forward reads, so each replica would have its own: give this stage one device"
            )


def simulate_decision(decision: Decision, profiles: ProfilesByKind, cluster: Cluster) -> StepColumns:
    """Returns one step.

    Raises:
        BapipeError: as `check_decision`; an unknown or impossible schedule; layers that are not the profiles', or that
            a tensor connects backwards; a micro-batch size that the profiles do not cover.
    """
    check_decision(decision, profiles, cluster)
    stages = build_stages(decision.stages, profiles, cluster, decision.microbatch_size)
    return simulate_columns(decision.table(cluster), stages, cluster)
