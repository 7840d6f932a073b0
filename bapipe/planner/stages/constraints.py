"""Constraints that a user sets: layers in the same stage or in different ones, layers on certain devices.

They are written `A with B`, `A without B`, and `A on DEVICE` or `A on DEVICE,DEVICE`. The last means that the stage of
A runs on no other devices; a group is allowed if all of its members are among them.
"""

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from msgspec import UNSET

from bapipe.errors import BapipeError, ConstraintsUnmet
from bapipe.formats.cluster import Cluster, Device
from bapipe.formats.profile import ModelProfile
from bapipe.formats.stage_plan import StagePlan
from bapipe.planner.stages.devices import DeviceClass
from bapipe.planner.stages.intervals import IntArray, IntervalIndex, Rows
from bapipe.planner.stages.placements import StagePlacement
from bapipe.planner.stages.stage_memory import ForbiddenIntervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """The constraints of a plan.

    Attributes:
        together: pairs of layers in the same stage.
        separate: pairs of layers in different stages.
        on: layers, each with the names of the devices that may run it.
    """

    together: tuple[tuple[str, str], ...] = ()
    separate: tuple[tuple[str, str], ...] = ()
    on: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        parts = [f"{a} with {b}" for a, b in self.together]
        parts += [f"{a} without {b}" for a, b in self.separate]
        parts += [f"{layer} on {','.join(devices)}" for layer, devices in self.on]
        return "; ".join(parts)

    def check_layers(self, profile: ModelProfile) -> None:
        """Raises BapipeError if a layer is unknown."""
        names = [layer.name for layer in profile.layers]
        pairs = (*self.together, *self.separate)
        for name in (*chain.from_iterable(pairs), *(name for name, _ in self.on)):
            if name not in names:
                raise BapipeError(
                    f"a constraint names the layer '{name}', which {profile.model} does not have; "
                    f"its {len(names)} layers are '{names[0]}' to '{names[-1]}'"
                )

    def broken_by(self, stages: Sequence[StagePlan], cluster: Cluster) -> list[str]:
        """Returns the constraints that the stages of a plan violate, as the user writes them."""
        stage_of = {layer: s for s, stage in enumerate(stages) for layer in stage.layers}
        return [
            *(f"{a} with {b}" for a, b in self.together if stage_of[a] != stage_of[b]),
            *(f"{a} without {b}" for a, b in self.separate if stage_of[a] == stage_of[b]),
            *(
                f"{layer} on {','.join(devices)}"
                for layer, devices in self.on
                if not set(stages[stage_of[layer]].devices) <= set(_among(cluster, devices))
            ),
        ]

    def allowed_layers(self, cluster: Cluster) -> list[Hashable]:
        """Returns for each device which constraints of `on` allow it. [ranks]

        Devices that differ in this are not interchangeable, so they are in different device classes.
        """
        return [tuple(is_among(device, names) for _, names in self.on) for device in cluster.devices]

    def allowed_cuts(self, profile: ModelProfile, cuts: Iterable[int]) -> list[int]:
        """Returns those of some cuts that the constraints allow, with 0 and the number of layers.

        Args:
            cuts: numbers of layers before them, ascending, such as those of `legal_cuts`.

        Raises:
            BapipeError: a layer is unknown.
            ConstraintsUnmet: no allowed cut separates two layers that must be in different stages.
        """
        self.check_layers(profile)
        index = {layer.name: i for i, layer in enumerate(profile.layers)}
        forbidden: set[int] = set()
        for a, b in self.together:
            low, high = sorted((index[a], index[b]))
            forbidden.update(range(low + 1, high + 1))
        allowed = [0, *(cut for cut in cuts if cut not in forbidden), len(profile.layers)]
        for a, b in self.separate:
            low, high = sorted((index[a], index[b]))
            if not any(low < cut <= high for cut in allowed):
                raise ConstraintsUnmet(
                    f"the constraint '{a} without {b}' contradicts the others: no cut is allowed between these layers "
                    "(layers that share parameters stay together too); drop one of them"
                )
        return allowed

    def forbidden_intervals(
        self, profile: ModelProfile, intervals: IntervalIndex, classes: Sequence[DeviceClass]
    ) -> ForbiddenIntervals:
        """Returns a function from a placement to a mask of the intervals that it must not run.

        Besides what the constraints forbid, a stage with several replicas must not hold a layer that the profile marks
        `no_replicas`, and its replicas must all have the same number of members.
        """
        index = {layer.name: i for i, layer in enumerate(profile.layers)}
        begins, ends = np.array(intervals.cuts)[intervals.begins], np.array(intervals.cuts)[intervals.ends]

        def contain(name: str) -> IntArray:  # [intervals]
            mask: IntArray = (begins <= index[name]) & (index[name] < ends)
            return mask

        always_forbidden = np.zeros(len(begins), dtype=bool)  # [intervals]
        for a, b in self.separate:
            always_forbidden |= contain(a) & contain(b)
        allowed_classes = [
            (contain(name), {c for c, cls in enumerate(classes) if is_among(cls.device, devices)})
            for name, devices in self.on
        ]
        without_replicas = [layer.name for layer in profile.layers if not layer.allows_replicas]
        num_members = [cls.device.num_members for cls in classes]
        if not self.separate and not self.on and not without_replicas and len(set(num_members)) == 1:
            return lambda placement, rows: None
        forbidden_to_replicas = np.logical_or.reduce([always_forbidden, *map(contain, without_replicas)])

        def forbidden(placement: StagePlacement, rows: Rows) -> IntArray:
            mask: IntArray = (forbidden_to_replicas if placement.num_replicas > 1 else always_forbidden)[rows]
            if len({num_members[c] for c in placement.device_classes}) > 1:
                return np.ones_like(mask)
            for contains_layer, allowed in allowed_classes:
                if not set(placement.device_classes) <= allowed:
                    mask = mask | contains_layer[rows]
            return mask

        return forbidden


def parse_constraints(texts: Sequence[str]) -> Constraints:
    """Returns the constraints written in some texts.

    Raises:
        BapipeError: a text is not a constraint.
    """
    together: list[tuple[str, str]] = []
    separate: list[tuple[str, str]] = []
    on: list[tuple[str, tuple[str, ...]]] = []
    for text in texts:
        # Names may have spaces.
        found = re.fullmatch(r"(.+?)\s+(with|without|on)\s+(.+)", text.strip())
        if found is None:
            raise BapipeError(
                f"'{text}' is not a constraint: want 'LAYER with LAYER', 'LAYER without LAYER' or "
                "'LAYER on DEVICE,DEVICE'"
            )
        layer, relation, other = found.groups()
        if relation == "on":
            on.append((layer, tuple(name.strip() for name in other.split(","))))
        else:
            (together if relation == "with" else separate).append((layer, other))
    return Constraints(together=tuple(together), separate=tuple(separate), on=tuple(on))


def check_constraints(rules: Constraints, profile: ModelProfile, cluster: Cluster) -> None:
    """Checks that constraints can be met on a cluster.

    Raises:
        BapipeError: a layer or device is unknown.
        ConstraintsUnmet: they contradict one another, or name only some members of each group.
    """
    rules.check_layers(profile)
    names = [layer.name for layer in profile.layers]
    members = {name for device in cluster.devices if device.members is not UNSET for name in device.members}
    for name, devices in rules.on:
        text = f"the constraint '{name} on {','.join(devices)}'"
        for device in devices:
            if device not in cluster.index and device not in members:
                raise BapipeError(
                    f"{text} names the device '{device}', which the cluster does not have; "
                    f"it has {', '.join(cluster.index)}"
                )
        if not _among(cluster, devices):
            raise ConstraintsUnmet(
                f"{text} names some members of groups, whose layers all members run: the devices are "
                f"{', '.join(cluster.index)}; name all members, or plan with single devices"
            )
    for a, b in rules.separate:
        if a == b:
            raise BapipeError(f"the constraint '{a} without {b}' separates a layer from itself; drop it")
    cuts = rules.allowed_cuts(profile, range(1, len(names)))
    _check_devices(rules, names, cuts, cluster)


def is_among(device: Device, names: Collection[str]) -> bool:
    """Returns whether a device is named or, if it is a group, all of its members are."""
    return device.name in names or (device.members is not UNSET and set(device.members) <= set(names))


def _among(cluster: Cluster, names: Collection[str]) -> list[str]:
    """Returns the names of the cluster's devices for which `is_among` holds, in the cluster's order."""
    return [device.name for device in cluster.devices if is_among(device, names)]


def _check_devices(rules: Constraints, names: Sequence[str], cuts: Sequence[int], cluster: Cluster) -> None:
    """Raises ConstraintsUnmet if layers that must share a stage have no allowed device in common."""
    devices_of_group: dict[int, tuple[str, set[str]]] = {}
    for name, named in rules.on:
        devices = set(_among(cluster, named))
        group = sum(cut <= names.index(name) for cut in cuts)
        other, common = devices_of_group.get(group, (name, devices))
        if not common & devices:
            if other == name:
                raise ConstraintsUnmet(
                    f"the constraints contradict one another: no device is allowed by all those on '{name}'; "
                    "drop one of them"
                )
            raise ConstraintsUnmet(
                f"the constraints contradict one another: '{other}' and '{name}' must share a stage, and no device is "
                "allowed for both; drop one of them"
            )
        devices_of_group[group] = (name, common & devices)
