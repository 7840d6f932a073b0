"""The gradients of parameters that stages of several processes use."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.runtime.tied_weights import TiedGradients


@pytest.mark.parametrize(
    ("own", "of_other", "want"), [(1.0, 2.0, 3.0), (1.0, None, 1.0), (None, 2.0, 2.0), (None, None, None)]
)
def test_a_parameter_without_gradients_in_all_processes_keeps_none(
    monkeypatch: pytest.MonkeyPatch, own: float | None, of_other: float | None, want: float | None
) -> None:
    """Optimizers with momentum or weight decay would move it by a gradient of zeros."""

    def all_reduce(tensor: Tensor, group: object) -> None:
        is_count = tensor.dim() == 0
        tensor += (of_other is not None) if is_count else (of_other or 0.0)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = None if own is None else torch.full((2,), own)
    TiedGradients([(parameter, None)]).sum()  # type: ignore[list-item]
    assert (None if parameter.grad is None else parameter.grad.tolist()) == (None if want is None else [want, want])


def test_sparse_gradients_are_summed_with_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a table of words, which the head of another process uses as a whole."""

    def all_reduce(tensor: Tensor, group: object) -> None:
        assert not tensor.is_sparse
        tensor += 1 if tensor.dim() == 0 else torch.tensor([[5.0], [7.0]])

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    words = nn.Embedding(2, 1, sparse=True)
    words(torch.tensor([1, 1])).sum().backward()
    TiedGradients([(words.weight, None)]).sum()  # type: ignore[list-item]
    assert words.weight.grad is not None
    assert words.weight.grad.to_dense().tolist() == [[5], [9]]
