"""The plan/1 file: stages, schedule and order, with the prediction and the certificate of their step time."""

import hashlib
from copy import copy
from functools import cached_property
from typing import Any, Literal

import msgspec

from bapipe.errors import InvalidFile, InvalidSchedule
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import LOSS
from bapipe.formats.settings import Settings
from bapipe.schedules.placement import place_schedule
from bapipe.schedules.table import Action, Schedule, parse_action, parse_actions
from bapipe.tables import data_frame, rows_html
from bapipe.units import NonNegative, NonNegativeFloat, Positive


class StagePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a stage, the devices that run it, and whether its backward recomputes its forward.

    Attributes:
        recompute_layers: with `recompute`, those of its layers that are recomputed: some, but not the loss; the others
            keep their stashes. If left out, the whole stage is recomputed from its input.
    """

    layers: tuple[str, ...]
    devices: tuple[str, ...]
    recompute: bool = False
    recompute_layers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The layers that are recomputed."""
        if not self.recompute:
            return ()
        return self.layers if self.recompute_layers is msgspec.UNSET else self.recompute_layers


class Memory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The memory of a device at its peak, in bytes.

    Attributes:
        buffers: the receive buffers at the stage boundaries.
    """

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
    """One device in one step.

    Attributes:
        busy_ns: time in which it computes.
        sync_ns: time in which it waits for an all-reduce.
        idle_ns: all other time.
    """

    device: str
    busy_ns: NonNegative
    idle_ns: NonNegative
    sync_ns: NonNegative
    peak_bytes: NonNegative
    memory: Memory


Objective = Literal["step", "throughput"]
"""What a plan minimizes: the time of one step, or the largest load of a device."""

THROUGHPUT: Literal["throughput"] = "throughput"
"""The objective of plans that minimize the largest load of a device, not the time of a single step."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step as the simulator predicts it.

    Attributes:
        load_ns: for plans for throughput only: the largest load of a device, its work per step once the pipeline is
            full.
        bubble: the idle share of the devices that have a stage.
    """

    step_ns: NonNegative
    load_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    samples_per_s: NonNegativeFloat
    bubble: NonNegativeFloat
    ranks: tuple[RankPrediction, ...]


NOT_PREDICTED = Prediction(step_ns=0, samples_per_s=0.0, bubble=0.0, ranks=())
"""In place of the prediction of a plan whose file holds none."""


class ReachedGoal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan has the least or the most of, among the plans that are fast enough.

    Attributes:
        quantity: bytes of the device that needs most, devices, or copies of a block of layers.
        value: what the plan has of it.
        bound: no plan needs less memory than this, or fewer devices, or has one copy more than this. If it is the
            value, the goal is reached exactly. 0 if nothing is proven.
        limit_ns: plans are fast enough whose step, or load, takes no longer. If left out, all are.
        of: the block; or of which devices the plans for fewer are, if not of any.
    """

    quantity: Literal["memory", "devices", "copies"]
    value: NonNegative
    bound: NonNegative
    limit_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    of: str = ""


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How good a plan is.

    Attributes:
        lower_bound_ns: no plan of the space has a shorter step, or with the objective throughput a smaller load.
        gap: step time / lower bound - 1; with the objective throughput, load / lower bound - 1.
        proven_optimal: whether the plan meets the lower bound.
        space: the plans that were searched, in words.
        goal: what the plan was searched for besides a short step; left out if nothing.
        digest: `Plan.digest` of the plan that it certifies. A plan with another one was changed since; its prediction,
            certificate and alternatives are then dropped. If left out, the plan is taken to be unchanged.
    """

    lower_bound_ns: NonNegative
    gap: NonNegativeFloat
    proven_optimal: bool
    space: str
    goal: ReachedGoal | msgspec.UnsetType = msgspec.UNSET
    digest: str | msgspec.UnsetType = msgspec.UNSET


MAX_ACTIONS = 2**20
"""Most forwards in a step of a plan whose order is left out."""

_MADE_BY_HAND = "made by hand and not judged: simulate it for its times, pin it for a bound"
NOT_CERTIFIED = Certificate(lower_bound_ns=0, gap=0.0, space=_MADE_BY_HAND, proven_optimal=False)
"""In place of the certificate of a plan whose file holds none."""

_CHANGED = "changed by hand since it was judged: simulate it for its times, pin it for a bound"
CHANGED_BY_HAND = Certificate(lower_bound_ns=0, gap=0.0, space=_CHANGED, proven_optimal=False)
"""In place of the certificate of a plan that was changed since it was certified."""


def certify(step_ns: int, lower_bound_ns: int, space: str) -> Certificate:
    """Returns the certificate of a plan whose step time, or load, has this lower bound in the space."""
    return Certificate(
        lower_bound_ns=lower_bound_ns,
        gap=step_ns / lower_bound_ns - 1 if lower_bound_ns else 0.0,
        proven_optimal=step_ns == lower_bound_ns,
        space=space,
    )


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another way to train the same mini-batch, predicted by the same simulator.

    Attributes:
        feasible: whether it fits the memory of every device.
        why_not: why it was not chosen.
    """

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
    omit_defaults=True,  # of a plan that was not judged: what its file leaves out stays left out
    dict=True,  # stores values that are computed once, such as `table`; not part of the file nor of equality
):
    """How to train a model on a cluster.

    Attributes:
        objective: what the plan minimizes; if left out, the time of one step.
        profiles: SHA-256 of the encoded profile of each kind of device.
        settings: how the profiled model was computed, and how a run must compute; left out if the profiles do not say.
        order: for each device of the cluster the actions that it runs, in order; empty for a device without a stage.
            If left out, that of the named schedule.
        prediction, certificate: left out of a plan that was made by hand and not judged.
        alternatives: if left out, none.

    Raises:
        InvalidFile: a layer in two stages, an unknown device, sizes whose product is not the mini-batch, an unreadable
            action, or no order and a schedule that does not name one.
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
    order: tuple[tuple[str, ...], ...] = ()
    prediction: Prediction = NOT_PREDICTED
    certificate: Certificate = NOT_CERTIFIED
    # A factory, because an empty tuple as the default would be left out of files too, which older versions refuse.
    alternatives: tuple[Alternative, ...] = msgspec.field(default_factory=tuple)

    def __post_init__(self) -> None:
        if self.microbatch_size * self.num_microbatches != self.minibatch_size:
            raise InvalidFile(
                f"{self.num_microbatches} micro-batches of {self.microbatch_size} are not a mini-batch of "
                f"{self.minibatch_size}",
                "$.minibatch_size",
            )
        _check_stages(self.stages, self.cluster)
        if not self.order:
            msgspec.structs.force_setattr(self, "order", self._named_order())
        if len(self.order) != len(self.cluster.devices):
            raise InvalidFile(f"{len(self.order)} orders for {len(self.cluster.devices)} devices", "$.order")
        _ = self.table  # raises InvalidFile if an action cannot be read
        known = self.cluster.index
        for index, rank in enumerate(self.prediction.ranks):
            if rank.device not in known:
                where = f"$.prediction.ranks[{index}].device"
                raise InvalidFile(f"'{rank.device}' is not a device of the plan's cluster", where)
        if self.certificate.digest not in (msgspec.UNSET, self.digest):
            self._drop_judgement(CHANGED_BY_HAND)
        elif not self.is_judged and self.certificate.lower_bound_ns:
            self._drop_judgement(NOT_CERTIFIED)  # it compares the bound with a step time that is not there

    def _named_order(self) -> tuple[tuple[str, ...], ...]:
        """Returns the order of the named schedule on the stages' devices."""
        if self.num_microbatches * len(self.stages) > MAX_ACTIONS:
            raise InvalidFile(
                f"{self.num_microbatches} micro-batches on {len(self.stages)} stages: want at most {MAX_ACTIONS:,} "
                "forwards in a step, or the `order`",
                "$.num_microbatches",
            )
        try:
            table = place_schedule(self.schedule, self._ranks, self.num_microbatches, len(self.cluster.devices))
        except InvalidSchedule as error:
            message = f"the plan holds no `order`, and none follows from its schedule: {error}"
            raise InvalidFile(message, "$.schedule") from None
        return tuple(tuple(map(str, actions)) for actions in table.order)

    def _drop_judgement(self, certificate: Certificate) -> None:
        for name, value in (("prediction", NOT_PREDICTED), ("certificate", certificate), ("alternatives", ())):
            msgspec.structs.force_setattr(self, name, value)

    def __repr__(self) -> str:
        """Returns the decisions in one line: the whole plan would fill a notebook."""
        sizes = f"{self.num_microbatches} x {self.microbatch_size}"
        step = f"{self.prediction.step_ns / 1e6:,.4g} ms" if self.is_judged else "not judged"
        return f"Plan({self.model!r}, {len(self.stages)} stages, {self.schedule!r}, {sizes}, {step})"

    def rows(self) -> list[dict[str, object]]:
        """Returns a row for each device of each stage, as `to_pandas` has them."""
        ranks = {rank.device: rank for rank in self.prediction.ranks}
        found: list[dict[str, object]] = []
        for index, stage in enumerate(self.stages):
            for device in stage.devices:
                row: dict[str, object] = {
                    "stage": index,
                    "device": device,
                    "num_layers": len(stage.layers),
                    "first_layer": stage.layers[0],
                    "last_layer": stage.layers[-1],
                    "recompute": stage.recompute,
                }
                if device in ranks:
                    names = ("busy_ns", "sync_ns", "idle_ns", "peak_bytes")
                    row.update({name: getattr(ranks[device], name) for name in names})
                found.append(row)
        return found

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with a row for each device of each stage."""
        return data_frame(self.rows())

    def _repr_html_(self) -> str:
        """Returns the decisions and the prediction, for a notebook."""
        sizes = f"{self.num_microbatches} micro-batches of {self.microbatch_size}"
        lines = [f"{self.model}: {len(self.stages)} stages, {self.schedule}, {sizes}"]
        if self.is_judged:
            p = self.prediction
            lines.append(f"{p.step_ns / 1e6:,.4g} ms per step, {p.samples_per_s:,.4g} samples/s, bubble {p.bubble:.1%}")
        gap = "proven optimal over " if self.certificate.proven_optimal else f"gap {self.certificate.gap:.2%}: "
        lines.append(f"{gap if self.certificate.lower_bound_ns else ''}{self.certificate.space}")
        return rows_html(lines, self.rows())

    @property
    def is_judged(self) -> bool:
        """Whether the plan holds a prediction."""
        return bool(self.prediction.ranks)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what a certificate is about: the decision, and the inputs that it was made for.

        The profiles stand for the model and its settings. Fields that are added to clusters and stages later must be
        unset by default, so that they do not change the digest of older files.
        """
        decided = (
            sorted(self.profiles.items()),
            self.cluster,
            None if self.objective is msgspec.UNSET else self.objective,
            self.minibatch_size,
            self.microbatch_size,
            self.schedule,
            self.stages,
            self.order,
        )
        return hashlib.sha256(msgspec.json.encode(decided)).hexdigest()

    @property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that run each stage."""
        index = self.cluster.index
        return tuple(tuple(index[name] for name in stage.devices) for stage in self.stages)

    @cached_property
    def table(self) -> Schedule:
        """The plan's order as a schedule; parsed once, because training needs it in every step."""
        return Schedule(
            devices=self._ranks,
            num_microbatches=self.num_microbatches,
            order=tuple(_parse_actions(actions, f"$.order[{rank}]") for rank, actions in enumerate(self.order)),
        )

    @property
    def compute_settings(self) -> Settings:
        """The settings of the profiled model, or the default ones if the plan does not say."""
        return Settings() if self.settings is msgspec.UNSET else self.settings


def with_certificate(plan: Plan, certificate: Certificate) -> Plan:
    """Returns the plan with a certificate that is valid as long as the plan is not changed."""
    certificate = msgspec.structs.replace(certificate, digest=plan.digest)
    if not plan.is_judged:
        return msgspec.structs.replace(plan, certificate=certificate)
    # Only the certificate is another one: an order of many actions need not be parsed and checked again.
    certified = copy(plan)
    msgspec.structs.force_setattr(certified, "certificate", certificate)
    vars(certified).update(table=plan.table, digest=plan.digest)
    return certified


def _parse_actions(texts: tuple[str, ...], where: str) -> tuple[Action, ...]:
    """Returns the actions of one rank; raises InvalidFile with the path of an unreadable one."""
    found = parse_actions(texts)
    if found is not None:
        return found
    actions = []
    for position, text in enumerate(texts):
        try:
            actions.append(parse_action(text))
        except InvalidSchedule as error:
            raise InvalidFile(str(error), f"{where}[{position}]") from None
    return tuple(actions)


def _check_stages(stages: tuple[StagePlan, ...], cluster: Cluster) -> None:
    if not stages:
        raise InvalidFile("a plan needs at least one stage", "$.stages")
    placed: set[str] = set()
    known = cluster.index
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
            if name not in known:
                raise InvalidFile(f"'{name}' is not a device of the plan's cluster", f"{where}.devices")
        _check_recomputation(stage, f"{where}.recompute_layers")


def _check_recomputation(stage: StagePlan, where: str) -> None:
    named = stage.recompute_layers
    if named is msgspec.UNSET:
        return
    if not stage.recompute:
        raise InvalidFile("the stage names layers that are recomputed, but `recompute` is false", where)
    if not named or len(set(named)) != len(named):
        raise InvalidFile("want one or more layers, each once; leave it out to recompute the whole stage", where)
    for name in named:
        if name == LOSS:
            raise InvalidFile("the loss can be recomputed with its whole stage only", where)
        if name not in stage.layers:
            raise InvalidFile(f"'{name}' is not a layer of the stage", where)
    if len(named) == len(stage.layers):
        raise InvalidFile("these are all layers of the stage: leave it out to recompute the whole stage", where)
