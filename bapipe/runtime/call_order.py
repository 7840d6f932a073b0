"""The calls of a pipeline, such as steps and evaluations, which its processes make together and in the same order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

NUM_TAGS = 2**30
"""Tags of transfers are smaller than this."""

_NUM_LATEST = 8
"""A process is at most a call or two ahead of the others, as it needs their tensors."""


class Call(NamedTuple):
    """A call of a pipeline: its number in the order of calls, and what is called, such as "`evaluate` of 4 samples"."""

    number: int
    what: str


@dataclass(slots=True)
class CallOrder:
    """The calls of a pipeline, seen from one process.

    Attributes:
        latest: the last calls, the last one at the end.
        tag: of the transfers of the last call, the same in all processes that make it. gloo gives a receive no tensors
            of another tag, so those of another call are never taken for its own.
        is_under_way: whether the last call has begun to exchange tensors.
    """

    latest: tuple[Call, ...] = ()
    tag: int = 0
    is_under_way: bool = False

    def begin(self, what: str) -> Call:
        """Begins a call, which it returns."""
        call = Call(self.latest[-1].number + 1 if self.latest else 1, what)
        self.latest = (*self.latest[1 - _NUM_LATEST :], call)
        self.tag = crc32(f"{call.number} {what}".encode()) % NUM_TAGS
        self.is_under_way = False
        return call


def first_difference(some: Sequence[Call], others: Sequence[Call]) -> tuple[str, str] | None:
    """Returns what two processes have called where their orders first differ, or None: as far as both are known."""
    what = dict(others)
    different = (call for call in some if what.get(call.number, call.what) != call.what)
    return next(((call.what, what[call.number]) for call in different), None)
