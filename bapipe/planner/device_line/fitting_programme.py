"""Compiled: plans that fit, by dynamic programmes over boundaries: for given numbers of replicas, and for any."""

from math import inf
from typing import NamedTuple

import numpy as np

from bapipe.planner.compute.arrays import Floats, Ints
from bapipe.planner.compute.compiled import compiled, inlined


class FittingLayers(NamedTuple):
    """What layers hold on a device, in bytes.

    Attributes:
        state, stash, left: sums over the layers before each boundary: of parameters, gradients and states of the
            optimizer, of stashes, and of what I leaves for W. [boundaries]
        sent, returned: the bytes that pass the cut at each boundary, forwards and backwards. [boundaries]
        workspace: the largest workspace of the layers between each boundary and the next. [boundaries - 1]
    """

    state: Ints
    stash: Ints
    left: Ints
    sent: Ints
    returned: Ints
    workspace: Ints


class FittingStages(NamedTuple):
    """What the stages of a plan, or stages on one device each, have to fit in. All [stages]

    Attributes:
        kept, in_backward, before_weight_grad: how many micro-batches of a replica are held at once, see `InFlight`.
        num_each: how many micro-batches a replica has in all.
        limit: bytes that each device may hold.
    """

    kept: Ints
    in_backward: Ints
    before_weight_grad: Ints
    num_each: Ints
    limit: Ints


@inlined
def held_bytes(
    layers: FittingLayers, stages: FittingStages, recomputes: bool, s: int, i: int, j: int, workspace: int
) -> int:
    """Returns what stage `s` holds with the layers between two boundaries, recomputed or not.

    Args:
        workspace: the largest workspace of the layers.
    """
    stash, received = layers.stash[j] - layers.stash[i], layers.sent[i]
    held = layers.state[j] - layers.state[i] + workspace + stages.num_each[s] * (received + layers.returned[j])
    if layers.returned[i] > 0:  # a stage that sends no gradient back has no I that leaves anything
        held += stages.before_weight_grad[s] * (layers.left[j] - layers.left[i])
    if recomputes:
        return int(held + stages.kept[s] * received + stages.in_backward[s] * stash)
    return int(held + stages.kept[s] * stash)


@compiled
def fits(
    layers: FittingLayers, stages: FittingStages, may_recompute: bool, s: int, i: int, j: int, workspace: int
) -> bool:
    """Returns whether stage `s` fits with the layers between two boundaries."""
    limit = stages.limit[s]
    if held_bytes(layers, stages, False, s, i, j, workspace) <= limit:
        return True
    return may_recompute and held_bytes(layers, stages, True, s, i, j, workspace) <= limit


@compiled
def nearest_fitting_cuts(
    layers: FittingLayers,
    stages: FittingStages,
    may_recompute: bool,
    wanted: Ints,
    moved: Ints,
    begins: Ints,
    max_tried: int,
) -> bool:
    """Finds cuts with which all stages fit; returns False if that took more than `max_tried` stages.

    Args:
        wanted: the boundaries at which the stages should end. [stages]
        moved: output: by how many boundaries the cuts up to each boundary are moved in total, -1 where none fit; stages
            use the two rows alternately. [2, boundaries]
        begins: output: where the stage begins that ends at each boundary. [stages, boundaries]
    """
    num_stages, num = begins.shape
    moved[:] = -1
    moved[0, 0] = 0
    num_tried = 0
    for s in range(num_stages):
        before, after, last_end = moved[s % 2], moved[(s + 1) % 2], num - num_stages + s
        least = stages.in_backward[s] if may_recompute else stages.kept[s]
        after[:] = -1
        for i in range(s, last_end):
            workspace = 0
            for j in range(i + 1, last_end + 1 if before[i] >= 0 else 0):
                state, stash = layers.state[j] - layers.state[i], layers.stash[j] - layers.stash[i]
                if state + least * stash > stages.limit[s]:
                    break  # more layers hold more, except for what crosses the cuts
                num_tried += 1
                workspace = max(workspace, layers.workspace[j - 1])
                if fits(layers, stages, may_recompute, s, i, j, workspace):
                    total = before[i] + abs(j - wanted[s])
                    if after[j] < 0 or total < after[j]:
                        after[j], begins[s, j] = total, i
            if num_tried > max_tried:
                return False
    return True


@compiled
def fitting_stages(
    layers: FittingLayers,
    devices: FittingStages,
    may_recompute: bool,
    forward: Floats,
    work: Floats,
    speeds: Floats,
    sizes: Ints,
    stage: FittingStages,
    longest: Floats,
    origins: Ints,
    max_tried: int,
) -> int:
    """Finds stages that fit and minimize the work of the busiest replica.

    Args:
        devices: what a stage on each device alone has to fit in.
        forward, work: sums over the layers before each boundary: of F, and of F and B. [boundaries]
        speeds: of the devices. [devices]
        sizes: the numbers of devices that a stage may have, ascending.
        stage: room for one stage. [1]
        longest: output: the minimum work of the busiest replica, by the number of devices and up to each boundary.
            [devices + 1, boundaries]
        origins: output: the devices and the boundary before the last of these stages. [devices + 1, boundaries, 2]
        max_tried: the maximum number of stages to try.

    Returns:
        The number of devices of the best stages, 0 if none are found.
    """
    num_devices, num, num_tried = speeds.size, work.size, 0
    only = int(np.int64(0))  # a constant would make numba compile `fits` once more
    longest[:] = inf
    longest[0, 0] = 0.0
    for p in range(num_devices):
        limit, slowest, known = devices.limit[p], speeds[p], 0
        for size in sizes:
            if p + size > num_devices:
                break
            for device in range(p + known, p + size):
                limit, slowest = min(limit, devices.limit[device]), min(slowest, speeds[device])
            known = size
            _share(devices, p, size, limit, stage)
            least = stage.in_backward[0] if may_recompute else stage.kept[0]
            for i in range(num - 1):
                workspace = 0
                for j in range(i + 1, num if longest[p, i] < inf else 0):
                    state, stash = layers.state[j] - layers.state[i], layers.stash[j] - layers.stash[i]
                    if state + least * stash > limit:
                        break
                    num_tried += 1
                    workspace = max(workspace, layers.workspace[j - 1])
                    if not fits(layers, stage, may_recompute, only, i, j, workspace):
                        continue
                    own = work[j] - work[i]
                    if held_bytes(layers, stage, False, only, i, j, workspace) > limit:
                        own += forward[j] - forward[i]
                    busiest = max(longest[p, i], stage.num_each[0] * own / slowest)
                    if busiest < longest[p + size, j]:
                        longest[p + size, j], origins[p + size, j, 0], origins[p + size, j, 1] = busiest, p, i
            if num_tried > max_tried:
                return 0
    best = 0
    for p in range(1, num_devices + 1):
        if longest[p, num - 1] < longest[best, num - 1]:
            best = p
    return best


@inlined
def _share(devices: FittingStages, p: int, size: int, limit: int, stage: FittingStages) -> None:
    """Stores in `stage` what a stage on `size` devices from `p` on has to fit in."""
    stage.kept[0] = -(-devices.kept[p] // size)
    stage.in_backward[0] = -(-devices.in_backward[p] // size)
    stage.before_weight_grad[0] = -(-devices.before_weight_grad[p] // size)
    stage.num_each[0] = -(-devices.num_each[p] // size)
    stage.limit[0] = limit
