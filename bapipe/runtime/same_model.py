"""Checks that processes train the same model: hosts may have copies of the source code, and one may be older."""

import ast
import hashlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from platform import python_version_tuple
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from bapipe.errors import BapipeError
from bapipe.graph.reached import reached
from bapipe.job.groups import gathered
from bapipe.module_state.reached_state import functions_of
from bapipe.module_state.variables import closure_of, defaults_of, globals_of
from bapipe.module_state.whose_code import is_of_the_user, top_package, written_class
from bapipe.tracing.model import TracedModel

_log = logging.getLogger(__name__)

_OF_A_PROCESS = re.compile(r"0x[0-9a-f]+|(?<=cuda):\d+|(?<='cuda'), index=\d+")
"""Parts of a text that differ between processes for equal objects: addresses, and the index of a GPU."""

_MAX_DEPTH = 8
"""Depth to which nested lists are compared: a list may contain itself."""

_AT_FIRST: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The text of each module's numbers and strings (`_plain`) when it was first compared."""

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def check_same_model(model: TracedModel, loss: Callable[..., object], group: dist.ProcessGroup | None) -> None:
    """Raises BapipeError if a process has another version of the model or its loss than process 0; warns of settings.

    Every process of the group calls it together. Compared are what the traced layers compute, the shapes of parameters,
    and the settings of torch's modules. If all processes run the same version of Python, the code of the user's
    classes, of the loss, and of functions that these use in all processes is compared, too, without comments,
    docstrings and annotations. Different numbers and strings in attributes of the user's modules and of the loss, or in
    variables that a loss uses, are only a warning: they may belong to a process, such as its rank.
    """
    if dist.get_world_size(group) == 1:
        return
    code = _Code()
    own = (
        python_version_tuple()[:2],
        {name: _digest(text) for name, text in _computed(model)},
        code.of(model.root, loss),
        {name: _digest(text) for name, text in _settings(model.root, loss)},
        code.named_by(model.root, loss),
    )
    versions, computed, code_of_all, settings, named = zip(*gathered(own, group), strict=True)
    has_one_python = len({*versions}) == 1
    unlike = _first_unlike(computed)
    if unlike is None and has_one_python:
        in_all = {*named[0]}.intersection(*named)  # some processes may use others, such as a logger of the first one
        shared = [{name: digests[name] for name in sorted(in_all)} for digests in named]
        unlike = _first_unlike(code_of_all) or _first_unlike(shared)
    if unlike:
        raise BapipeError(
            f"process {unlike[1]} has another version of {unlike[0]} than process 0, so they would not train one model "
            "together: give their hosts the same files, and build the model with the same arguments"
        )
    if unlike := _first_unlike(settings):
        _log.warning(
            "process %d has other numbers or strings in %s than process 0: unless these belong to a process, such as "
            "its rank, build the model with the same arguments, and give hosts the same files",
            *reversed(unlike),
        )


def _first_unlike(digests: Sequence[dict[str, bytes]]) -> tuple[str, int] | None:
    """Returns the first part whose digest on a process differs from process 0's, and the process; None if none does."""
    first = digests[0]
    for process, other in enumerate(digests):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return name, process
    return None


def same_in_all_processes(text: str) -> str:
    """Returns a text of an object without what differs between processes that made it alike, such as addresses."""
    return _OF_A_PROCESS.sub("", text)


def _digest(text: str) -> bytes:
    return hashlib.sha256(same_in_all_processes(text).encode()).digest()[:8]


def _in_words(path: str, module: nn.Module) -> str:
    return f"the module '{path}'" if path else f"the model ({type(module).__name__})"


def _computed(model: TracedModel) -> Iterator[tuple[str, str]]:
    """Yields (name, text): of each module its parameters and, if torch's, settings; of each layer its operators."""
    for path, module in model.root.named_modules():
        # Without buffers: a table that grows has another shape where its layer has run before.
        parameters = module.named_parameters(recurse=False)
        shapes = [f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in parameters]
        yield _in_words(path, module), "\n".join([type(module).__qualname__, *_settings_of_torch(module), *shapes])
    lines: dict[str, list[str]] = {layer.name: [layer.kind, *layer.inputs, *layer.outputs] for layer in model.layers}
    for node, name in model.layer_of.items():
        target = getattr(node.target, "__qualname__", node.target)
        lines[name].append(f"{node.op} {target} {node.args} {node.kwargs}")
    for name, of_layer in lines.items():
        yield f"the layer '{name}'", "\n".join(of_layer)


def _settings_of_torch(module: nn.Module) -> list[str]:
    if top_package(written_class(module)) != "torch":
        return []
    constants = [name for name in getattr(type(module), "__constants__", ()) if hasattr(module, name)]
    settings = [module.extra_repr(), *(f"{name} {getattr(module, name)}" for name in constants)]
    return [text for text in settings if "tensor(" not in text]  # tensors are what it has observed in this process


def _settings(root: nn.Module, loss: Any) -> Iterator[tuple[str, str]]:
    for path, module in root.named_modules():
        if is_of_the_user(written_class(module)):
            # As first seen: a module that counts its calls has since counted those in an earlier Pipeline, and only in
            # processes that ran its stage.
            yield f"attributes of {_in_words(path, module)}", _AT_FIRST.setdefault(module, _plain(vars(module)))
    if isinstance(loss, partial):
        yield "arguments of the loss", _plain({**dict(enumerate(loss.args)), **loss.keywords})
        loss = loss.func
    if isinstance(loss, nn.Module):
        of_modules = [_plain(vars(module)) for module in loss.modules()]
        yield "attributes of the loss", "\n".join([*of_modules, *map(str, map(_settings_of_torch, loss.modules()))])
    elif isinstance(loss, FunctionType):
        yield "variables that the loss names", _plain(_named(loss) | defaults_of(loss))
    elif not isinstance(loss, MethodType) and hasattr(loss, "__dict__"):  # the object of a method is often a trainer
        yield "attributes of the loss", _plain(vars(loss))


def _named(function: FunctionType) -> dict[Any, Any]:
    """Returns the globals and the variables of enclosing functions that a function uses, by name, as far as set."""
    return globals_of(function) | closure_of(function)


def _plain(values: dict[Any, Any]) -> str:
    """Returns a text of those values that are numbers, strings, or tuples and lists of them, by name."""
    kept = {str(name): value for name, value in values.items() if _is_plain(value)}
    return str(sorted((name, repr(kept[name])) for name in kept if not name.startswith("_") and name != "training"))


def _is_plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, tuple | list):
        return depth < _MAX_DEPTH and all(_is_plain(each, depth + 1) for each in value)
    return isinstance(value, bool | int | float | str)


class _Code:
    """Digests of the user's code."""

    def __init__(self) -> None:
        self._of_files: dict[str, dict[str, bytes]] = {}
        self._of_definitions: dict[int, bytes] = {}

    def of(self, root: nn.Module, loss: Any) -> dict[str, bytes]:
        """Returns the digest of each module's class with its bases, and of the loss, by name."""
        found = {_in_words(path, module): self._digest(type(module).__mro__) for path, module in root.named_modules()}
        return found | {"the loss": self._digest(_own(loss))}

    def named_by(self, root: nn.Module, loss: Any) -> dict[str, bytes]:
        """Returns the digest of each function and class that the code of the model and of the loss uses, by name."""
        kinds = dict.fromkeys(kind for module in root.modules() for kind in type(module).__mro__)
        reached = _reached([*kinds, *_own(loss)])
        return {f"'{one.__qualname__}', which the model or its loss uses": self._digest([one]) for one in reached}

    def _digest(self, definitions: Iterable[Any]) -> bytes:
        for one in definitions:
            if id(one) not in self._of_definitions:
                self._of_definitions[id(one)] = self._written(one)
        return hashlib.sha256(b"".join(self._of_definitions[id(one)] for one in definitions)).digest()[:8]

    def _written(self, definition: Any) -> bytes:
        """Returns the digest of the source of a class or function, of a lambda with all of its line.

        For library code it returns the encoded name.
        """
        name = str(getattr(definition, "__qualname__", type(definition)))
        if not is_of_the_user(definition):  # ranks compare versions of libraries, and what layers compute
            return f"{definition.__module__}.{name}".encode()
        try:
            file = inspect.getsourcefile(definition) or ""
        except TypeError:  # written in C
            return name.encode()
        if file not in self._of_files:
            self._of_files[file] = {}
            with suppress(OSError, SyntaxError, ValueError, RecursionError):
                self._of_files[file] = _definitions(Path(file).read_bytes())
        if name.endswith("<lambda>"):
            name = f"<lambda>{definition.__code__.co_firstlineno}"
        return self._of_files[file].get(name, b"")


def _reached(start: Iterable[Any]) -> list[Any]:
    """Returns the user's functions and classes that the code of `start` uses, directly or through others, each once."""
    known = {id(one) for one in start}
    return [one for one in reached(filter(is_of_the_user, start), _used_by) if id(one) not in known]


def _used_by(one: Any) -> Iterator[Any]:
    """Yields the user's functions and classes that a function, or a method or property of a class, uses by name."""
    own = [one] if isinstance(one, FunctionType) else list(getattr(one, "__dict__", {}).values())
    for function in (function for value in own for function in functions_of(value)):
        values = _named(function).values() if isinstance(function, FunctionType) else ()
        yield from (each for each in values if isinstance(each, FunctionType | type) and is_of_the_user(each))


def _own(loss: Any) -> list[Any]:
    """Returns the functions and classes whose code is a loss."""
    while isinstance(loss, partial | MethodType):
        loss = loss.func if isinstance(loss, partial) else loss.__func__
    if isinstance(loss, nn.Module):
        return list(dict.fromkeys(kind for module in loss.modules() for kind in type(module).__mro__))
    if not callable(loss) or not hasattr(loss, "__qualname__"):
        return list(type(loss).__mro__)
    found = [loss]
    while (wrapped := getattr(found[-1], "__wrapped__", None)) is not None and wrapped not in found:
        found.append(wrapped)
    return found


def _definitions(source: bytes) -> dict[str, bytes]:
    """Returns the digests of a file's classes and functions by qualified name, and of its lambdas by line."""
    tree, lines, found = ast.parse(source), source.splitlines(), dict[str, bytes]()
    for node in ast.walk(tree):
        _strip(node)

    def add(node: Definition | ast.Lambda, name: str) -> None:
        try:
            text = ast.dump(node)
        except RecursionError:  # a deep expression, which Python compiles all the same
            text = str(lines[node.lineno - 1 : node.end_lineno])
        found[name] = found.get(name, b"") + _digest(text)

    def add_all(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Definition):
                add(node, prefix + node.name)
                is_class = isinstance(node, ast.ClassDef)
                add_all(node, f"{prefix}{node.name}." if is_class else f"{prefix}{node.name}.<locals>.")
            elif not isinstance(node, ast.expr):
                add_all(node, prefix)

    add_all(tree, "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            add(node, f"<lambda>{node.lineno}")
    return found


def _strip(node: ast.AST) -> None:
    """Removes docstrings and annotations, which do not change what code does, from a node."""
    if isinstance(node, Definition) and ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
    for name in {"annotation", "returns"} & {*node._fields}:
        setattr(node, name, None)
