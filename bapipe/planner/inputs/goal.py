"""Goals besides the shortest step: the least memory, the fewest devices, or the largest model that fits."""

from dataclasses import dataclass
from typing import Literal

from bapipe.errors import BapipeError
from bapipe.field_types import check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a plan shall have the least or the most of, and how fast it must be all the same.

    Attributes:
        least: the peak memory of a device, or the number of devices.
        largest: in place of `least`, a block of layers of which the plan shall have as many copies in a row as fit: the
            name of a layer, what the names of several begin with, or `FIRST..LAST`. Models of up to 2,000 layers are
            tried.
        within: how much longer than the shortest step the plan's may be, as a share of it: 0.05 for 5 %.
        min_throughput: in place of `within`, the samples per second that the plan must reach. With neither, any plan
            that fits is fast enough.

    Raises:
        BapipeError: not exactly one of `least` and `largest`, both of `within` and `min_throughput`, or a value that is
            of another type or out of range.
    """

    least: Literal["memory", "devices"] | None = None
    largest: str | None = None
    within: float | None = None
    min_throughput: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.least is None) == (self.largest is None):
            raise BapipeError("a goal is either `least` memory or devices, or `largest` with a block: give one of them")
        if self.within is not None and self.min_throughput is not None:
            raise BapipeError("`within` and `min_throughput` both say how fast a plan must be: give one of them")
        if self.largest is not None and self.within is not None:
            raise BapipeError(
                "`within` compares steps of one model, and `largest` looks at several: use `min_throughput`"
            )
        if self.within is not None and not 0 <= self.within <= 100:
            raise BapipeError(f"`within` {self.within:g}: want a share from 0 to 100, such as 0.05 for 5 %")
        if self.min_throughput is not None and not 0 < self.min_throughput < float("inf"):
            raise BapipeError(f"`min_throughput` {self.min_throughput:g}: want a positive number of samples per second")
