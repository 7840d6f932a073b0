"""Which tensors are found to be written to, and by which of their values."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.runtime.changed_inputs import ChangedInputs
from bapipe.runtime.tensor_changes import TensorWrites
from bapipe.runtime.tensor_samples import sample_of


def _written(tensor: Tensor, use: Callable[[Tensor], object]) -> frozenset[str]:
    writes = TensorWrites()
    writes.begin({"it": tensor, "other": torch.zeros(3)})
    use(tensor)
    return writes.finish() | writes.wait()


def _assign_data(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


def test_writes_of_all_kinds_are_found() -> None:
    frozen = nn.Parameter(torch.zeros(70, 90), requires_grad=False)
    assert _written(frozen, lambda it: it.add_(1)) == {"it"}
    assert _written(frozen, lambda it: it[3, 4].fill_(9)) == {"it"}
    assert _written(frozen, lambda it: it.data.add_(1)) == {"it"}
    assert _written(frozen, lambda it: it.numpy().fill(7)) == {"it"}
    assert _written(frozen, _assign_data) == {"it"}
    assert _written(frozen, lambda it: it * 2) == frozenset()


def test_tensors_of_all_kinds_are_looked_at() -> None:
    numbers = [torch.zeros((), dtype=kind) for kind in (torch.bool, torch.int64, torch.bfloat16, torch.complex64)]
    for tensor in (*numbers, torch.zeros(3, 40).t(), torch.zeros(2, 2, 2, 2, 2, 2)):
        assert _written(tensor, lambda it: it.data.fill_(1)) == {"it"}
    without_values = (torch.zeros(0, 4), torch.zeros(3, device="meta"), torch.eye(3).to_sparse())
    for tensor in (*without_values, torch.full((30,), torch.nan), torch.zeros(1).expand(5, 7)):
        assert _written(tensor, lambda it: it * 2) == frozenset()


class Own(Tensor):
    """A class that does not know all of torch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.as_strided:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensors_of_other_classes_are_looked_at() -> None:
    assert _written(torch.zeros(3).as_subclass(Own), lambda it: it.data.fill_(1)) == {"it"}
    assert _written(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), lambda it: it * 2) == frozenset()


def test_no_memory_of_inputs_is_kept() -> None:
    inputs = ChangedInputs()
    given = torch.zeros(3)
    memory = weakref.ref(given.untyped_storage())
    inputs.begin([given])
    inputs.finish()
    del given
    assert memory() is None


def test_a_sample_is_of_the_tensor_alone() -> None:
    """Row i of 31 begins at 100 i, and the tensor has the first 46 of its columns: steps of 2 rows and 3 columns."""
    table = torch.arange(31 * 100).view(31, 100)
    assert sample_of(table[:, :46]).tolist() == [203 * i for i in range(16)]
    assert sample_of(torch.arange(5.0)).tolist() == [0, 1, 2, 3, 4]
