"""Inputs that are given by keyword, or are no tensors, become part of a module for as long as it is traced and run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.printable import shortened

Inputs = Sequence[object] | Mapping[str, object]
"""Examples of the inputs of a forward, by position or by name: tensors of samples, and constants, as None or flags."""

Constant = bool | int | float | str | None


def tensor_inputs(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns the tensors among some inputs, in their order."""
    return tuple(value for _, value in _named(inputs) if isinstance(value, Tensor))


def check_inputs(module: nn.Module, inputs: Inputs) -> None:
    """Raises InvalidModel unless inputs are tensors, at least one, or constants, that the module's forward takes."""
    if isinstance(inputs, Tensor):
        raise InvalidModel(
            f"the example inputs are one tensor of shape {list(inputs.shape)}: put it in a tuple, as in (tensor,), or "
            "its first dimension would be taken for the inputs"
        )
    if not isinstance(inputs, Sequence | Mapping) or isinstance(inputs, str):
        raise InvalidModel(
            f"the example inputs are {shortened(repr(inputs))} ({type(inputs).__name__}): want a tuple of them, as in "
            "(tensor,), or a dictionary by the names that the forward has for them"
        )
    for name, value in _named(inputs):
        if not isinstance(value, Tensor | Constant):
            raise InvalidModel(
                f"{name} is {shortened(repr(value))} ({type(value).__name__}); examples must be tensors, batch first, "
                "or constants (numbers, flags, texts, None): keep other values inside the module"
            )
    if not tensor_inputs(inputs):
        raise InvalidModel("none of the example inputs is a tensor: give an example of what the model is trained on")
    taken = signature(module.forward)
    try:
        taken.bind(**inputs) if isinstance(inputs, Mapping) else taken.bind(*inputs)
    except TypeError as error:
        arguments = ", ".join(taken.parameters)
        raise InvalidModel(
            f"the example inputs are not those of {type(module).__name__}, whose forward takes ({arguments}): {error}"
        ) from None


def check_buckets(buckets: Sequence[Sequence[Tensor]], num_tensors: int) -> None:
    """Raises InvalidModel unless each bucket has an example of each input that is a tensor."""
    for index, bucket in enumerate(buckets):
        is_tuple = isinstance(bucket, Sequence) and all(isinstance(example, Tensor) for example in bucket)
        if not is_tuple or len(bucket) != num_tensors:
            found = f"{len(bucket)} tensors" if is_tuple else f"a {type(bucket).__name__}"
            raise InvalidModel(f"bucket {index} is {found}: want a tuple of {num_tensors}, one for each input")


@contextmanager
def only_tensor_inputs(module: nn.Module, inputs: Inputs) -> Iterator[tuple[Tensor, ...]]:
    """Within the context, the module's forward takes the tensors among the inputs, by position, and no others.

    Yields those tensors. Constants have the values in `inputs`. The module's class is replaced meanwhile by one of the
    same name, so that paths of layers and names of parameters stay as they are.
    """
    tensors = tensor_inputs(inputs)
    if not isinstance(inputs, Mapping) and len(tensors) == len(inputs):
        yield tensors
        return
    original = type(module)
    module.__class__ = type(
        original.__name__,
        (original,),
        {"forward": _forward(original, inputs, _names(module, inputs)), "__module__": original.__module__},
    )
    try:
        yield tensors
    finally:
        module.__class__ = original


def _named(inputs: Inputs) -> Iterator[tuple[str, object]]:
    if isinstance(inputs, Mapping):
        yield from ((f"input '{name}'", value) for name, value in inputs.items())
    else:
        yield from ((f"input {index}", value) for index, value in enumerate(inputs))


def _names(module: nn.Module, inputs: Inputs) -> list[str]:
    """Returns the names of the arguments that take the tensors."""
    if isinstance(inputs, Mapping):
        return [name for name, value in inputs.items() if isinstance(value, Tensor)]
    kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    known = [p.name for p in signature(module.forward).parameters.values() if p.kind in kinds]
    names = [known[index] if index < len(known) else f"input_{index}" for index in range(len(inputs))]
    return [name for name, value in zip(names, inputs, strict=True) if isinstance(value, Tensor)]


def _forward(original: type[nn.Module], inputs: Inputs, names: Sequence[str]) -> Any:
    """Returns a forward with one argument for each tensor; tracers read the arguments from its code."""

    def call(module: nn.Module, *given: Any) -> Any:
        tensors = iter(given)
        if isinstance(inputs, Mapping):
            filled = {key: next(tensors) if isinstance(value, Tensor) else value for key, value in inputs.items()}
            return original.forward(module, **filled)
        return original.forward(module, *(next(tensors) if isinstance(value, Tensor) else value for value in inputs))

    arguments = ", ".join(names)
    called = "_".join(("call", *names))  # longer than any argument, which would hide it
    namespace: dict[str, Any] = {called: call}
    exec(f"def forward(self, {arguments}):\n    return {called}(self, {arguments})\n", namespace)
    return namespace["forward"]
