"""Which layers stages recompute that do not fit, where many plans are tried: nearly the best ones, in microseconds.

The best plan of all gets the best ones at the end (`fewer_recomputed.py`).
"""

from collections.abc import Sequence

import numpy as np

from bapipe.formats.profile import LOSS, ModelProfile
from bapipe.planner.branch_and_bound.recomputation import MemoryLimit
from bapipe.planner.device_line.search_arrays import LayerItems
from bapipe.simulator.interval_costs import cut_bytes, prefix_sums


def layer_items(profiles: Sequence[ModelProfile], microbatch_size: int) -> LayerItems:
    """Returns what layers take on each kind of device, and keep on the first one."""
    measured = [profile.at(microbatch_size) for profile in profiles]
    layers = profiles[0].layers
    return LayerItems(
        forward=np.array([prefix_sums([m.forward_ns for m in of_kind]) for of_kind in measured], dtype=float),
        stash=prefix_sums([m.stash_bytes for m in measured[0]]),
        sent=cut_bytes(profiles[0], microbatch_size)[0],
        num_alone=len(layers) - (layers[-1].name == LOSS),
    )


def recomputed_layers(
    items: LayerItems, begin: int, end: int, kind: int, limits: Sequence[MemoryLimit]
) -> frozenset[int]:
    """Returns layers of a stage with which it fits if they are recomputed: all of them if no others are found.

    Args:
        kind: of the device whose times count, by its place in `items`.
        limits: the states of its replicas in which its stashes must fit.
    """
    from bapipe.planner.device_line.recompute_programme import Need, choose_recomputed, note_recomputed

    stash = np.diff(items.stash[begin : end + 1])
    needs = {(x.kept, x.in_backward, int(x.kept * stash.sum()) - x.room_bytes) for x in limits}
    came, recomputed = np.empty((end - begin, 2), dtype=np.int8), np.zeros(end - begin, dtype=np.bool_)

    def fits(kept: int, in_backward: int, num_bytes: int) -> bool:
        are_ends = np.diff(recomputed, prepend=False)  # where a run begins or ends
        passed_on = items.sent[begin:end][are_ends].sum()
        return int((kept - in_backward) * stash[recomputed].sum() - kept * passed_on) >= num_bytes

    for kept, in_backward, num_bytes in sorted(needs, key=lambda need: need[2] / max(1, need[0] - need[1]))[::-1]:
        if num_bytes > 0:
            need = Need(begin, end, kind, kept, in_backward, num_bytes)
            chosen = choose_recomputed(items, need, came)
            if chosen.forward_ns < np.inf:
                note_recomputed(items, need, chosen, came, recomputed)
                if all(fits(*each) for each in needs):
                    return frozenset((begin + np.flatnonzero(recomputed)).tolist())
    return frozenset(range(begin, end))
