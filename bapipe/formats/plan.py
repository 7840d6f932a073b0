"""The plan/1 file: stages, schedule and order, with the prediction and the certificate of their step time."""

import hashlib
from copy import copy
from functools import cached_property
from reprlib import repr as shortened
from typing import Any, Literal

import msgspec

from bapipe.errors import BapipeError, InvalidFile, InvalidSchedule
from bapipe.formats.certificate import (
    CHANGED_BY_HAND,
    NOT_CERTIFIED,
    Certificate,
    check_certificate,
    is_of_changed_plan,
    outside_of,
)
from bapipe.formats.cluster import Cluster
from bapipe.formats.prediction import NOT_PREDICTED, Prediction
from bapipe.formats.settings import Settings
from bapipe.formats.stage_plan import StagePlan, check_stages
from bapipe.printable import counted
from bapipe.schedules import ALL
from bapipe.schedules.placement import place_schedule
from bapipe.schedules.table import Action, Schedule, parse_action, parse_actions
from bapipe.tables import data_frame, rows_html
from bapipe.units import NonNegative, Positive, number, percent_up

Objective = Literal["step", "throughput"]
"""What a plan minimizes: the time of one step, or the largest load of a device."""

THROUGHPUT: Literal["throughput"] = "throughput"
"""The objective of plans that minimize the largest load of a device, not the time of a single step."""

MAX_FORWARDS = 2**17
"""Most forwards in a step of a plan whose order is left out: 128 stages of 1,024 micro-batches."""


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
            action, no order and a schedule that does not name one, a prediction of other devices, or a certificate that
            contradicts the step.
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
        check_stages(self.stages, self.cluster)
        if not self.order:
            vars(self)["table"] = table = self._named_table()  # known, so that the order need not be parsed
            msgspec.structs.force_setattr(self, "order", tuple(tuple(map(str, actions)) for actions in table.order))
        if len(self.order) != len(self.cluster.devices):
            raise InvalidFile(f"{len(self.order)} orders for {len(self.cluster.devices)} devices", "$.order")
        _ = self.table  # raises InvalidFile if an action cannot be read
        if self.certificate.digest not in (msgspec.UNSET, self.digest):
            self._drop_judgement(CHANGED_BY_HAND)
        elif self.is_judged:
            self._check_ranks()
            check_certificate(self.certificate, self.prediction.objective_ns)
        elif self.certificate.lower_bound_ns or self.certificate.proven_optimal:
            self._drop_judgement(NOT_CERTIFIED)  # it compares the bound with a step time that is not there

    def _named_table(self) -> Schedule:
        """Returns the named schedule on the stages' devices."""
        if self.num_microbatches * len(self.stages) > MAX_FORWARDS:
            raise InvalidFile(
                f"{self.num_microbatches} micro-batches on {len(self.stages)} stages: want at most {MAX_FORWARDS:,} "
                "forwards in a step, or the `order`",
                "$.num_microbatches",
            )
        try:
            return place_schedule(self.schedule, self._ranks, self.num_microbatches, len(self.cluster.devices))
        except InvalidSchedule as error:
            message = f"the plan holds no `order`, and none follows from its schedule: {error}"
            raise InvalidFile(message, "$.schedule") from None

    def _check_ranks(self) -> None:
        """Raises InvalidFile unless the prediction has each device of the cluster, in order."""
        if [rank.device for rank in self.prediction.ranks] != [*self.cluster.index]:
            raise InvalidFile(
                "these are not the devices of the plan's cluster, each once and in their order", "$.prediction.ranks"
            )

    def _drop_judgement(self, certificate: Certificate) -> None:
        for name, value in (("prediction", NOT_PREDICTED), ("certificate", certificate), ("alternatives", ())):
            msgspec.structs.force_setattr(self, name, value)

    def __hash__(self) -> int:
        """Returns a hash of the decision: equal plans have equal ones. Two fields are dictionaries, which have none."""
        return hash(self.digest)

    def __repr__(self) -> str:
        """Returns the decisions in one line: the whole plan would fill a notebook."""
        sizes = f"{self.num_microbatches} x {self.microbatch_size}"
        step = f"{number(self.prediction.step_ns / 1e6)} ms" if self.is_judged else "not judged"
        return f"Plan({self.model!r}, {counted(len(self.stages), 'stage')}, {self.schedule!r}, {sizes}, {step})"

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
        sizes = f"{counted(self.num_microbatches, 'micro-batch')} of {self.microbatch_size}"
        lines = [f"{self.model}: {counted(len(self.stages), 'stage')}, {self.schedule}, {sizes}"]
        if self.is_judged:
            p = self.prediction
            samples_per_s = number(p.samples_per_s) if p.step_ns else "unlimited"
            lines.append(f"{number(p.step_ns / 1e6)} ms per step, {samples_per_s} samples/s, bubble {p.bubble:.1%}")
        gap = f"gap {percent_up(self.certificate.gap)}: "
        if self.certificate.proven_optimal:
            is_of_space = outside_of(self.certificate) is None and not is_of_changed_plan(self.certificate)
            gap = "proven optimal over " if is_of_space else "no plan searched is faster: "
        lines.append(f"{gap if self.certificate.lower_bound_ns else ''}{self.certificate.space}")
        return rows_html(lines, self.rows())

    @property
    def used_devices(self) -> tuple[str, ...]:
        """The names of the devices that have a stage, each once, in the order of the stages."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.devices))

    @property
    def unused_devices(self) -> tuple[str, ...]:
        """The names of the devices without a stage."""
        used = set(self.used_devices)
        return tuple(device.name for device in self.cluster.devices if device.name not in used)

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
    def follows_its_schedule(self) -> bool:
        """Whether `order` is that of the named schedule; true of other names, and of more than `MAX_FORWARDS`."""
        if self.schedule not in ALL or self.num_microbatches * len(self.stages) > MAX_FORWARDS:
            return True
        try:
            return self._named_table().order == self.table.order
        except InvalidFile:
            return False  # it cannot have these stages

    @property
    def compute_settings(self) -> Settings:
        """The settings of the profiled model, or the default ones if the plan does not say."""
        return Settings() if self.settings is msgspec.UNSET else self.settings


def check_plan(plan: object) -> None:
    """Raises BapipeError unless it is a plan: the path of its file is easily given instead."""
    if not isinstance(plan, Plan):
        raise BapipeError(
            f"{shortened(plan)} is no plan: want what `bapipe.plan`, or `bapipe.read(path, bapipe.Plan)`, returns"
        )


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
