"""The min-max load problem: cut layers into stages so that the largest load is minimal, for any definition of load.

A *boundary* is a set of nodes that may lie before a cut (a downset of the graph of layers). Boundaries are numbered so
that smaller sets come first: boundary 0 is empty, the last one holds everything. A plan is a path from the first to the
last boundary; a stage holds the nodes between two consecutive boundaries of the path.

`LoadProblem` is the general problem, solved by `min_max_dp`; `HomogeneousLoadProblem` is the one whose devices are all
the same, solved by `min_devices_dp` with a much smaller table. Besides the searches here, `benchmarks/planner` states
the problems of other papers in their terms (`dnn_partitioning.py`, `pipedream.py`), which is why they are protocols.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bapipe.planner.compute.arrays import Bools, Indices, Ints

    LoadArray = NDArray[Any]
    """Loads: 64-bit integers (nanoseconds) or floats."""

END = -1
"""The successor of a state whose stage is the last."""

MAX_STAGES_PER_BLOCK = 1 << 21
"""Stages whose loads are computed in one numpy call; bounds the memory of a search."""

LIMIT_GROWTH = (1.0, 1.02, 1.1, 1.3, 2.0, 4.0, 16.0, 256.0)
"""Multiples of the lower bound that are tried as limits, ascending: a low limit excludes most boundaries and stages."""


class LoadProblem(Protocol):
    """The loads of stages, and which devices the next stage may have.

    A *state* is a number that stands for the devices of a stage, before its layers are chosen. States are numbered
    topologically: every successor of a state has a larger number.
    """

    @property
    def num_boundaries(self) -> int: ...

    @property
    def num_states(self) -> int: ...

    @property
    def starts(self) -> Sequence[int]:
        """The states that a first stage can have."""
        ...

    def successors(self, state: int) -> Sequence[int]:
        """The states that the next stage can have; `END` among them if this stage can be the last."""
        ...

    def begins(self, state: int, limit: float) -> "Bools":
        """Boundaries at which a stage in this state can begin in a plan below the limit; a superset is also correct."""
        ...  # [boundaries]

    def ends(self, state: int, limit: float) -> "Bools":
        """Boundaries at which a stage in this state can end in a plan below the limit; a superset is also correct."""
        ...  # [boundaries]

    def load(self, state: int, begin: "Indices", end: "Indices", limit: float) -> "LoadArray":
        """The loads of the stages from each of `begin` to each of `end`, of shape [begins, ends].

        At least the limit if the boundaries are not nested or the stage does not fit in memory.
        """
        ...


class HomogeneousLoadProblem(Protocol):
    """How many devices a stage needs if all devices are the same. A state of a `StagePath` is a number of devices."""

    @property
    def num_boundaries(self) -> int: ...

    @property
    def num_devices(self) -> int: ...

    @property
    def depends_on_later_devices(self) -> bool:
        """Whether `min_devices` depends on `after`; if so, stages must be computed from the last boundary backwards."""
        ...

    def min_devices(self, begin: "Indices", end: "Indices", after: "Ints", available: "Ints", limit: float) -> "Ints":
        """The fewest devices with which the stages from each of `begin` to each of `end` have loads below the limit.

        Args:
            after: devices that run the layers after each `end`, of shape [ends].
            available: devices that the stage may have, of shape [begins, ends].

        Returns:
            Shape [begins, ends]; more than `num_devices` if `available` devices are not enough.
        """
        ...

    def min_devices_around(self, limit: float) -> "tuple[Ints, Ints]":
        """Lower bounds on the devices that run the layers before, and after, each boundary; [boundaries] each."""
        ...

    def load(self, devices: int, begin: int, end: int) -> float:
        """The load of one stage."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePath:
    """A plan: its boundaries from first to last, the states of the stages between them, and its largest load."""

    load: float
    boundaries: tuple[int, ...]
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinMaxLoad:
    """The best plan, None if none fits, and a proven lower bound on the largest load of every plan."""

    best: StagePath | None
    bound: float
