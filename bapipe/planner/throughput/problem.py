"""Where to cut so that the largest load is least: one question, whatever a load is.

*Boundaries* are sets of nodes that may lie before a cut, in an order in which smaller sets come first: the first holds
nothing, the last everything. A plan goes from the first to the last one. What lies between two boundaries is a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[Any]
    """Loads, 64-bit integers or floats."""
    Indices = NDArray[np.intp]
    Flags = NDArray[np.bool_]

END = -1
"""What follows the last stage."""


class LoadProblem(Protocol):
    """What loads stages, and which devices may follow which.

    A *state* is a number that says where a stage runs, before its layers are chosen. A state comes after every state
    that can be followed by it.
    """

    @property
    def num_boundaries(self) -> int: ...

    @property
    def num_states(self) -> int: ...

    @property
    def starts(self) -> Sequence[int]:
        """The states of a first stage."""
        ...

    def followers(self, state: int) -> Sequence[int]:
        """The states of the next stage; `END` where this one can be the last."""
        ...

    def beginnings(self, state: int, limit: float) -> "Flags":
        """Boundaries at which a stage in this state can begin where all loads are below a limit; more do no harm."""
        ...

    def endings(self, state: int, limit: float) -> "Flags":
        """Boundaries at which it can end."""
        ...

    def load(self, state: int, begin: "Indices", end: "Indices", limit: float) -> "Numbers":
        """The loads of stages from each of `begin` to each of `end`, as a table.

        At least the limit where there is no such stage, or it does not fit.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePath:
    """A plan: the boundaries from first to last, the states between them, and its largest load."""

    load: float
    boundaries: tuple[int, ...]
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoad:
    """The best plan found, None where none fits, and a load that no plan is below."""

    best: StagePath | None
    bound: float
