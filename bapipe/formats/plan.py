"""A decision: stages, schedule, order, and what they promise: the plan/1 file."""

from typing import Any, Literal

import msgspec

from bapipe.errors import InvalidFile, InvalidSchedule
from bapipe.formats.cluster import Cluster
from bapipe.formats.settings import Settings
from bapipe.schedules.table import Schedule, parse_action
from bapipe.units import NonNegative, NonNegativeFloat, Positive


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a stage, the devices that run it, and whether its backward recomputes its forward."""

    layers: tuple[str, ...]
    devices: tuple[str, ...]
    recompute: bool = False


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device holds at its peak, in bytes; `buffers` are the receive buffers at the stage boundaries."""

    params: NonNegative
    gradients: NonNegative
    optimizer: NonNegative
    stash: NonNegative
    workspace: NonNegative
    buffers: NonNegative

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.optimizer + self.stash + self.workspace + self.buffers


class RankPrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device in one step: `busy_ns` computes, `sync_ns` waits for an all-reduce, `idle_ns` is the rest."""

    device: str
    busy_ns: NonNegative
    idle_ns: NonNegative
    sync_ns: NonNegative
    peak_bytes: NonNegative
    memory: Memory


THROUGHPUT: Literal["throughput"] = "throughput"
"""The objective of plans whose most loaded device has the least to do, whatever one step takes."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the judge says of one step. `bubble` is the idle share of the devices that have a stage.

    `load_ns`, of plans for throughput only, is the largest load of a device: what it does in a step once the pipeline
    is full.
    """

    step_ns: NonNegative
    load_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    samples_per_s: NonNegativeFloat
    bubble: NonNegativeFloat
    ranks: tuple[RankPrediction, ...]


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How good a plan is: no plan of `space` is faster than `lower_bound_ns`; `gap` is step / bound - 1.

    Of a plan for throughput: no plan's largest load is below `lower_bound_ns`; `gap` is load / bound - 1.
    """

    lower_bound_ns: NonNegative
    gap: NonNegativeFloat
    proven_optimal: bool
    space: str


def certify(step_ns: int, lower_bound_ns: int, space: str) -> Certificate:
    """Returns the certificate of a plan whose step no plan of `space` can bring below the bound."""
    return Certificate(
        lower_bound_ns=lower_bound_ns,
        gap=step_ns / lower_bound_ns - 1 if lower_bound_ns else 0.0,
        proven_optimal=step_ns == lower_bound_ns,
        space=space,
    )


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another way to train the same mini-batch, judged by the same rules; `why_not` says why it was not chosen."""

    name: str
    step_ns: NonNegative
    peak_bytes: NonNegative
    feasible: bool
    why_not: str


class Plan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="bapipe",
    tag="plan/1",
):
    """How to train a model on a cluster.

    Attributes:
        objective: what the plan is best at; left out, the time of one step.
        profiles: SHA-256 of the encoded profile by device kind.
        settings: how the profiled model was computed, and a run must; left out where the profiles do not say.
        order: `order[r]` is what device r of the cluster runs, empty for a device without a stage.

    Raises:
        InvalidFile: a layer in two stages, an unknown device, sizes that do not multiply, or an unreadable action.
    """

    model: str
    factory: str | None
    arguments: dict[str, Any]
    profiles: dict[str, str]
    settings: Settings | msgspec.UnsetType = msgspec.UNSET
    cluster: Cluster
    objective: Literal["throughput"] | msgspec.UnsetType = msgspec.UNSET
    minibatch_size: Positive
    microbatch_size: Positive
    num_microbatches: Positive
    schedule: str
    stages: tuple[StagePlan, ...]
    order: tuple[tuple[str, ...], ...]
    prediction: Prediction
    certificate: Certificate
    alternatives: tuple[Alternative, ...]

    def __post_init__(self) -> None:
        if self.microbatch_size * self.num_microbatches != self.minibatch_size:
            raise InvalidFile(
                f"{self.num_microbatches} micro-batches of {self.microbatch_size} are not a mini-batch of "
                f"{self.minibatch_size}",
                "$.minibatch_size",
            )
        _check_stages(self.stages, self.cluster)
        if len(self.order) != len(self.cluster.devices):
            raise InvalidFile(f"{len(self.order)} orders for {len(self.cluster.devices)} devices", "$.order")
        for rank, actions in enumerate(self.order):
            for place, text in enumerate(actions):
                try:
                    parse_action(text)
                except InvalidSchedule as error:
                    raise InvalidFile(str(error), f"$.order[{rank}][{place}]") from None

    @property
    def table(self) -> Schedule:
        """The plan's order as a schedule."""
        index = self.cluster.index
        return Schedule(
            devices=tuple(tuple(index[name] for name in stage.devices) for stage in self.stages),
            num_microbatches=self.num_microbatches,
            order=tuple(tuple(parse_action(text) for text in actions) for actions in self.order),
        )


def _check_stages(stages: tuple[StagePlan, ...], cluster: Cluster) -> None:
    if not stages:
        raise InvalidFile("a plan needs at least one stage", "$.stages")
    placed: set[str] = set()
    for index, stage in enumerate(stages):
        where = f"$.stages[{index}]"
        if not stage.layers:
            raise InvalidFile("a stage needs at least one layer", f"{where}.layers")
        for name in stage.layers:
            if name in placed:
                raise InvalidFile(f"layer '{name}' is in two places", f"{where}.layers")
            placed.add(name)
        if not stage.devices:
            raise InvalidFile("a stage needs at least one device", f"{where}.devices")
        if len(set(stage.devices)) != len(stage.devices):
            raise InvalidFile("a device is named twice", f"{where}.devices")
        for name in stage.devices:
            if name not in cluster.index:
                raise InvalidFile(f"'{name}' is not a device of the plan's cluster", f"{where}.devices")
