"""Numbers that a model computes of all samples are told to be means over these where they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bapipe.equivalence.samples_of_model import is_mean_over_samples
from bapipe.tracing.layers import trace

Term = Callable[[Tensor, Tensor, Tensor], Tensor]


class Encoder(nn.Module):
    """Draws by means and logarithms of variances of its own, and returns a number computed from the input and these."""

    def __init__(self, term: Term) -> None:
        super().__init__()
        self.mean, self.variance, self.last, self.term = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(3, 6), term

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = self.mean(x), self.variance(x)
        y = self.last(mean + torch.randn_like(mean) * (variance / 2).exp())
        return y, self.term(x, mean, variance) + 0.1 * mse_loss(y, x)


def divergence(mean: Tensor, variance: Tensor) -> Tensor:
    return (mean.square() + variance.exp() - variance - 1) / 2


@pytest.mark.parametrize(
    ("term", "is_mean"),
    [
        (lambda x, mean, variance: divergence(mean, variance).sum(1).mean(), True),
        (lambda x, mean, variance: divergence(mean, variance).mean(0).mean(), True),
        (lambda x, mean, variance: divergence(mean, variance).sum() / len(x), True),
        (lambda x, mean, variance: divergence(mean, variance).mean().reshape(1), True),
        (lambda x, mean, variance: divergence(mean, variance).sum(), False),
        (lambda x, mean, variance: divergence(mean, variance).mean().square(), False),
        (lambda x, mean, variance: divergence(mean, variance)[mean > 0].mean(), False),
        (lambda x, mean, variance: (variance * (mean > 0)).sum() / (mean > 0).sum(), False),
        (lambda x, mean, variance: mean.var(), False),
        (lambda x, mean, variance: (mean @ mean.T).logsumexp(1).mean(), False),
        (lambda x, mean, variance: (mean - mean.mean(0)).square().mean(), False),
    ],
)
def test_means_over_samples_are_found(term: Term, is_mean: bool) -> None:
    x = torch.randn(4, 6)
    model = trace(Encoder(term), [x])
    assert is_mean_over_samples(model, model.node_of[model.outputs[1]], [x]) == is_mean


class Labels(nn.Module):
    """Computes its loss itself; `-100` among the labels is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.layer(x), labels)


def test_a_mean_over_labels_may_not_be_one_over_samples() -> None:
    inputs = [torch.randn(4, 6), torch.tensor([0, 1, 2, 0])]
    model = trace(Labels(), inputs)
    assert not is_mean_over_samples(model, model.node_of[model.outputs[0]], inputs)
