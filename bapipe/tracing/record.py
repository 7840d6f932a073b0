"""Records what a module's forward calls, by running it on tensors without values.

The module's own Python code runs, as in training, on fake tensors: they have shapes, strides, views and versions, but
no values. Every function of torch that it calls, and every call of a layer's module, is recorded with its arguments.
Numbers that come from shapes are recorded as they are at that batch size; `merge` compares recordings at several sizes.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import CellType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bapipe.module_state.copies import deep_copy
from bapipe.module_state.python_random import (
    all_generators_restored,
    generators_restored,
    global_generator_states,
    restore_global_generators,
)
from bapipe.module_state.python_state import generators_kept
from bapipe.module_state.variables import closure_of
from bapipe.torch_device import CPU
from bapipe.torch_private.autograd_functions import Function
from bapipe.torch_private.modules import forward_hooks_of
from bapipe.torch_private.tensors import (
    FakeTensor,
    FakeTensorMode,
    is_functorch_wrapped,
    needs_values,
    quiet_fake_tensors,
    storage_key,
    tree_flatten,
    tree_leaves,
    version,
)
from bapipe.tracing.captured import autocast_modes
from bapipe.tracing.code_position import running_line
from bapipe.tracing.constant_values import ConstantValues
from bapipe.tracing.fx_capture import TracingFailed
from bapipe.tracing.kept_calls import (
    ASSIGNS_DATA,
    DRAWS_IN_PYTHON,
    assigns_data,
    function_operator,
    functions_intercepted,
    hook_operator,
    is_looked_into,
    registers_hook,
)
from bapipe.tracing.layer_arguments import check_arguments
from bapipe.tracing.layer_choice import LayerChoice
from bapipe.tracing.nested_tensors import parts_of, register_dataclasses, tensors_in
from bapipe.tracing.randomness import draws_random_numbers
from bapipe.tracing.reasons import DRAW_INSIDE, GIVE_TENSORS, TAKE_ANY_NUMBER, WRITE_INSIDE, Reason
from bapipe.tracing.recorded_functions import PLAIN, argument_names, node_target, set_item, writes_to_a_list
from bapipe.tracing.recording import Call, NotRecorded, Recording, Ref, why_not_recorded
from bapipe.tracing.run_with_values import ExampleForward
from bapipe.tracing.seeding import (
    SEEDS_ITSELF,
    default_generator_is_seeded,
    generators_watched,
    mark_default_generator,
    seeding_noticed,
)
from bapipe.tracing.structure import structure

_MAX_HELD = 1_000
"""How many objects are looked at inside an argument, for tensors that it holds."""

_UNDER_VMAP = Reason(
    "it calls a function under torch.func.vmap or grad",
    "write the function for the whole batch, or put its call into a module of its own",
)
_DRAW_DECIDES = Reason("a random number that it draws decides what it does", DRAW_INSIDE)
_FROM_ELSEWHERE = Reason("it uses a tensor that comes from where calls of torch cannot be recorded", TAKE_ANY_NUMBER)


class _StartAgain(Exception):
    """A module of which an earlier call was recorded must be one layer."""

    def __init__(self, path: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.path, self.cause = path, cause


def record(
    module: nn.Module,
    inputs: Sequence[Tensor],
    batch: int,
    choice: LayerChoice,
) -> Recording:
    """Returns what a module calls for inputs of some batch size; the module does not change.

    A module whose code reads values of tensors, or does something else that cannot be recorded, becomes a leaf module.

    Raises:
        TracingFailed: the model's own code cannot be recorded, or a module must be a leaf module from the start.
    """
    device = next((p.device for p in module.parameters() if not p.is_meta), CPU)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with (
        generators_watched(module) as generator_fault,
        fake,
        quiet_fake_tensors(),
        all_generators_restored(),
    ):
        names: dict[int, str] = {}
        own = _copy_without_values(module, device, names)
        examples = tuple(
            torch.empty((batch, *e.shape[1:]), dtype=e.dtype, device=device).requires_grad_(e.requires_grad)
            for e in inputs
        )
        forward = ExampleForward(module, inputs, batch, device)
        return _Recorder(own, module, names, choice, generator_fault, forward).run(examples)


def _holds_tensors(value: Any) -> bool:
    """Returns whether an object holds tensors, or modules with some, as far as `_MAX_HELD` objects inside it show."""
    seen: dict[int, Any] = {}
    held = deque([value])
    while held and len(seen) < _MAX_HELD:
        one = held.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            return True
        if isinstance(one, nn.Module):
            if next(chain(one.parameters(), one.buffers()), None) is not None:
                return True
        elif isinstance(one, Mapping):
            held += one.values()
        elif isinstance(one, list | tuple | set | deque):
            held += one
        elif hasattr(one, "__dict__") and not isinstance(one, type | ModuleType | FunctionType):
            held += vars(one).values()
    return False


def _copy_without_values(module: nn.Module, device: torch.device, names: dict[int, str]) -> nn.Module:
    """Returns a copy whose parameters and buffers are fake, and puts their names into `names`, by `id`.

    Tensors and random generators in other attributes stay the module's own, and so does what cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        fake: Tensor = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
        names[id(fake)] = names[id(tensor)] = name  # code in a closure may use the module's own
    for part in module.modules():
        for tensor in tensors_in(vars(part)):
            memo.setdefault(id(tensor), tensor)
    for generator in generators_kept(module).values():
        if isinstance(generator, torch.Generator):  # copies need tensors with values; `generators_watched` restores it
            memo[id(generator)] = generator
    own = deep_copy(module, memo)
    for (path, part), copied in zip(module.named_modules(), own.modules(), strict=True):
        if part is copied:
            raise TracingFailed("", NotRecorded(Reason(f"'{path}' is a {type(part).__name__}, which cannot be copied")))
    for part in own.modules():
        for hooks in forward_hooks_of(part):
            hooks.update({number: _of_copy(hook, memo) for number, hook in hooks.items()})
    return own


def _of_copy(hook: Callable[..., Any], memo: Mapping[int, Any]) -> Callable[..., Any]:
    """Returns a hook with copies in place of what its closure and its defaults hold of a module that was copied.

    Copying does not copy functions: what such a hook keeps, the forward of the copy would not find.
    """
    if not isinstance(hook, FunctionType):
        return hook

    def copied(value: Any) -> Any:
        return memo.get(id(value), value)

    values = closure_of(hook)
    around = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    cells = tuple(CellType(copied(values[name])) if name in values else cell for name, cell in around)
    defaults = None if hook.__defaults__ is None else tuple(map(copied, hook.__defaults__))
    copy_of_hook = FunctionType(hook.__code__, hook.__globals__, hook.__name__, defaults, cells or None)
    copy_of_hook.__kwdefaults__ = {name: copied(value) for name, value in (hook.__kwdefaults__ or {}).items()}
    return copy_of_hook


class _Recorder(TorchFunctionMode):
    """Records what a module's copy without values calls.

    It sees every function of torch, because it is a mode of torch; and calls of modules and of autograd functions,
    because these are routed through it.
    """

    def __init__(
        self,
        module: nn.Module,
        original: nn.Module,
        names: dict[int, str],
        choice: LayerChoice,
        generator_fault: Callable[[object], Reason | None],
        forward: ExampleForward,
    ) -> None:
        super().__init__()
        self._module, self._original = module, original
        self._choice = choice
        self._names = names  # of parameters, buffers and attributes, by id
        self._paths: dict[int, str] = {}
        for path, part in (*module.named_modules(), *original.named_modules()):
            self._paths.setdefault(id(part), path)
        self._calls: list[Call] = []
        self._index: dict[int, int] = {}  # of the call that made a tensor, by the tensor's id
        self._alive: list[Any] = [module]  # so that ids stay unique
        self._constants: dict[str, Any] = {}
        self._num_calls: dict[str, int] = {}  # of layers' modules
        self._inside: list[str] = [""]  # paths of the modules whose forwards run
        self._recorded: set[str] = set()  # paths of modules whose own code was recorded
        self._reasons: dict[str, Reason] = {}  # why modules became leaf modules, by path
        self._paused = False
        self._generator_fault, self._forward = generator_fault, forward
        self._values = ConstantValues()
        self._grad, self._autocast = torch.is_grad_enabled(), autocast_modes()

    def run(self, inputs: Sequence[Tensor]) -> Recording:
        for name, tensor in zip(argument_names(self._module, len(inputs)), inputs, strict=True):
            self._add(Call(op="placeholder", target=name, shape=tuple(tensor.shape)), tensor)
        try:
            with (
                self._module_calls_routed(),
                functions_intercepted(self._apply),
                seeding_noticed(self._seeds),
                self,
            ):
                result = self._module(*inputs)
            register_dataclasses(result)
            leaves, spec = tree_flatten(result)
            returned = tuple(self._returned(leaf) for leaf in leaves)
        except _StartAgain as error:
            raise TracingFailed(error.path, error.cause) from error
        except Exception as error:  # whatever the model's own code raises without values
            raise TracingFailed("", error, self._reasons) from error
        return Recording(
            calls=tuple(self._calls),
            returned=returned,
            spec=spec,
            constants=self._constants,
            leaf_reasons=self._reasons,
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        self._check_seeding()
        known = self._values.read(func, args)
        if known is not None:
            return known[0]
        if assigns_data(func):
            raise NotRecorded(ASSIGNS_DATA)
        if func is Tensor.register_hook:
            func, args = hook_operator(args[1]), args[:1]
        if func is Tensor.new and len(args) == 2 and isinstance(args[1], torch.Size) and args[1]:
            args = (args[0], *args[1])  # a graph makes a tuple of a size, which would be values
        try:
            return self._observed(func, args, kwargs, node_target(func), None)
        except Exception as error:
            if needs_values(error) and self._are_drawn(tensors_in((args, kwargs))):
                raise NotRecorded(_DRAW_DECIDES) from error
            raise

    def _are_drawn(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether some results depend on random numbers, and not on inputs, parameters or layers."""
        found = [self._index.get(id(tensor)) for tensor in tensors]
        draws = False
        for index in found:  # grows
            if index is None or self._calls[index].op not in ("call_function", "call_method"):
                return False
            call = self._calls[index]
            draws |= draws_random_numbers(
                call.target if call.op == "call_function" else getattr(Tensor, call.target, None)
            )
            used = (one.index for one in tree_leaves((call.args, dict(call.kwargs))) if isinstance(one, Ref))
            found += [one for one in used if one not in found]
        return draws

    # What is recorded

    def _observed(self, func: Any, args: Any, kwargs: Any, target: tuple[str, Any] | None, layer: Any) -> Any:
        """Calls a function and records the call, if its result holds tensors or it wrote to some."""
        tensors = list(tensors_in((args, kwargs)))
        versions = [version(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        if target == ("call_function", set_item):
            result = args[0]
        leaves = list(tensors_in(result))
        written = [tensor for tensor, before in zip(tensors, versions, strict=True) if version(tensor) != before]
        if writes_to_a_list(func):  # which is not counted
            written = list(tensors_in(args[:1]))
        if not leaves and not written and not registers_hook(func):
            return result
        if target is None:
            raise NotRecorded(Reason(f"{func} cannot be recorded", TAKE_ANY_NUMBER))
        autocast = [mode for kind, mode in autocast_modes().items() if mode != self._autocast[kind]]
        op, name = target
        shares = self._sharing(leaves, tensors)
        call = Call(
            op=op,
            target=name,
            args=tuple(self._argument(value) for value in args),
            kwargs={key: self._argument(value) for key, value in kwargs.items()},
            path=self._inside[-1],
            layer=layer,
            no_grad=self._grad and not torch.is_grad_enabled(),
            autocast=autocast[0] if autocast else None,
            shape=tuple(result.shape) if isinstance(result, Tensor) else None,
            structure=None if layer is None or isinstance(result, Tensor) else structure(result),
            shares=tuple(dict.fromkeys(self._ref(tensor).index for tensor in shares)),
            writes=tuple(dict.fromkeys(self._ref(tensor).index for tensor in written)),
            returns_written=any(leaf is tensor for leaf in leaves for tensor in written),
            line=running_line(inspect.currentframe()),
        )
        self._check_writes(call)
        index = self._add(call, result)
        if not isinstance(result, Tensor):
            self._add_parts(result, Ref(index), call)
        for tensor in written:
            self._values.forget(tensor)
        if layer is None:
            self._values.follow(func, args, kwargs, result)
        return result

    def _check_writes(self, call: Call) -> None:
        for index in call.writes:
            if self._calls[index].op == "get_attr":
                text = f"'{self._calls[index].target}' is changed outside of the layer that holds it"
                raise NotRecorded(Reason(text, WRITE_INSIDE))

    @staticmethod
    def _sharing(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        storages = {storage_key(result) for result in results}
        return [tensor for tensor in tensors if storage_key(tensor) in storages] if storages else []

    def _add(self, call: Call, result: Any) -> int:
        index = len(self._calls)
        self._calls.append(call)
        self._alive.append(result)
        if isinstance(result, Tensor):
            self._index[id(result)] = index
        return index

    def _add_parts(self, result: Any, ref: Ref, call: Call) -> None:
        """Records the selection of each tensor in a nested result, as part of the same layer."""
        for select, key, part in parts_of(result):
            if next(tensors_in(part), None) is None:
                continue
            selected = Call(
                op="call_function",
                target=select,
                args=(ref, key),
                path=call.path,
                layer=call.layer,
                no_grad=call.no_grad,
                autocast=call.autocast,
                shape=tuple(part.shape) if isinstance(part, Tensor) else None,
                shares=call.shares,
            )
            index = self._add(selected, part)
            if not isinstance(part, Tensor):
                self._add_parts(part, Ref(index), call)

    # Arguments

    def _argument(self, value: Any) -> Any:
        """Returns an argument with `Ref`s in place of tensors."""
        if isinstance(value, Tensor):
            return self._ref(value)
        if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return value.item()  # one of float64 is a float, too, but the code of a graph does not import numpy
        if value is None or isinstance(value, PLAIN):
            return value
        if isinstance(value, list | tuple):
            return (list if isinstance(value, list) else tuple)(self._argument(part) for part in value)
        if type(value) is dict:
            return {key: self._argument(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(self._argument(value.start), self._argument(value.stop), self._argument(value.step))
        fault = self._generator_fault(value)
        if fault is not None:
            raise NotRecorded(fault)
        if _holds_tensors(value):
            raise NotRecorded(Reason(f"a {type(value).__name__} that holds tensors is an argument", GIVE_TENSORS))
        return self._constant(value)

    def _ref(self, tensor: Tensor) -> Ref:
        if id(tensor) in self._index:
            return Ref(self._index[id(tensor)])
        if is_functorch_wrapped(tensor):
            raise NotRecorded(_UNDER_VMAP)
        name = self._names.get(id(tensor))
        if name is None:
            if isinstance(tensor, FakeTensor):
                raise NotRecorded(_FROM_ELSEWHERE)
            return self._constant(tensor)
        call = Call(op="get_attr", target=name, path=self._inside[-1], shape=tuple(tensor.shape))
        return Ref(self._add(call, tensor))

    def _constant(self, value: Any) -> Ref:
        name = f"_constant{len(self._constants)}"
        self._constants[name] = value
        call = Call(op="get_attr", target=name, shape=tuple(value.shape) if isinstance(value, Tensor) else None)
        index = self._add(call, value)
        self._index[id(value)] = index
        return Ref(index)

    def _returned(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._ref(leaf)
        return leaf if leaf is None or isinstance(leaf, PLAIN) else None

    # Modules and functions

    @contextmanager
    def _module_calls_routed(self) -> Iterator[None]:
        """Routes calls of modules through this recorder."""
        call = nn.Module.__call__

        def module_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if self._paused or path is None:
                return call(module, *args, **kwargs)
            check_arguments(module, args, kwargs)
            if path and (path in self._reasons or self._choice.is_layer(module, path)):
                return self._call_layer(call, module, path, args, kwargs)
            return self._call_container(call, module, path, args, kwargs)

        with patch.object(nn.Module, "__call__", module_call):
            yield

    def _call_layer(self, call: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Calls a layer, and records the call."""
        self._num_calls[path] = self._num_calls.get(path, 0) + 1

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run_layer(call, module, path, args, kwargs)

        with self._pause(), generators_restored():  # what a layer draws, the forward around it does not
            return self._observed(run, args, kwargs, ("call_module", path), (path, self._num_calls[path]))

    def _call_container(self, call: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Calls a module, and records what it calls; as one layer, if that cannot be recorded."""
        self._check_seeding()
        before = (len(self._calls), dict(self._index), dict(self._num_calls))
        generators = global_generator_states()
        self._inside.append(path)
        try:
            result = call(module, *args, **kwargs)
            if global_generator_states() != generators:
                raise NotRecorded(DRAWS_IN_PYTHON)
            self._check_seeding()
            self._recorded.add(path)
            return result
        except _StartAgain:
            raise
        except Exception as error:  # whatever the model's own code raises without values
            if not path:
                raise
            if path in self._recorded:
                raise _StartAgain(path, error) from error
            self._reasons[path] = why_not_recorded(error).behind("it cannot be traced: ")
        finally:
            self._inside.pop()
        restore_global_generators(generators)
        num_calls, self._index, self._num_calls = before
        del self._calls[num_calls:]
        return self._call_layer(call, module, path, args, kwargs)

    def _run_layer(self, call: Callable[..., Any], module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Runs a layer; if its code needs values, returns what a forward on the examples shows."""
        try:
            return call(module, *args, **kwargs)
        except Exception as error:  # whatever its code raises without values
            original = self._original.get_submodule(path)
            if any(tensor.is_meta for tensor in (*original.parameters(), *original.buffers())):
                raise error
            return self._forward.result(path, self._num_calls[path], args, kwargs)

    def _apply(self, cls: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of an autograd function, whose code is not looked into."""
        function = function_operator(cls)
        if self._paused or is_looked_into(cls):
            return function(*args, **kwargs)
        with self._pause():
            return self._observed(function, args, kwargs, ("call_function", function), None)

    def _seeds(self) -> None:
        """Raises NotRecorded if what seeds random numbers is not inside of a layer."""
        if not self._paused:
            raise NotRecorded(SEEDS_ITSELF)

    @staticmethod
    def _check_seeding() -> None:
        """Raises NotRecorded if the default generator has been seeded by its own methods, and not inside of a layer."""
        if default_generator_is_seeded():
            raise NotRecorded(SEEDS_ITSELF)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            mark_default_generator()
