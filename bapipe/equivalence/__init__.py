"""Holds a traced and split model to the original, before anything trains.

Begin with `check`: `trace_checked` traces a module and compares its finest stages with its own code, with the same
random numbers. `outcome` is what is compared, and the pass of the original; `stages` is the pass of the stages;
`compare` tells rounding from differences; `locate` finds the first module that differs, and `cause` guesses why.
`losses` notices losses that depend on how a mini-batch is cut into micro-batches.
"""

from bapipe.equivalence.check import (
    Difference,
    Equivalence,
    Unchecked,
    compare_split,
    compare_stages,
    example_microbatches,
    trace_checked,
)
from bapipe.equivalence.losses import ignored_target, loss_over_parts
from bapipe.equivalence.outcome import Microbatch

__all__ = [
    "Difference",
    "Equivalence",
    "Microbatch",
    "Unchecked",
    "compare_split",
    "compare_stages",
    "example_microbatches",
    "ignored_target",
    "loss_over_parts",
    "trace_checked",
]
