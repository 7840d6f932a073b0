"""A digest of what the ranks of a plan follow, by which they can tell that they have the same plan."""

import hashlib

import msgspec

from bapipe.formats.plan import Plan

NUM_DIGITS = 12
"""Digits of a digest: enough to tell apart the few things that are mixed up."""


def plan_digest(plan: Plan) -> str:
    """Returns a digest of the parts of a plan that ranks follow; how long a search took, for one, may differ."""
    what_runs = [
        plan.model, plan.factory, plan.arguments, plan.stages, plan.order, plan.minibatch_size, plan.microbatch_size,
        [device.name for device in plan.cluster.devices],
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(what_runs, order="sorted")).hexdigest()[:NUM_DIGITS]
