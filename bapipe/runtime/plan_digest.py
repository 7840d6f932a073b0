"""A digest of the parts of a plan that its ranks follow, by which they check that they have the same plan."""

import hashlib

import msgspec

from bapipe.formats.plan import Plan

NUM_DIGITS = 12
"""Hexadecimal digits that are kept of a digest: enough to tell a few plans or files apart."""


def plan_digest(plan: Plan) -> str:
    """Returns a digest of the parts of a plan that ranks follow; others, such as the search time, may differ."""
    what_runs = [
        plan.model, plan.factory, plan.arguments, plan.stages, plan.order, plan.minibatch_size, plan.microbatch_size,
        [device.name for device in plan.cluster.devices],
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(what_runs, order="sorted")).hexdigest()[:NUM_DIGITS]
