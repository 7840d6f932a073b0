"""Constraints of a user: layers in the same stage or in different ones, layers on certain devices.

Written `A with B`, `A without B`, and `A on DEVICE` or `A on DEVICE,DEVICE`: the stage of A runs on these alone.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.errors import BapipeError
from bapipe.formats.cluster import Cluster
from bapipe.formats.profile import ModelProfile
from bapipe.planner.branch_and_bound.devices import DeviceClass
from bapipe.planner.branch_and_bound.intervals import IntArray, IntervalIndex
from bapipe.planner.branch_and_bound.placements import StagePlacement
from bapipe.planner.branch_and_bound.stage_candidates import ForbiddenIntervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Pairs of layers, and layers with the devices that may run them."""

    together: tuple[tuple[str, str], ...] = ()
    separate: tuple[tuple[str, str], ...] = ()
    on: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        parts = [f"{a} with {b}" for a, b in self.together]
        parts += [f"{a} without {b}" for a, b in self.separate]
        parts += [f"{layer} on {','.join(devices)}" for layer, devices in self.on]
        return "; ".join(parts)

    def apart(self, cluster: Cluster) -> list[Hashable]:
        """Returns what tells the devices of a cluster apart: which layers they may run."""
        return [tuple(device.name in devices for _, devices in self.on) for device in cluster.devices]

    def cuts(self, profile: ModelProfile, legal: Sequence[bool]) -> list[int]:
        """Returns the layers before which the chain may be cut, its start and its end.

        Raises:
            BapipeError: layers that must be apart cannot be.
        """
        index = {layer.name: i for i, layer in enumerate(profile.layers)}
        allowed = list(legal)
        for a, b in self.together:
            low, high = sorted((index[a], index[b]))
            allowed[low + 1 : high + 1] = [False] * (high - low)
        cuts = [0, *(cut for cut in range(1, len(profile.layers)) if allowed[cut]), len(profile.layers)]
        for a, b in self.separate:
            low, high = sorted((index[a], index[b]))
            if not any(low < cut <= high for cut in cuts):
                raise BapipeError(
                    f"the constraint '{a} without {b}' contradicts the others: no cut is allowed between these layers "
                    "(layers that share parameters stay together too); drop one of them"
                )
        return cuts

    def mask(
        self, profile: ModelProfile, intervals: IntervalIndex, classes: Sequence[DeviceClass]
    ) -> ForbiddenIntervals:
        """Returns which runs of layers a slot must not hold."""
        index = {layer.name: i for i, layer in enumerate(profile.layers)}
        starts, ends = np.array(intervals.cuts)[intervals.begins], np.array(intervals.cuts)[intervals.ends]

        def holds(name: str) -> IntArray:
            found: IntArray = (starts <= index[name]) & (index[name] < ends)
            return found

        never = np.zeros(len(starts), dtype=bool)
        for a, b in self.separate:
            never |= holds(a) & holds(b)
        held = {name: holds(name) for name, _ in self.on}
        may = [(name, {c for c, own in enumerate(classes) if own.device.name in devices}) for name, devices in self.on]
        if not self.separate and not self.on:
            return lambda placement, rows: None

        def forbidden(placement: StagePlacement, rows: slice) -> IntArray:
            found = never[rows]
            for name, allowed in may:
                if not set(placement.device_classes) <= allowed:
                    found = found | held[name][rows]
            return found

        return forbidden


def parse_constraints(texts: Sequence[str]) -> Constraints:
    """Returns the constraints that some texts say.

    Raises:
        BapipeError: a text is none.
    """
    together: list[tuple[str, str]] = []
    separate: list[tuple[str, str]] = []
    on: list[tuple[str, tuple[str, ...]]] = []
    for text in texts:
        words = text.split()
        if len(words) != 3 or words[1] not in ("with", "without", "on"):
            raise BapipeError(
                f"'{text}' is no constraint: want 'LAYER with LAYER', 'LAYER without LAYER' or 'LAYER on DEVICE,DEVICE'"
            )
        layer, verb, other = words
        if verb == "on":
            on.append((layer, tuple(other.split(","))))
        else:
            (together if verb == "with" else separate).append((layer, other))
    return Constraints(together=tuple(together), separate=tuple(separate), on=tuple(on))


def check_constraints(rules: Constraints, profile: ModelProfile, cluster: Cluster) -> None:
    """Raises BapipeError if constraints name unknown layers or devices, or contradict one another."""
    names = [layer.name for layer in profile.layers]
    for name in [name for pair in (*rules.together, *rules.separate) for name in pair] + [name for name, _ in rules.on]:
        if name not in names:
            raise BapipeError(
                f"a constraint names the layer '{name}', which {profile.model} does not have; "
                f"its {len(names)} layers are '{names[0]}' to '{names[-1]}'"
            )
    for name, devices in rules.on:
        for device in devices:
            if device not in cluster.index:
                raise BapipeError(
                    f"the constraint '{name} on {','.join(devices)}' names the device '{device}', which the cluster "
                    f"does not have; it has {', '.join(cluster.index)}"
                )
    for a, b in rules.separate:
        if a == b:
            raise BapipeError(f"the constraint '{a} without {b}' sets a layer apart from itself; drop it")
    legal = rules.cuts(profile, [True] * (len(names) + 1))
    _check_devices(rules, names, legal)


def _check_devices(rules: Constraints, names: Sequence[str], cuts: Sequence[int]) -> None:
    """Layers that stay together need a device that all of them may run on."""
    seen: dict[int, tuple[str, set[str]]] = {}
    for name, devices in rules.on:
        piece = sum(cut <= names.index(name) for cut in cuts)
        other, common = seen.get(piece, (name, set(devices)))
        if not common & set(devices):
            if other == name:
                raise BapipeError(
                    f"the constraints contradict one another: no device is allowed by all that say where '{name}' is; "
                    "drop one of them"
                )
            raise BapipeError(
                f"the constraints contradict one another: '{other}' and '{name}' must share a stage, and no device is "
                "allowed for both; drop one of them"
            )
        seen[piece] = (name, common & set(devices))
