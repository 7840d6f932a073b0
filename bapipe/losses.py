"""Mean reductions for losses that tell the pipeline the sum of weights they average over."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from bapipe.errors import BapipeError


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean of values by their weights, such as the losses of words by a mask that leaves out padding.

    A loss that returns it is the same in micro-batches as in one batch, as each counts by its sum of weights; or all
    count alike if the weights depend on what the model returns. Without any weight the mean is 0, as its gradients are.
    Values without weight do not count, even if they are not finite, and their gradients are 0.

    Args:
        values: of a floating-point type.
        weights: not negative; of any real type, and of a shape that broadcasts to that of the values.

    Raises:
        BapipeError: values or weights are of another type.
    """
    if has_torch_function((values, weights)):  # such as what `bapipe.equivalence.noted_means` watches losses with
        result: Tensor = handle_torch_function(weighted_mean, (values, weights), values, weights)
        return result
    if not values.is_floating_point():
        raise BapipeError(f"`values` are of type {values.dtype}: want the losses, of a floating-point type")
    if weights.is_complex():
        raise BapipeError(f"`weights` are of type {weights.dtype}: want real numbers, not negative")
    total = sum_of_weights(values, weights)
    exact = torch.promote_types(values.dtype, torch.float32)  # a sum, or the total, may be too large for float16
    counted = torch.where((weights != 0) | values.isfinite(), values, 0)  # 0 times infinity is NaN
    mean = (counted.to(exact) * weights).sum() / torch.where(total > 0, total, 1).to(exact)
    return mean.to(values.dtype)


def sum_of_weights(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of the weights of all values, in float64."""
    return weights.detach().expand(values.shape).sum(dtype=torch.float64)
