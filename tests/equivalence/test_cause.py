"""What the comparison says where the model's or the loss's own code fails, or what the code names is the likely cause."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from bapipe.equivalence.cause import likely_cause
from bapipe.equivalence.check import Unchecked, compare_split, example_microbatches
from bapipe.tracing.layers import trace

CPU = torch.device("cpu")


class Derivative(nn.Module):
    """A network and its derivative, as physics-informed ones have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)[0]


class Frozen(nn.Module):
    """Trains its layer for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.requires_grad_(len(x) > 2)
        y: Tensor = self.inner(x)
        return y


def test_derivatives_are_the_cause_before_what_they_need() -> None:
    of_both, of_parameters = (likely_cause(one, "", "the loss differs", False) for one in (Derivative(), Frozen()))
    assert "takes derivatives of outputs with respect to inputs" in of_both.text
    assert "changes which parameters have gradients" in of_parameters.text


class Normalizes(nn.Module):
    """Over the samples, if there are several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if x.shape[0] > 1:
            y = y - y.mean(0)
        z: Tensor = self.b(y.tanh())
        return z


class OtherWeights(nn.Module):
    """Calls a layer with weights that it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()) * 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: value * self.scale for name, value in self.a.named_parameters()}
        y: Tensor = torch.func.functional_call(self.a, weights, (x,))
        return y


def difference(module: nn.Module, size: int) -> str:
    inputs, target = (torch.randn(4, 2),), torch.randn(4, 2)
    microbatches = example_microbatches(inputs, target, (size, size, size), CPU)
    return str(compare_split(trace(module, inputs), mse_loss, microbatches))


def test_code_for_a_single_sample_is_told_where_micro_batches_have_one() -> None:
    assert "of the model does something else for a single sample than for several" in difference(Normalizes(), 1)
    assert "does something else" not in difference(Normalizes(), 2)
    assert "does something else" not in difference(OtherWeights(), 1)


def test_a_call_with_other_weights_is_told() -> None:
    assert "calls modules with other weights than their own (torch.func.functional_call)" in difference(
        OtherWeights(), 2
    )


def of_pairs(embeddings: Tensor, target: Tensor) -> Tensor:
    """Two views of each sample, as SimCLR compares them: of even numbers of rows only."""
    first, second = embeddings.unflatten(0, (2, -1))
    return cross_entropy(first @ second.T, torch.arange(len(first)))


def test_a_loss_that_fails_is_named_and_so_is_a_model() -> None:
    inputs, target = (torch.randn(4, 2),), torch.zeros(4, 2)
    microbatches = example_microbatches(inputs, target, (2, 2, 3), CPU)
    module = nn.Sequential(nn.Linear(2, 2))
    model = trace(module, inputs)
    failed = compare_split(model, of_pairs, microbatches)
    assert isinstance(failed, Unchecked)
    assert failed.reason.startswith("the loss itself fails for micro-batches of 2 and 3: unflatten")
    module[0].weight.data = torch.zeros(2, 5)
    failed = compare_split(model, mse_loss, microbatches)
    assert isinstance(failed, Unchecked)
    assert failed.reason.startswith("the model itself fails: mat1 and mat2")
