"""How good a plan is: the lower bound of every plan of the searched space."""

import re
from collections.abc import Sequence
from math import floor
from typing import Literal

import msgspec

from bapipe.errors import InvalidFile
from bapipe.units import NonNegative, NonNegativeFloat, Positive, Share, decimal


class ReachedGoal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan has the least or the most of, among the plans that are fast enough.

    Attributes:
        quantity: bytes of the device that needs most, devices, or copies of a block of layers.
        value: what the plan has of it.
        bound: no plan needs less memory than this, or fewer devices, or has one copy more than this. If it is the
            value, the goal is reached exactly. 0 if nothing is proven.
        limit_ns: plans are fast enough whose step, or load, takes no longer. If left out, all are.
        of: the block; or of which devices the plans for fewer are, if not of any.
        max_layers: no more copies were tried, as the model would then have more layers than this. If left out, they
            were.
    """

    quantity: Literal["memory", "devices", "copies"]
    value: NonNegative
    bound: NonNegative
    limit_ns: NonNegative | msgspec.UnsetType = msgspec.UNSET
    of: str = ""
    max_layers: Positive | msgspec.UnsetType = msgspec.UNSET


class MemoryLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the plans of a space may use of each device's memory, where that is not all of it.

    Attributes:
        bytes_per_device: left out if only the memory of a device limits it.
        margin: the share that stays free, of a device's memory or, if that is less, of `bytes_per_device`.
    """

    bytes_per_device: NonNegative | msgspec.UnsetType = msgspec.UNSET
    margin: Share = 0.0

    def usable_bytes(self, memory_bytes: int) -> int:
        """Returns how much of its memory a device may use."""
        cap = memory_bytes if self.bytes_per_device is msgspec.UNSET else min(memory_bytes, self.bytes_per_device)
        return floor(cap * (1 - decimal(self.margin))) if self.margin else cap

    @property
    def in_words(self) -> str:
        """The limit as a certificate states it; empty if there is none. The texts are part of plan files."""
        free = f"{self.margin * 100:g}%"
        if self.bytes_per_device is msgspec.UNSET:
            return f"with {free} of each device's memory left free" if self.margin else ""
        most = f"with at most {self.bytes_per_device:,} bytes on each device"
        return f"{most}, of which {free} stay free" if self.margin else most


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How good a plan is.

    Attributes:
        lower_bound_ns: no plan of the space has a shorter step, or with the objective throughput a smaller load.
        gap: step time / lower bound - 1; with the objective throughput, load / lower bound - 1.
        proven_optimal: whether the plan meets the lower bound.
        space: the plans that were searched, in words.
        memory: the limit that the plans of the space keep to; left out if they may use all of each device's memory. The
            bound does not hold for plans that need more.
        goal: what the plan was searched for besides a short step; left out if nothing.
        digest: `Plan.digest` of the plan that it certifies. A plan with another one was changed since; its prediction,
            certificate and alternatives are then dropped. If left out, the plan is taken to be unchanged.
    """

    lower_bound_ns: NonNegative
    gap: NonNegativeFloat
    proven_optimal: bool
    space: str
    memory: MemoryLimit | msgspec.UnsetType = msgspec.UNSET
    goal: ReachedGoal | msgspec.UnsetType = msgspec.UNSET
    digest: str | msgspec.UnsetType = msgspec.UNSET


BY_HAND = " (made by hand; bound from the plan that it was changed from)"
"""How the space of a plan ends that was changed from one which a search had found."""

OVER_LIMIT = "; this plan needs more memory than that limit, so it may be faster than the bound"
"""Behind that, if the search had a memory limit that the plan exceeds."""

# How the space of a pinned plan begins, why that plan lies outside, and the space itself.
_PINNED = re.compile(r"pinned(?P<outside>, which lies outside \(.*?\))?; (?P<space>.*)", flags=re.DOTALL)

GAP_TOLERANCE = 1e-6
"""How far a gap may be from the one that follows from step and bound: other programs write fewer digits."""

_MADE_BY_HAND = "made by hand and not judged: simulate it for its times, pin it for a bound"
NOT_CERTIFIED = Certificate(lower_bound_ns=0, gap=0.0, space=_MADE_BY_HAND, proven_optimal=False)
"""In place of the certificate of a plan whose file holds none."""

_CHANGED = "changed by hand since it was judged: simulate it for its times, pin it for a bound"
CHANGED_BY_HAND = Certificate(lower_bound_ns=0, gap=0.0, space=_CHANGED, proven_optimal=False)
"""In place of the certificate of a plan that was changed since it was certified."""


def certify(
    step_ns: int, lower_bound_ns: int, space: str, memory: MemoryLimit | msgspec.UnsetType = msgspec.UNSET
) -> Certificate:
    """Returns the certificate of a plan whose step time, or load, has this lower bound in the space.

    Args:
        memory: the limit that the plans of the space keep to, if there is one.
    """
    return Certificate(
        lower_bound_ns=lower_bound_ns,
        gap=step_ns / lower_bound_ns - 1 if lower_bound_ns else 0.0,
        proven_optimal=step_ns == lower_bound_ns,
        space=space,
        memory=memory,
    )


def pinned_beside(space: str, outside: Sequence[str]) -> str:
    """Returns the space of a plan that a user pinned; `outside` says why it is not one of the space."""
    which = f", which lies outside ({'; '.join(outside)})" if outside else ""
    return f"pinned{which}; {space}"


def outside_of(certificate: Certificate) -> str | None:
    """Returns why a pinned plan lies outside the space, as a clause; None if the plan is not pinned."""
    match = _PINNED.fullmatch(certificate.space)
    return None if match is None else match["outside"] or ""


def is_of_changed_plan(certificate: Certificate) -> bool:
    """Returns whether the plan was changed by hand from one that a search had found."""
    return certificate.space.removesuffix(OVER_LIMIT).endswith(BY_HAND)


def searched_space(certificate: Certificate) -> str:
    """Returns the plans that were searched, in words, without what is said of a pinned plan beside them."""
    match = _PINNED.fullmatch(certificate.space)
    return certificate.space if match is None else match["space"]


def check_certificate(certificate: Certificate, step_ns: int) -> None:
    """Raises InvalidFile if gap and proof are not those that follow from the step time, or load, and its bound."""
    bound_ns, gap = certificate.lower_bound_ns, certificate.gap
    of_step = f"the plan's own value is {step_ns:,} ns, and its lower bound {bound_ns:,} ns"
    if bound_ns > step_ns:
        raise InvalidFile(f"{of_step}: want a bound that is not larger", "$.certificate.lower_bound_ns")
    if certificate.proven_optimal and bound_ns < step_ns:
        raise InvalidFile(f"the plan is said to be optimal, but {of_step}: want false", "$.certificate.proven_optimal")
    if not certificate.proven_optimal and 0 < bound_ns == step_ns:
        raise InvalidFile(f"the plan is said to be unproven, but {of_step}: want true", "$.certificate.proven_optimal")
    derived = certify(step_ns, bound_ns, certificate.space).gap
    if abs(gap - derived) > GAP_TOLERANCE * (1 + derived):
        raise InvalidFile(f"a gap of {gap:.6g}, but {of_step}: want {derived:.6g}", "$.certificate.gap")
