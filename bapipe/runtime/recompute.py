"""A stage that keeps only its inputs and runs its forward again before its backward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bapipe.errors import InvalidModel
from bapipe.module_state.code_state import ForwardCode
from bapipe.module_state.python_state import PythonState, class_numbers, one_of_each_class, same_tensor, same_value
from bapipe.runtime.changed_inputs import ChangedInputs
from bapipe.runtime.state_owners import StateOwners
from bapipe.runtime.tensor_changes import TensorWrites, replaced
from bapipe.torch_private.tensors import tree_flatten, tree_unflatten

Result = TypeVar("Result")

_SMALL_BYTES = 2**16
"""Buffers up to this size are copied before every F, even if F does not change them."""


@dataclass(frozen=True, slots=True)
class _StateBeforeForward:
    """The state that a micro-batch's first F started from.

    Attributes:
        cpu_rng, cuda_rng: states of torch's global generators.
        tensors: copies of buffers and frozen parameters, by name.
        python: what the modules, and their code, kept in Python.
        inputs: copies of the inputs that F changed in place, by position.
    """

    cpu_rng: Tensor
    cuda_rng: Tensor | None
    tensors: dict[str, Tensor]
    python: PythonState
    inputs: dict[int, Tensor] = field(default_factory=dict)


class RecomputedStage(nn.Module):
    """A stage's module, run once without an autograd graph, and once more with one, with exactly the same result.

    The second run draws the same random numbers as the first. It reads inputs, buffers, frozen parameters, Python
    attributes, and what hooks and forwards keep in closures and globals, as they were before the first, and writes to
    copies of them, or puts them back. So dropout is the
    same, and batch norm and counters count a micro-batch once.

    Small buffers, tensors that the first F of all changed, and mutable attributes are copied before each F. Other
    tensors are assumed constant: a later F that writes to one, or to a large one in an attribute, is an error, as far
    as `TensorWrites` detects it.

    torch.utils.checkpoint is not used: it recomputes when a backward first unpacks a saved tensor, and would do so
    again for every group of weights in a W.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.module = module
        self._device = device
        self._has_graph = True  # False while `first` runs F
        self._before: dict[int, _StateBeforeForward] = {}  # by micro-batch
        self._changing: frozenset[str] | None = None  # names of the tensors that F changes; None before the first F
        self._inputs, self._writes = ChangedInputs(), TensorWrites()
        self._again: _StateBeforeForward | None = None  # the state to start from while F is recomputed
        self._owners = StateOwners.of(module)
        self._of_step: set[int] = set()  # micro-batches that have run since `_owners` were found
        self._parts = tuple(module.named_modules(remove_duplicate=False))
        self._one_of_each_class, self._forward_code = one_of_each_class(module), ForwardCode.of(module)

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

        Gradients are disabled only inside the module: its inputs require them as in the second run, as it may ask for.
        """
        self._has_graph = False
        try:
            return self.remembering(microbatch, run)
        finally:
            self._has_graph = True

    def remembering(self, microbatch: int, run: Callable[[], Result]) -> Result:
        """Runs a micro-batch's F by calling `run`, and stores the state that it starts from; returns its result.

        Raises:
            InvalidModel: F changes a trained parameter; a tensor that was assumed constant, whose value from before is
                lost; an input that the first F did not change, or that requires gradients; or a number in a class.
        """
        self._find_owners(microbatch)
        sums = _sums(self.module) if self._changing is None else {}
        of_classes = class_numbers(self._one_of_each_class)
        weights, buffers = self._weights_now(), self._buffers_now()
        copied_now = self._copied(weights, buffers)
        clones = {id(t): t.detach().clone() for t in copied_now.values()}  # one for all names of a tensor
        before = {name: clones[id(tensor)] for name, tensor in copied_now.items()}
        own = {id(tensor) for tensor in (*weights.values(), *buffers.values())}
        hidden = {name: t for name, t in self._owners.hidden_tensors(own).items() if _is_shared(t)}
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
            raise InvalidModel(not_exactly(f"'{name}'", name))
        changed_inputs = self._inputs.finish()
        if changed_inputs is None:
            what = "an input in place that the first forward did not, or that requires gradients (by `tensor.data`)"
            raise InvalidModel(not_exactly(what, ""))
        self._before[microbatch] = replace(state, inputs=changed_inputs)
        # A tensor that F has replaced by another one still has the value that earlier micro-batches started from.
        for name, tensor in replaced(tensors, now).items():
            for earlier in self._before.values():
                earlier.tensors.setdefault(name, tensor)
        return result

    def _find_owners(self, microbatch: int) -> None:
        """Finds the parts that keep state once a step, as hooks may be added between steps.

        In the next step a micro-batch comes again.
        """
        if microbatch in self._of_step:
            self._owners, self._of_step = StateOwners.of(self.module), set()
        self._of_step.add(microbatch)

    def _state(self, tensors: dict[str, Tensor], before: dict[str, Tensor]) -> _StateBeforeForward:
        """Returns the current state, in whose attributes `tensors` are replaced by their copies in `before`, if any.

        Both are by name. Tensors without such a copy stay as they are.
        """
        copies: dict[int, Any] = {id(one): one for one in self.module.modules()}
        copies |= {id(t): before.get(name, t) for name, t in tensors.items()}
        return _StateBeforeForward(
            cpu_rng=torch.get_rng_state(),
            cuda_rng=torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            tensors=before,
            python=self._owners.state(self._forward_code).copied(copies),
        )

    def _copied(self, weights: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns those buffers and frozen parameters that are copied before an F, by name."""
        frozen = {name: p for name, p in weights.items() if not p.requires_grad}
        if self._changing is None:
            return frozen | buffers
        small = {name for name, buffer in buffers.items() if buffer.nbytes <= _SMALL_BYTES}
        return {name: t for name, t in (frozen | buffers).items() if name in small or name in self._changing}

    def _weights_now(self) -> dict[str, Tensor]:
        """Returns the current parameters by all of their names; a forward may assign frozen ones, as of a teacher."""
        named = (part.named_parameters(path, recurse=False, remove_duplicate=False) for path, part in self._parts)
        return dict(chain.from_iterable(named))

    def _buffers_now(self) -> dict[str, Tensor]:
        """Returns the current buffers by all of their names; a forward may assign new ones."""
        named = (part.named_buffers(path, recurse=False, remove_duplicate=False) for path, part in self._parts)
        return dict(chain.from_iterable(named))

    @contextmanager
    def recomputing(self, microbatch: int) -> Iterator[None]:
        """In this context the module runs as in a micro-batch's first F; afterwards its state is what it was."""
        state, now = self._before.pop(microbatch), self._owners.state(self._forward_code)
        with torch.random.fork_rng(devices=[self._device] if state.cuda_rng is not None else []):
            torch.set_rng_state(state.cpu_rng)
            if state.cuda_rng is not None:
                torch.cuda.set_rng_state(state.cuda_rng, self._device)
            state.python.put_back()
            self._again = state
            try:
                yield
            finally:
                self._again = None
                now.put_back()


def _is_shared(hidden: Tensor) -> bool:
    """Returns whether a tensor in an attribute is used without a copy: it is large, or may have a graph."""
    return hidden.requires_grad or hidden.nbytes > _SMALL_BYTES


def _sums(module: nn.Module) -> dict[str, tuple[float, float]]:
    """Returns (sum of values, sum of their magnitudes) of each trained parameter: almost any change alters them."""
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad and not p.is_complex()}
    return {name: (float(p.double().sum()), float(p.double().abs().sum())) for name, p in trained.items()}


def _check_unchanged(before: Mapping[str, object], after: Mapping[str, object], what: str) -> None:
    """Raises InvalidModel if a value differs; both are by name. `what` describes it in the error, `{}` is its name."""
    for name, value in before.items():
        if not same_value(after.get(name, value), value):
            raise InvalidModel(not_exactly(what.format(name), name))


def not_exactly(what: str, name: str) -> str:
    """Returns the message for a forward that changes `what`, of the parameter, buffer or attribute `name`, if any."""
    path = name.rpartition(".")[0]
    of_layer = f" of layer '{path}'" if path else ""
    return (
        f"the forward changes {what}{of_layer}, so it cannot be recomputed exactly: plan without recomputation of its "
        "stage"
    )
