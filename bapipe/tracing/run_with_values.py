"""What layers return whose code needs values: as in a forward on the examples, or else for made-up values."""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from bapipe.module_state.copies import deep_copy
from bapipe.module_state.python_state import state_restored
from bapipe.torch_private.tensors import without_fake_tensors
from bapipe.tracing.captured import autocast_as, autocast_modes
from bapipe.tracing.nested_tensors import map_tensors, tensors_in
from bapipe.tracing.reasons import Reason
from bapipe.tracing.recording import ExamplesFail, NotRecorded, in_words
from bapipe.tracing.sizes import repeat_to_batch

_Returned = dict[tuple[str, int], Any]
"""What calls of parts return, without values, by the part's path and which of its calls it is, counted from 1."""


class ExampleForward:
    """A forward of a module on its examples, of which it keeps the shapes that each call of a part returned.

    It runs when a part is first asked for, with the autocast of where this was made; the module does not change. Where
    it fails for that number of samples, as where a layer takes multiples of four alone, it runs on the examples as they
    are, and on twice these rows: what is affine in the number of samples is known for all numbers.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], batch: int, device: torch.device) -> None:
        """The rows of `inputs` are repeated to `batch`."""
        self._module, self._inputs, self._batch, self._device = module, inputs, batch, device
        self._autocast = autocast_modes()
        self._returned: _Returned = {}
        self._has_run = False
        self._error: Exception | None = None  # that the forward raised

    def result(self, path: str, call: int, args: Any, kwargs: Any) -> Any:
        """Returns tensors without values, of the shapes that a call of a part returns, and nested as there.

        Args:
            path: of the part.
            call: which of its calls, counted from 1. If the forward has none, the part runs on made-up values.
            args, kwargs: of the call, tensors without values.

        Raises:
            ExamplesFail: the forward failed before it came to that call, and the part fails on made-up values.
            NotRecorded: the part fails on made-up values.
        """
        if not self._has_run:
            self._has_run = True
            self._returned, self._error = self._run(self._batch)
            if self._error is not None:  # what its parts returned before is known
                self._returned = self._of_other_sizes() | self._returned
        part = self._module.get_submodule(path)
        result = self._returned.get((path, call))
        if result is None:
            result = self._on_made_up_values(part, path, args, kwargs)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in part.parameters())
        trained = trained or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs))))
        return map_tensors(result, lambda tensor: self._without_values(tensor, trained))

    def _of_other_sizes(self) -> "_Returned":
        """Returns what parts return, as forwards on as many samples as the examples have, and twice as many, show."""
        num_examples = len(self._inputs[0])
        results = []
        for num_samples in (num_examples, 2 * num_examples):
            returned, error = self._run(num_samples)
            if error is not None:
                return {}
            results.append(returned)
        small, large = results
        known = {}
        for call in small.keys() & large.keys():
            with suppress(Exception):  # some classes of results cannot be compared, or made of others
                known[call] = _extrapolated(small[call], large[call], num_examples, self._batch)
        return known

    def _run(self, num_samples: int) -> tuple["_Returned", Exception | None]:
        """Returns what parts return for so many rows of the examples, and what the forward raised after that."""
        paths = {part: path for path, part in self._module.named_modules()}
        num_calls: Counter[str] = Counter()
        returned: _Returned = {}

        def keep(part: nn.Module, _: Any, result: Any) -> None:
            path = paths.get(part)
            if path is None:
                return
            num_calls[path] += 1
            with suppress(Exception):  # some classes of results cannot be made of others
                returned[path, num_calls[path]] = map_tensors(result, _on_meta)

        try:
            with without_fake_tensors(), torch.no_grad(), autocast_as(self._autocast):
                inputs = [repeat_to_batch(example, num_samples, self._device) for example in self._inputs]
                with state_restored(self._module, parameters=True):
                    hook = register_module_forward_hook(keep)
                    try:
                        self._module(*inputs)
                    finally:
                        hook.remove()
        except Exception as error:  # whatever the model raises
            return returned, error
        return returned, None

    def _on_made_up_values(self, part: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        try:
            with without_fake_tensors(), torch.no_grad():
                result = deep_copy(part)(*map_tensors(args, _with_values), **map_tensors(kwargs, _with_values))
                return map_tensors(result, _on_meta)
        except Exception as error:  # whatever its code raises
            if self._error is not None:
                fails = f"a forward of {self._batch} samples, rows of the example inputs, fails: "
                raise ExamplesFail(Reason(f"{fails}{in_words(self._error)}")) from self._error
            raise NotRecorded(Reason(f"'{path}' fails on made-up values: {in_words(error)}")) from error

    def _without_values(self, meta: Tensor, trained: bool) -> Tensor:
        fake = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=self._device)
        if not (trained and (fake.is_floating_point() or fake.is_complex())):
            return fake
        return fake.requires_grad_().clone()  # no leaf of the graph, which what comes behind could not change in place


def _extrapolated(small: Any, large: Any, num_small: int, batch: int) -> Any:
    """Returns a result for `batch` samples of those for `num_small`, and twice as many.

    Raises:
        ValueError: they differ in more than shapes, or these are no whole numbers for `batch` samples.
    """
    if map_tensors(small, _no_tensor) != map_tensors(large, _no_tensor):
        raise ValueError("the results differ in more than shapes")
    pairs = list(zip(tensors_in(small), tensors_in(large), strict=True))
    shapes = iter([_shape_at(one.shape, two.shape, num_small, batch) for one, two in pairs])
    strides = iter([two.stride() for _, two in pairs])

    def resized(tensor: Tensor) -> Tensor:
        shape, stride = next(shapes), next(strides)
        in_memory = sorted(range(len(shape)), key=lambda dim: -stride[dim])
        return torch.empty_permuted(shape, in_memory, dtype=tensor.dtype, device="meta")

    return map_tensors(small, resized)


def _no_tensor(tensor: Tensor) -> Any:
    return None


def _shape_at(small: Sequence[int], large: Sequence[int], num_small: int, batch: int) -> list[int]:
    """Returns the affine function of the number of samples at `batch`, of each dimension."""
    shape = []
    for one, two in zip(small, large, strict=True):
        more, rest = divmod((two - one) * (batch - num_small), num_small)
        if rest or one + more < 0:
            raise ValueError(f"no whole number of rows for {batch} samples")
        shape.append(one + more)
    return shape


def _with_values(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.rand(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
