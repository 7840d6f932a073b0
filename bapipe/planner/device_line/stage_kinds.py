"""The kinds of devices of the stages of a line, and of the devices before and after them."""

from itertools import product

import numpy as np

from bapipe.planner.device_line.layer_sums import LayerSums
from bapipe.planner.stages.intervals import IntArray


class StageKinds:
    """The kinds of devices of stages, by their first device and the maximum devices of their class.

    As a stage gets more devices, its kinds are added in the order in which they occur, so the number of kinds says
    which they are. A stage that begins later does not gain more time for the layers before it than it loses, as its
    kinds are among those that these layers count on.

    Attributes:
        sums: sums over layers on each set of kinds that is needed; the first set is all kinds.
        own, before: the index of the set of a stage's kinds; and of that with the kinds of all devices before it.
            [positions, classes]
        behind: the index of the set of the kinds from a position on. [positions]
        of_device: the index of the set of only this device's kind. [positions]
    """

    def __init__(self, sums: LayerSums, most: IntArray) -> None:
        """`most` are the maximum devices of stages of each class. [classes]"""
        num = sums.num_devices
        kind_of = [device.kind for device in sums.line.cluster.devices[:num]]
        kinds = sorted(set(kind_of))
        following = np.full((len(kinds), num + 1), num)  # the next device of each kind. [kinds, positions]
        for k, kind in enumerate(kinds):
            for position in range(num - 1, -1, -1):
                following[k, position] = position if kind_of[position] == kind else following[k, position + 1]
        sets = {frozenset(kinds): 0}
        # The set of the first kinds from a position on, by their number. [positions, kinds + 1]
        first_kinds = np.zeros((num, len(kinds) + 1), dtype=np.int64)
        for position, count in product(range(num), range(1, len(kinds) + 1)):
            nearest = np.argsort(following[:, position], kind="stable")[:count]
            chosen = frozenset(kinds[k] for k in nearest.tolist())
            first_kinds[position, count] = sets.setdefault(chosen, len(sets))
        ends = np.minimum(np.arange(num)[:, None] + most, num)
        num_own = np.sum([of_kind[:-1, None] < ends for of_kind in following], axis=0)
        num_before = np.sum([of_kind[0] < ends for of_kind in following], axis=0)
        self.own = np.take_along_axis(first_kinds, num_own, axis=1)
        self.before = first_kinds[0][num_before]
        self.behind = first_kinds[np.arange(num), (following[:, :num] < num).sum(axis=0)]
        alone = {kind: sets.setdefault(frozenset([kind]), len(sets)) for kind in kinds}
        self.of_device = np.array([alone[kind] for kind in kind_of])
        self.sums = [sums.on_kinds(chosen) for chosen in sets]
