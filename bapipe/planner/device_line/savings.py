"""Sums for `least_again` of `stage_limits.py`: a lower bound on what a stage of GPipe must recompute."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bapipe.formats.profile import ModelProfile
from bapipe.planner.compute.arrays import Floats
from bapipe.planner.device_line.stage_arrays import Savings

MAX_RATES = 8
"""The maximum number of rates (ns of F per byte of stash) that are tried."""


def savings_of(
    profiles: Sequence[ModelProfile], size: int, cuts: Sequence[int], forward_ns: Floats, returned: Floats
) -> Savings:
    """Returns, for a range of prices in ns of F per byte, the value of recomputing up to each boundary.

    The prices are ratios of F to stash bytes of some of the layers. A dynamic programme from layer to layer, whose
    states are whether a layer is recomputed.

    Args:
        profiles: those of all kinds of devices; the minimum over them counts.
        forward_ns: a lower bound for each layer. [layers]
        returned: see `LayerSums`.
    """
    stash_bytes = np.min([[m.stash_bytes for m in profile.at(size)] for profile in profiles], axis=0).astype(float)
    rates = np.unique(forward_ns[stash_bytes > 0] / stash_bytes[stash_bytes > 0])
    chosen = np.linspace(0, rates.size - 1, min(MAX_RATES, rates.size)).astype(int)
    rates = rates[np.unique(chosen)]
    worth = np.outer(rates, stash_bytes)  # the bytes of each layer, [rates, layers]
    kept = np.outer(rates, np.min([_passed_on(profile, size) for profile in profiles], axis=0))
    reached, begun = np.zeros(kept.shape), np.full(kept.shape, np.inf)
    no_run, in_run = np.zeros(rates.size), np.full(rates.size, -np.inf)
    for k, ns in enumerate(forward_ns):
        in_run = np.maximum(in_run, no_run - kept[:, k])
        begun[:, k] = in_run + kept[:, k]
        in_run = in_run + worth[:, k] - ns
        no_run = np.maximum(no_run, in_run - kept[:, k + 1])
        reached[:, k + 1] = np.maximum(no_run, in_run)
    begun = np.minimum.accumulate(begun[:, ::-1], axis=1)[:, ::-1]
    both = np.stack([begun, begun])  # of the first stage, and of others, which begin after a layer
    both[1, :, 0] = begun[:, 1]
    for k in range(len(forward_ns)):  # it rises by no more than the bytes are worth
        both[:, :, k + 1] = np.minimum(both[:, :, k + 1], both[:, :, k] + worth[:, k])
    at = np.asarray(cuts)
    reached, both = np.ascontiguousarray(reached[:, at]), np.ascontiguousarray(both[:, :, at])
    for k, rate in enumerate(rates.tolist()):  # buffers at the end of a stage are bytes that must be saved besides
        added = np.minimum(stash_bytes, forward_ns / rate if rate > 0 else np.inf)
        sums = np.concatenate([[0.0], np.cumsum(added)])[at]
        reached[k] -= rate * (with_returned(sums, returned) - sums)
    return Savings(rates, reached, both)


def with_returned(sums: Floats, returned: Floats) -> Floats:
    """Adds, to sums over the layers before each boundary, the bytes that come back to a stage that ends there.

    The last stage gets nothing back. Each sum is lowered to the minimum over this and all later boundaries, so that the
    sums never fall; the buffers thus count in part.
    """
    return np.minimum.accumulate((sums + returned)[::-1])[::-1]


def no_savings(num_boundaries: int) -> Savings:
    """Returns the sums for stages that recompute nothing."""
    return Savings(np.empty(0), np.empty((0, num_boundaries)), np.empty((2, 0, num_boundaries)))


def _passed_on(profile: ModelProfile, size: int) -> list[int]:
    """The bytes that each layer takes from the one before it, 0 at both ends. [layers + 1]"""
    neighbours = zip(pairwise(profile.layers), profile.at(size), strict=False)
    passed = [
        sum(
            num_bytes
            for tensor, num_bytes in zip(before.outputs, measured.output_bytes, strict=True)
            if tensor in after.inputs
        )
        for (before, after), measured in neighbours
    ]
    return [0, *passed, 0]
