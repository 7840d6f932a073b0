"""A stage that keeps only its inputs and runs its forward again before its backward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.runtime.changed_inputs import ChangedInputs
from bapipe.runtime.tensor_changes import TensorWrites, replaced
from bapipe.torch_private.tensors import tree_flatten, tree_unflatten
from bapipe.tracing.python_state import (
    Attributes,
    GeneratorStates,
    attributes_of,
    class_numbers,
    copied,
    generator_states_of,
    hidden_tensors,
    one_of_each_class,
    reached_by,
    restore_generator_states,
    same_tensor,
    same_value,
    set_attributes,
    states_of_hooks,
)
from bapipe.tracing.reached_state import KeptState

Result = TypeVar("Result")

_SMALL_BYTES = 2**16
"""Buffers up to this size are copied before every F, whether it changes them or not."""


@dataclass(frozen=True, slots=True)
class _StateBeforeForward:
    """The state that a micro-batch's first F started from: of the generators, what an F changes, and attributes.

    Attributes:
        hooks: what those of the modules kept.
        tensors: buffers and frozen parameters, by name.
        inputs: those that the F has changed in place, by their place among all.
    """

    cpu_rng: Tensor
    cuda_rng: Tensor | None
    generators: GeneratorStates
    tensors: dict[str, Tensor]
    attributes: Attributes
    hooks: list[KeptState]
    inputs: dict[int, Tensor] = field(default_factory=dict)


class RecomputedStage(nn.Module):
    """A stage's module, run once without an autograd graph, and once more with one, with exactly the same result.

    The second run draws the random numbers of the first, reads the values of inputs, buffers and frozen parameters, and
    the Python attributes and what hooks keep, from before the first, and writes to copies of them: dropout is the same,
    batch norm counts a micro-batch once, and so does a counter. Small buffers, what the very first F has changed, and
    attributes that are not immutable are copied before each F. Other tensors are taken for constants; an F that writes
    to one later, or to a large one in an attribute, is an error, as far as `TensorWrites` sees it.

    Not torch.utils.checkpoint: it recomputes when a backward first unpacks a saved tensor, and would do so again for
    every group of weights in a W.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._has_graph = True  # not while `first` runs F
        self._before: dict[int, _StateBeforeForward] = {}  # by micro-batch
        self._changing: frozenset[str] | None = None  # names of the tensors that F changes; None before the first F
        self._inputs, self._writes = ChangedInputs(), TensorWrites()
        self._again: _StateBeforeForward | None = None  # while F is recomputed
        self._parts = tuple(module.named_modules(remove_duplicate=False))
        self._one_of_each_class = one_of_each_class(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, spec = tree_flatten((args, kwargs))
        if self._again is None:
            self._inputs.begin(inputs)
            with torch.set_grad_enabled(self._has_graph and torch.is_grad_enabled()):
                return self.module(*args, **kwargs)
        if self._again.inputs:
            args, kwargs = tree_unflatten([self._again.inputs.get(i, value) for i, value in enumerate(inputs)], spec)
        return torch.func.functional_call(self.module, self._again.tensors, args, kwargs)

    def first(self, microbatch: int, run: Callable[[], Result]) -> Result:
        """Runs a micro-batch's F by calling `run`, without a graph; returns its result, and raises as `remembering`.

        Only the module runs without one: its inputs require gradients as in the second run, which it may ask.
        """
        self._has_graph = False
        try:
            return self.remembering(microbatch, run)
        finally:
            self._has_graph = True

    def remembering(self, microbatch: int, run: Callable[[], Result]) -> Result:
        """Runs a micro-batch's F by calling `run`, and remembers what it starts from; returns its result.

        Raises:
            InvalidModel: F changes a parameter that is trained, a tensor taken for a constant, whose value before is
                then lost, an input that it left as it was the first time or that requires gradients, or a number that
                a class has.
        """
        sums = _sums(self.module) if self._changing is None else {}
        of_classes = class_numbers(self._one_of_each_class)
        weights, buffers = self._weights_now(), self._buffers_now()
        copied_now = self._copied(weights, buffers)
        clones = {id(t): t.detach().clone() for t in copied_now.values()}  # one of a tensor with several names
        before = {name: clones[id(tensor)] for name, tensor in copied_now.items()}
        hidden = {name: t for name, t in hidden_tensors(self.module).items() if _is_shared(t)}
        tensors = weights | buffers | hidden
        state = self._state(tensors, before)
        self._writes.begin(tensors)
        result = run()
        written = self._writes.finish()
        now = self._weights_now() | self._buffers_now()
        _check_unchanged(of_classes, class_numbers(self._one_of_each_class), "the class attribute '{}'")
        if self._changing is None:
            _check_unchanged(sums, _sums(self.module), "the parameter '{}'")
            different = {name for name, value in before.items() if not same_tensor(value, now[name])}
            written |= self._writes.wait()
            self._changing = (written - hidden.keys()) | different
            for name in before.keys() - self._copied(weights, buffers).keys():
                del before[name]
        for name in sorted(written - self._changing - before.keys()):
            raise InvalidModel(_not_exactly(f"'{name}'", name))
        changed_inputs = self._inputs.finish()
        if changed_inputs is None:
            what = "an input in place, and not from the first time on, or through `tensor.data`"
            raise InvalidModel(_not_exactly(what, ""))
        self._before[microbatch] = replace(state, inputs=changed_inputs)
        for name, tensor in replaced(tensors, now).items():  # it still has its value, which was a constant so far
            for earlier in self._before.values():
                earlier.tensors.setdefault(name, tensor)
        return result

    def _state(self, tensors: dict[str, Tensor], before: dict[str, Tensor]) -> _StateBeforeForward:
        """Returns the state now, whose attributes have `tensors`, or their copies `before`; both are by name."""
        generators, hooks = generator_states_of(self.module), states_of_hooks(self.module)
        same = (*self.module.modules(), *(generator for generator, _ in generators))
        copies = (
            reached_by(hooks)
            | {id(one): one for one in same}
            | {id(t): before.get(name, t) for name, t in tensors.items()}
        )
        return _StateBeforeForward(
            cpu_rng=torch.get_rng_state(),
            cuda_rng=torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            generators=generators,
            tensors=before,
            attributes=copied(attributes_of(self.module), copies),
            hooks=hooks,
        )

    def _copied(self, weights: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors whose values are copied before an F: of the buffers and the parameters not trained."""
        frozen = {name: p for name, p in weights.items() if not p.requires_grad}
        if self._changing is None:
            return frozen | buffers
        small = {name for name, buffer in buffers.items() if buffer.nbytes <= _SMALL_BYTES}
        return {name: t for name, t in (frozen | buffers).items() if name in small or name in self._changing}

    def _weights_now(self) -> dict[str, Tensor]:
        """Returns the parameters by all of their names; a forward may assign frozen ones, such as a teacher's."""
        named = (part.named_parameters(path, recurse=False, remove_duplicate=False) for path, part in self._parts)
        return dict(chain.from_iterable(named))

    def _buffers_now(self) -> dict[str, Tensor]:
        """Returns the buffers by all of their names; a forward may assign others."""
        named = (part.named_buffers(path, recurse=False, remove_duplicate=False) for path, part in self._parts)
        return dict(chain.from_iterable(named))

    @contextmanager
    def recomputing(self, microbatch: int) -> Iterator[None]:
        """In this context the module runs as it did in a micro-batch's first F."""
        state = self._before.pop(microbatch)
        attributes, generators = attributes_of(self.module), generator_states_of(self.module)
        hooks = states_of_hooks(self.module)
        with torch.random.fork_rng(devices=[self._device] if state.cuda_rng is not None else []):
            torch.set_rng_state(state.cpu_rng)
            if state.cuda_rng is not None:
                torch.cuda.set_rng_state(state.cuda_rng, self._device)
            restore_generator_states(state.generators)
            set_attributes(state.attributes)
            for kept in state.hooks:
                kept.put_back()
            self._again = state
            try:
                yield
            finally:
                self._again = None
                set_attributes(attributes)
                for kept in hooks:
                    kept.put_back()
                restore_generator_states(generators)


def _is_shared(hidden: Tensor) -> bool:
    """Returns whether a tensor in an attribute is not copied: it is large, or may have a graph."""
    return hidden.requires_grad or hidden.nbytes > _SMALL_BYTES


def _sums(module: nn.Module) -> dict[str, tuple[float, float]]:
    """Returns sums over the trained parameters, which differ after almost any change of one."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad and not p.is_complex()}
    return {name: (float(p.double().sum()), float(p.double().abs().sum())) for name, p in trained.items()}


def _check_unchanged(before: Mapping[str, object], after: Mapping[str, object], what: str) -> None:
    """Raises InvalidModel if values differ, by name; `what` is what the error calls one, with braces for its name."""
    for name, value in before.items():
        if not same_value(after.get(name, value), value):
            raise InvalidModel(_not_exactly(what.format(name), name))


def _not_exactly(what: str, name: str) -> str:
    path = name.rpartition(".")[0]
    of_layer = f" of layer '{path}'" if path else ""
    return (
        f"the forward changes {what}{of_layer}, so it cannot be recomputed exactly: plan without recomputation of its "
        "stage"
    )
