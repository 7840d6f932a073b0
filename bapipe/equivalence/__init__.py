"""Holds a traced and split model to the original, before anything trains.

Begin with `check`: `trace_checked` traces a module and compares its finest stages with its own code, with the same
random numbers. `outcome` is what is compared, and the pass of the original; `stages` and `stage_pass` are the pass of
the stages, by whole backwards or as a plan runs them;
`compare` tells rounding from differences; `locate` finds the first module that differs, and `cause` guesses why.
`earlier_forwards` finds the layers that keep values from one forward to the next.
`losses` notices losses that depend on how a mini-batch is cut into micro-batches, `mixed_samples` such models, and
`first_samples` such losses when training begins.
`target_weights` tells how much a micro-batch counts in a loss that computes means over targets, which `noted_means`
sees; for that losses run once more, and `reached_state` puts back what they keep.
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
from bapipe.equivalence.earlier_forwards import layers_that_read_earlier_forwards
from bapipe.equivalence.first_samples import FirstSamples
from bapipe.equivalence.losses import check_no_parameters, check_scalar, loss_over_parts
from bapipe.equivalence.mixed_samples import outputs_over_parts
from bapipe.equivalence.outcome import Conditions, Loss, Microbatch, run_original
from bapipe.equivalence.stage_pass import Stage
from bapipe.equivalence.target_weights import (
    Means,
    MeanWeights,
    WeightedLoss,
    WeightsAhead,
    counting_alike,
    mean_weights,
    sums_of_weights,
    weighted_loss,
)

__all__ = [
    "Conditions",
    "Difference",
    "Equivalence",
    "FirstSamples",
    "Loss",
    "MeanWeights",
    "Means",
    "Microbatch",
    "Stage",
    "Unchecked",
    "WeightedLoss",
    "WeightsAhead",
    "check_no_parameters",
    "check_scalar",
    "compare_split",
    "compare_stages",
    "counting_alike",
    "example_microbatches",
    "layers_that_read_earlier_forwards",
    "loss_over_parts",
    "mean_weights",
    "outputs_over_parts",
    "run_original",
    "sums_of_weights",
    "trace_checked",
    "weighted_loss",
]
