"""Refuses a model in which a trained parameter is also the memory of another tensor, which stages would not keep so."""

from itertools import chain

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bapipe.errors import InvalidModel
from bapipe.torch_private.tensors import storage_key
from bapipe.tracing.model import TracedModel, layer_states


def check_shared_memory(model: TracedModel) -> None:
    """Raises InvalidModel if a trained parameter shares memory with another parameter, buffer or constant of a model.

    A stage has its own copies of both, and updates the parameter only.
    """
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(model).values():
        if not is_lazy(tensor):
            found.setdefault(storage_key(tensor), []).append((name, tensor))
    for sharing in found.values():
        for index, (name, tensor) in enumerate(sharing):
            for other, second in sharing[:index]:
                if (_is_trained(tensor) or _is_trained(second)) and _overlap(tensor, second):
                    raise _error(other, second, name, tensor)


def _tensors(model: TracedModel) -> dict[int, tuple[str, Tensor]]:
    """Returns each tensor once, by `id`, with a name."""
    constants = (state.items() for state in layer_states(model).values())
    root = model.root
    named = chain(root.named_parameters(), root.named_buffers(), chain.from_iterable(constants))
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in named:
        tensors.setdefault(id(tensor), (name, tensor))
    return tensors


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Returns whether two tensors of one storage have bytes in common, as far as their ends show.

    Recurrent layers keep all of their parameters in one storage, one after another.
    """
    (begin, end), (other_begin, other_end) = _bytes(first), _bytes(second)
    return begin < other_end and other_begin < end


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """Returns where a tensor begins and ends in its storage."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * tensor.element_size()


def _error(first_name: str, first: Tensor, second_name: str, second: Tensor) -> InvalidModel:
    kinds = ["parameter" if isinstance(tensor, nn.Parameter) else "buffer" for tensor in (first, second)]
    remedy = (
        "to tie them, assign the same nn.Parameter to both; to keep them apart, clone() one"
        if kinds[0] == kinds[1]
        else f"let the forward use the parameter itself, or clone() it for the {kinds[1]}"
    )
    return InvalidModel(
        f"{kinds[0]} '{first_name}' and {kinds[1]} '{second_name}' share memory, which stages would not: {remedy}"
    )
