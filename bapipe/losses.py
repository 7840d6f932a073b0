"""Means for losses, of which a pipeline sees what they are means over."""

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean of values by their weights, such as the losses of words by a mask that leaves out padding.

    A loss that returns it is the same in micro-batches as in one batch, as each counts by its sum of weights; or all
    count alike if the weights depend on what the model returns. Without any weight the mean is 0, as its gradients are.

    Args:
        values: of a floating-point type.
        weights: not negative; of any type, and of a shape that broadcasts to that of the values.
    """
    if has_torch_function((values, weights)):  # such as what `bapipe.equivalence.noted_means` watches losses with
        result: Tensor = handle_torch_function(weighted_mean, (values, weights), values, weights)
        return result
    total = sum_of_weights(values, weights)
    exact = torch.promote_types(values.dtype, torch.float32)  # a sum, or the total, may be too large for float16
    mean = (values.to(exact) * weights).sum() / torch.where(total > 0, total, 1).to(exact)
    return mean.to(values.dtype)


def sum_of_weights(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of the weights of all values, in float64."""
    return weights.detach().expand(values.shape).sum(dtype=torch.float64)
