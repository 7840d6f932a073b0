"""Compiled: which layers of a stage are recomputed so that it fits, in microseconds: nearly those of the least F.

Recomputed layers lie in runs, at whose ends the tensors that pass from or to other layers are kept. At a price for a
byte, the set that is worth the most is found from layer to layer. The line from one set to another that saves more has
a price: as long as a set is worth more at it, that takes the place of one of the two, so that one saves less than what
must be saved and the other one no less (the Lagrange dual of a knapsack). Between them may be sets on neither side of
the line, of which the cheapest single run is tried. `stages/recomputation.py` makes the exact choice.
"""

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.search_arrays import LayerItems

MAX_PRICES = 40
"""So many are tried at most; of 90 layers it is two to eight."""


class Need(NamedTuple):
    """What a stage must save.

    Attributes:
        begin, end: its layers.
        kind: of the devices whose F counts.
        kept, in_backward: micro-batches that it holds at once, and those of them whose layers run again by then.
        num_bytes: by which they exceed what it may hold, more than 0.
    """

    begin: int
    end: int
    kind: int
    kept: int
    in_backward: int
    num_bytes: int


class Chosen(NamedTuple):
    """A choice of layers.

    Attributes:
        forward_ns: their F; infinite if the stage does not fit, whichever are recomputed.
        first, last: they are [first, last), if it is a single run.
        price: what they are the best set at, in ns for a byte; infinite if it is a single run.
    """

    forward_ns: float
    first: int
    last: int
    price: float


@compiled
def choose_recomputed(items: LayerItems, need: Need, came: NDArray[np.int8]) -> Chosen:
    """Chooses the layers that are recomputed.

    Args:
        came: of no use afterwards. [layers of the stage or more, 2]
    """
    begin, end, forward = need.begin, need.end, items.forward[need.kind]
    chosen = Chosen(forward[end] - forward[begin], begin, end, inf)
    more = _saved(items, need, begin, end)
    if more < need.num_bytes:  # all layers keep what the stage receives, which may be more than a part of them keeps
        price = chosen.forward_ns + 1.0  # no F is worth a byte
        more, forward_ns, _ = _best_at(items, need, price, came)
        chosen = Chosen(forward_ns, begin, end, price)
    if more < need.num_bytes:
        return Chosen(inf, begin, end, inf)
    less = less_ns = 0.0
    for _ in range(MAX_PRICES):
        price = (chosen.forward_ns - less_ns) / (more - less)
        saved, forward_ns, _ = _best_at(items, need, price, came)
        worth = price * saved - forward_ns
        if worth <= (price * less - less_ns) * (1 + 1e-9) + 1e-9 * forward_ns:
            break
        if saved >= need.num_bytes:
            more, chosen = saved, Chosen(forward_ns, begin, end, price)
        else:
            less, less_ns = saved, forward_ns
    return _best_run(items, need, chosen)


@compiled
def note_recomputed(
    items: LayerItems, need: Need, chosen: Chosen, came: NDArray[np.int8], recomputed: NDArray[np.bool_]
) -> None:
    """Notes the layers of a choice.

    Args:
        came: see `choose_recomputed`.
        recomputed: [layers of the stage]
    """
    state = 0
    if chosen.price < inf:
        state = _best_at(items, need, chosen.price, came)[2]
    for x in range(need.end - 1, need.begin - 1, -1):
        if chosen.price < inf:
            recomputed[x - need.begin] = state == 1
            state = came[x - need.begin, state]
        else:
            recomputed[x - need.begin] = chosen.first <= x < chosen.last


@inlined
def _saved(items: LayerItems, need: Need, first: int, last: int) -> float:
    """The bytes that the run of layers [first, last) saves."""
    kept = items.sent[first] + (items.sent[last] if last < need.end else 0)
    stash = items.stash[last] - items.stash[first]
    return float((need.kept - need.in_backward) * stash - need.kept * kept)


@inlined
def _best_at(items: LayerItems, need: Need, price: float, came: NDArray[np.int8]) -> tuple[float, float, int]:
    """Returns what the best set at a price saves, its F, and whether the last layer is in it.

    Args:
        came: for each layer whether the one before it is in the best set, if it is not, and if it is.
    """
    forward, num_saved = items.forward[need.kind], float(need.kept - need.in_backward)
    out_saved = out_ns = out_worth = 0.0  # of the best set without the last layer,
    in_saved, in_ns, in_worth = 0.0, 0.0, -inf  # and with it
    for x in range(need.begin, need.end):
        kept = float(need.kept * items.sent[x])
        ns, bytes_ = forward[x + 1] - forward[x], num_saved * (items.stash[x + 1] - items.stash[x])
        ends, begins = in_worth - price * kept > out_worth, out_worth - price * kept > in_worth
        came[x - need.begin, 0], came[x - need.begin, 1] = 1 if ends else 0, 0 if begins else 1
        next_saved, next_ns, next_worth = in_saved, in_ns, in_worth
        if begins:
            next_saved, next_ns, next_worth = out_saved - kept, out_ns, out_worth - price * kept
        if ends:
            out_saved, out_ns, out_worth = in_saved - kept, in_ns, in_worth - price * kept
        in_saved, in_ns, in_worth = next_saved + bytes_, next_ns + ns, next_worth + price * bytes_ - ns
        if x >= items.num_alone:
            in_worth = -inf
    if in_worth > out_worth:
        return in_saved, in_ns, 1
    return out_saved, out_ns, 0


@inlined
def _best_run(items: LayerItems, need: Need, chosen: Chosen) -> Chosen:
    """Returns the cheapest single run that saves enough, if it is cheaper than a choice; else that."""
    forward, end = items.forward[need.kind], min(need.end, items.num_alone)
    last = need.begin + 1
    for first in range(need.begin, end):
        last = max(last, first + 1)
        while last < end and _saved(items, need, first, last) < need.num_bytes:
            last += 1
        ns = forward[last] - forward[first]
        if ns < chosen.forward_ns and _saved(items, need, first, last) >= need.num_bytes:
            chosen = Chosen(ns, first, last, inf)
    return chosen
