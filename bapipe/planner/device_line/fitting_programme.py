"""Compiled: the cuts of a plan that fit, moved by the fewest boundaries in all."""

from typing import NamedTuple

from bapipe.planner.compiled import compiled
from bapipe.planner.device_line.search_arrays import Ints


class FittingLayers(NamedTuple):
    """What layers hold on a device, in bytes.

    Attributes:
        state, stash, left: sums over the layers before each boundary: of parameters, gradients and states of the
            optimizer, of stashes, and of what I leaves for W. [boundaries]
        sent, returned: of the cut at each boundary, forwards and backwards. [boundaries]
        workspace: the largest one between each boundary and the next. [boundaries - 1]
    """

    state: Ints
    stash: Ints
    left: Ints
    sent: Ints
    returned: Ints
    workspace: Ints


class FittingStages(NamedTuple):
    """What the stages of a plan have to fit in. All [stages]

    Attributes:
        kept, in_backward, before_weight_grad: micro-batches of a replica that are held at once, see `InFlight`.
        num_each: all of those of a replica.
        limit: bytes that each device may hold.
    """

    kept: Ints
    in_backward: Ints
    before_weight_grad: Ints
    num_each: Ints
    limit: Ints


@compiled
def held_bytes(
    layers: FittingLayers, stages: FittingStages, recomputes: bool, s: int, i: int, j: int, workspace: int
) -> int:
    """Returns what stage `s` holds with the layers between two boundaries, recomputed or not.

    Args:
        workspace: the largest one of the layers.
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
def nearest_cuts(
    layers: FittingLayers,
    stages: FittingStages,
    may_recompute: bool,
    wanted: Ints,
    moved: Ints,
    begins: Ints,
    max_tried: int,
) -> bool:
    """Finds cuts with which all stages fit; returns whether it has tried all, which are no more than `max_tried`.

    Args:
        wanted: the boundaries at which the stages should end. [stages]
        moved: noted: by how many boundaries the cuts up to each one are moved in all, -1 where none fit; of the stages
            before the last one, and of all, by turns. [2, boundaries]
        begins: noted: where the stage begins that ends at each boundary. [stages, boundaries]
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
                    break  # more layers hold more but for what crosses the cuts
                num_tried += 1
                workspace = max(workspace, layers.workspace[j - 1])
                if fits(layers, stages, may_recompute, s, i, j, workspace):
                    total = before[i] + abs(j - wanted[s])
                    if after[j] < 0 or total < after[j]:
                        after[j], begins[s, j] = total, i
            if num_tried > max_tried:
                return False
    return True
