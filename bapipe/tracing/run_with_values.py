"""What layers return whose code needs values: as in a forward on the examples, or else for made-up values."""

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from bapipe.torch_private.tensors import without_fake_tensors
from bapipe.tracing.captured import autocast_as, autocast_modes
from bapipe.tracing.nested_tensors import map_tensors, tensors_in
from bapipe.tracing.python_state import state_restored
from bapipe.tracing.recording import ExamplesFail, NotRecorded, in_words
from bapipe.tracing.sizes import repeat_to_batch


class ExampleForward:
    """A forward of a module on its examples, of which it keeps the shapes that each call of a part returned.

    It runs when a part is first asked for, with the autocast of where this was made; the module does not change.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Tensor], batch: int, device: torch.device) -> None:
        """The rows of `inputs` are repeated to `batch`."""
        self._module, self._inputs, self._batch, self._device = module, inputs, batch, device
        self._autocast = autocast_modes()
        self._returned: dict[tuple[str, int], Any] = {}
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
            try:
                self._run()
            except Exception as error:  # whatever the model raises: what its parts returned before is known
                self._error = error
        part = self._module.get_submodule(path)
        result = self._returned.get((path, call))
        if result is None:
            result = self._on_made_up_values(part, path, args, kwargs)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in part.parameters())
        trained = trained or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in((args, kwargs))))
        return map_tensors(result, lambda tensor: self._without_values(tensor, trained))

    def _run(self) -> None:
        paths = {part: path for path, part in self._module.named_modules()}
        num_calls: Counter[str] = Counter()

        def keep(part: nn.Module, _: Any, result: Any) -> None:
            path = paths.get(part)
            if path is None:
                return
            num_calls[path] += 1
            with suppress(Exception):  # some classes of results cannot be made of others
                self._returned[path, num_calls[path]] = map_tensors(result, _on_meta)

        with without_fake_tensors(), torch.no_grad(), autocast_as(self._autocast):
            inputs = [repeat_to_batch(example, self._batch, self._device) for example in self._inputs]
            with state_restored(self._module, parameters=True):
                hook = register_module_forward_hook(keep)
                try:
                    self._module(*inputs)
                finally:
                    hook.remove()

    def _on_made_up_values(self, part: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        try:
            with without_fake_tensors(), torch.no_grad():
                result = copy.deepcopy(part)(*map_tensors(args, _with_values), **map_tensors(kwargs, _with_values))
                return map_tensors(result, _on_meta)
        except Exception as error:  # whatever its code raises
            if self._error is not None:
                raise ExamplesFail(
                    f"a forward of {self._batch} samples, rows of the example inputs, fails: {in_words(self._error)}"
                ) from self._error
            raise NotRecorded(f"'{path}' fails on made-up values: {in_words(error)}") from error

    def _without_values(self, meta: Tensor, trained: bool) -> Tensor:
        fake = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=self._device)
        if not (trained and (fake.is_floating_point() or fake.is_complex())):
            return fake
        return fake.requires_grad_().clone()  # no leaf of the graph, which what comes behind could not change in place


def _with_values(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.rand(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
