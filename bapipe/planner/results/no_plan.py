"""What an error from one part of a search (a grouping, an order of the layers) leaves: the bound that still holds, and
the error of the whole search if no part has a plan. What to try where nothing fits in memory.
"""

from collections.abc import Sequence

from bapipe.errors import BapipeError, ConstraintsUnmet, Infeasible
from bapipe.formats.layer_profile import LayerProfile
from bapipe.planner.compute.deadline import OutOfTime


def bounds_without_plan(error: BapipeError) -> tuple[int, ...]:
    """Returns the lower bound that remains of a part; none if it is proven to have no plan."""
    if isinstance(error, OutOfTime):
        return (error.lower_bound_ns,)
    if isinstance(error, Infeasible | ConstraintsUnmet) and not error.is_proven:
        return (0,)  # it may have the fastest plan of all
    return ()


def error_of_all(errors: Sequence[BapipeError]) -> BapipeError:
    """Returns the error of a space of which each part has one.

    The first that proves nothing, as then nothing is proven of the space; else the first that says that nothing fits;
    else the first, about constraints or sizes.
    """
    return min(errors, key=_what_it_says)


def _what_it_says(error: BapipeError) -> int:
    if bounds_without_plan(error):
        return 0
    return 1 if isinstance(error, Infeasible) else 2


def what_to_try(layers: Sequence[LayerProfile], limits: Sequence[int], microbatch_size: int) -> str:
    """Returns a sentence about what would help where nothing fits.

    Args:
        limits: what each device may hold, in bytes.
        microbatch_size: that of the plan that lacks the least.
    """
    # Without activations, so that the sentence holds for any micro-batch size.
    sizes = [layer.param_bytes + layer.gradient_bytes + layer.optimizer_state_bytes for layer in layers]
    num_bytes, max_limit = max(sizes), max(limits)
    if num_bytes > max_limit:
        largest = layers[sizes.index(num_bytes)]
        return (
            f"'{largest.name}' alone takes {num_bytes:,} bytes for its parameters, gradients and optimizer state, more "
            f"than any device may hold ({max_limit:,}): only devices with more memory, or smaller layers, would do"
        )
    smaller = "smaller micro-batches, " if microbatch_size > 1 else "devices with more memory, "
    return f"Try more devices, {smaller}or a smaller mini-batch"
