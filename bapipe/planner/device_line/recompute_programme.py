"""Compiled: chooses in microseconds layers that a stage recomputes so that it fits, nearly those with the minimum F.

Recomputed layers form runs, at whose ends the tensors that pass from or to other layers are kept. Given a price of a
byte, a dynamic programme from layer to layer finds the set of layers that is worth the most. The search keeps two sets,
one that saves too little and one that saves enough. The line between them, in bytes and F, has a price; as long as some
set is worth more at that price, it replaces one of the two (the Lagrange dual of a knapsack). Sets off that line may
still be cheaper than the second one; of these the cheapest single run is tried. `stages/recomputation.py` makes the
exact choice.
"""

from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.compute.arrays import Bools
from bapipe.planner.compute.compiled import compiled, inlined
from bapipe.planner.device_line.search_arrays import LayerItems

MAX_PRICES = 40
"""The maximum number of prices that are tried; for 90 layers it takes two to eight."""


class Need(NamedTuple):
    """What a stage must save.

    Attributes:
        begin, end: its layers.
        kind: the kind of devices whose F counts.
        kept, in_backward: how many micro-batches it holds at once, and how many of these have run their layers again.
        num_bytes: by how much they exceed what it may hold, more than 0.
    """

    begin: int
    end: int
    kind: int
    kept: int
    in_backward: int
    num_bytes: int


class Chosen(NamedTuple):
    """The best run of layers, or the best set at one price.

    Attributes:
        forward_ns: their F; infinite if the stage does not fit, whichever layers are recomputed.
        first, last: the layers are [first, last) if the choice is a single run.
        price: the price at which they are the best set, in ns per byte; infinite if the choice is a single run.
    """

    forward_ns: float
    first: int
    last: int
    price: float


@compiled
def choose_recomputed(items: LayerItems, need: Need, came: NDArray[np.int8]) -> Chosen:
    """Chooses the layers that are recomputed.

    Args:
        came: scratch. [at least the layers of the stage, 2]
    """
    begin, end, forward = need.begin, need.end, items.forward[need.kind]
    chosen = Chosen(forward[end] - forward[begin], begin, end, inf)
    more = _saved(items, need, begin, end)
    if more < need.num_bytes:  # all layers keep what the stage receives, which may be more than a part of them keeps
        price = chosen.forward_ns + 1.0  # a byte is worth more than any F
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
def note_recomputed(items: LayerItems, need: Need, chosen: Chosen, came: NDArray[np.int8], recomputed: Bools) -> None:
    """Stores in `recomputed` the layers of a choice.

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
    """Returns the bytes that recomputing the run of layers [first, last) saves."""
    kept = items.sent[first] + (items.sent[last] if last < need.end else 0)
    stash = items.stash[last] - items.stash[first]
    return float((need.kept - need.in_backward) * stash - need.kept * kept)


@inlined
def _best_at(items: LayerItems, need: Need, price: float, came: NDArray[np.int8]) -> tuple[float, float, int]:
    """Returns what the best set at a price saves, its F, and whether the last layer is in it.

    Args:
        came: for each layer, whether the one before it is in the best set: if the layer is not in it, and if it is.
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
    """Returns the cheapest single run that saves enough if it is cheaper than `chosen`, else `chosen`."""
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
