"""Chooses the layers to recompute in stages that do not fit, while many plans are tried: nearly the best, but fast.

The best plan of all gets the best ones at the end (`fewer_recomputed.py`).
"""

from collections.abc import Sequence

import numpy as np

from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.planner.device_line.search_arrays import LayerItems
from bapipe.simulator.in_flight import InFlight
from bapipe.simulator.interval_costs import cut_bytes, prefix_sums


def layer_items(profiles: Sequence[ModelProfile], microbatch_size: int) -> LayerItems:
    """Returns the times of layers on each kind of device, and the bytes that they keep on the first kind."""
    measured = [profile.at(microbatch_size) for profile in profiles]
    layers = profiles[0].layers
    return LayerItems(
        forward=np.array([prefix_sums([m.forward_ns for m in of_kind]) for of_kind in measured], dtype=float),
        stash=prefix_sums([m.stash_bytes for m in measured[0]]),
        sent=cut_bytes(profiles[0], microbatch_size)[0],
        num_alone=len(layers) - (layers[-1].name == LOSS),
    )


def recomputed_layers(
    items: LayerItems, begin: int, end: int, kind: int, held: InFlight, room_bytes: int
) -> frozenset[int]:
    """Returns layers of a stage that make it fit if they are recomputed; all of them if no such choice is found.

    Args:
        kind: the kind of device whose times count, as an index into `items`.
        held: the maximum numbers of micro-batches that a replica holds.
        room_bytes: the bytes in which their stashes must fit.
    """
    from bapipe.planner.device_line.recompute_programme import Need, choose_recomputed, note_recomputed

    num_bytes = held.kept * int(items.stash[end] - items.stash[begin]) - room_bytes
    need = Need(begin, end, kind, held.kept, held.in_backward, num_bytes)
    came, recomputed = np.empty((end - begin, 2), dtype=np.int8), np.ones(end - begin, dtype=np.bool_)
    chosen = choose_recomputed(items, need, came)
    if chosen.forward_ns < np.inf:
        note_recomputed(items, need, chosen, came, recomputed)
    return frozenset((begin + np.flatnonzero(recomputed)).tolist())
