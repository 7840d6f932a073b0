"""Made-up data for any model, from its example inputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bapipe.module_state.python_random import all_generators_restored
from bapipe.module_state.python_state import state_restored
from bapipe.torch_private.tensors import DispatchMode, storage_key
from bapipe.zoo.data.dataset import NUM_SYNTHETIC, PipelineDataset

_MIN_VALUES = 3
"""Different values of an example of floats at least; one of fewer may be a mask, whose values mean something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeExample(PipelineDataset[Any]):
    """Items of the shapes and types of an example; item i depends on i alone.

    Integers that select rows of an embedding are any of its rows. Floats are normal, with mean and standard deviation
    of the example's. All else, such as masks and targets, are rows of the example, drawn at random.

    Attributes:
        examples: of the inputs in order, and of the target.
        num_rows: for inputs that select rows of embeddings, how many the smallest of these has, by place.
    """

    examples: tuple[Tensor, ...]
    num_rows: Mapping[int, int]

    def __len__(self) -> int:
        return NUM_SYNTHETIC

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        *inputs, target = (self.part(index, place) for place in range(len(self.examples)))
        return tuple(inputs), target

    def part(self, index: int, place: int) -> Tensor:
        example = self.examples[place]
        generator = torch.Generator().manual_seed(index * len(self.examples) + place)
        if place in self.num_rows:
            return torch.randint(self.num_rows[place], example.shape[1:], generator=generator, dtype=example.dtype)
        is_input = place + 1 < len(self.examples)
        if is_input and example.is_floating_point() and _has_spread(example):
            drawn = torch.randn(example.shape[1:], generator=generator)
            return (drawn * example.std() + example.mean()).to(example.dtype)
        return example[int(torch.randint(len(example), (), generator=generator))].clone()


def like_example(
    module: nn.Module, inputs: Sequence[Tensor], target: Tensor, call: Sequence[Any] | Mapping[str, Any]
) -> LikeExample:
    """Returns data for a module; it runs once on `call`, all of its inputs, of which `inputs` are the tensors.

    The run leaves the module, the inputs and the generators of random numbers as they were. What it changes outside of
    them, such as a global variable or a file, stays.
    """
    recorder = _EmbeddingRecorder()
    copies = {id(tensor): tensor.detach().clone() for tensor in inputs}  # inputs may be views of one tensor
    args, kwargs = _arguments(call)
    with (
        torch.no_grad(),
        all_generators_restored(),
        state_restored(module, parameters=True),
        recorder,
    ):
        try:
            module(
                *(copies.get(id(value), value) for value in args),
                **{name: copies.get(id(value), value) for name, value in kwargs.items()},
            )
        except Exception:  # whatever the model's own code raises; training says so better
            recorder.num_rows.clear()
    by_place = ((place, recorder.num_rows.get(storage_key(copies[id(tensor)]))) for place, tensor in enumerate(inputs))
    examples = tuple(tensor.detach().cpu() for tensor in (*inputs, target))
    return LikeExample(examples=examples, num_rows={place: num for place, num in by_place if num is not None})


def _arguments(call: Sequence[Any] | Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(call)) if isinstance(call, Mapping) else (tuple(call), {})


def _has_spread(example: Tensor) -> bool:
    return bool(example.isfinite().all()) and len(torch.unique(example)) >= _MIN_VALUES


class _EmbeddingRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Records by `storage_key` which tensors select rows of embeddings, and how many rows the smallest of these has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_rows: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("embedding", "_embedding_bag"):
            weight, rows = args[:2]
            key = storage_key(rows)
            self.num_rows[key] = min(len(weight), self.num_rows.get(key, len(weight)))
        return func(*args, **(kwargs or {}))
