"""Whether processes train the same model: each host may have its own copy of the source, and one may be older."""

import ast
import hashlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from platform import python_version_tuple
from types import FunctionType, MethodType
from typing import Any

import torch.distributed as dist
from torch import nn

from bapipe.errors import BapipeError
from bapipe.tracing.model import TracedModel
from bapipe.tracing.reached_state import is_installed

_log = logging.getLogger(__name__)

_OF_A_PROCESS = re.compile(r"0x[0-9a-f]+|(?<=cuda):\d+|(?<='cuda'), index=\d+")
"""What texts of the same thing differ in: addresses, and the number of a GPU."""

_LIBRARIES = {"torch", "bapipe", *sys.stdlib_module_names} - {"__main__"}
"""Their code is not looked at, nor that of other installed packages: ranks of a job compare the versions of torch and
bapipe, and what the layers of others compute."""


def check_same_model(model: TracedModel, loss: Callable[..., object], group: dist.ProcessGroup | None) -> None:
    """Raises BapipeError if processes have another version of a model or of its loss; warns of other settings.

    Every process of the group calls it together. A version is what the traced layers compute, the shapes of parameters,
    the settings of torch's modules, and, where all run the same Python, the code of the user's classes and of functions
    that these and the loss name, without comments, docstrings and annotations. Settings are numbers and texts that
    modules of the user's and the loss keep: they may be of a process, such as its rank.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    own = (
        python_version_tuple()[:2],
        {name: _digest(_OF_A_PROCESS.sub("", text)) for name, text in _computed(model)},
        _Code().of(model.root, loss),
        {name: _digest(text) for name, text in _settings(model.root, loss)},
    )
    of_all = [own] * size
    dist.all_gather_object(of_all, own, group=group)
    versions, computed, code, settings = zip(*of_all, strict=True)
    if unlike := _first_unlike(computed) or (_first_unlike(code) if len({*versions}) == 1 else None):
        raise BapipeError(
            f"process {unlike[1]} has another version of {unlike[0]} than process 0, so they would train another model "
            "together: give their hosts the same files, and build the model with the same arguments"
        )
    if unlike := _first_unlike(settings):
        _log.warning(
            "process %d has other numbers or texts in %s than process 0: if they are not of a process, such as its "
            "rank, build the model with the same arguments, and give hosts the same files",
            *reversed(unlike),
        )


def _first_unlike(digests: Sequence[dict[str, bytes]]) -> tuple[str, int] | None:
    """Returns the first part of which a process has another digest than the first process, and the process."""
    first = digests[0]
    for process, other in enumerate(digests):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                return name, process
    return None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:8]


def _in_words(path: str, module: nn.Module) -> str:
    return f"the module '{path}'" if path else f"the model ({type(module).__name__})"


def _computed(model: TracedModel) -> Iterator[tuple[str, str]]:
    """Yields a text of each module's parameters and settings, if it is torch's, and of what each layer computes."""
    for path, module in model.root.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for name, tensor in tensors]
        yield _in_words(path, module), "\n".join([type(module).__qualname__, *_settings_of_torch(module), *shapes])
    lines: dict[str, list[str]] = {layer.name: [layer.kind, *layer.inputs, *layer.outputs] for layer in model.layers}
    for node, name in model.layer_of.items():
        target = getattr(node.target, "__qualname__", node.target)
        lines[name].append(f"{node.op} {target} {node.args} {node.kwargs}")
    for name, of_layer in lines.items():
        yield f"the layer '{name}'", "\n".join(of_layer)


def _settings_of_torch(module: nn.Module) -> list[str]:
    if not _is_of_a_library(type(module)):
        return []
    constants = [name for name in getattr(type(module), "__constants__", ()) if hasattr(module, name)]
    return [module.extra_repr(), *(f"{name} {getattr(module, name)}" for name in constants)]


def _settings(root: nn.Module, loss: Any) -> Iterator[tuple[str, str]]:
    for path, module in root.named_modules():
        if not _is_of_a_library(type(module)):
            yield f"attributes of {_in_words(path, module)}", _plain(vars(module))
    if isinstance(loss, partial):
        yield "arguments of the loss", _plain({**dict(enumerate(loss.args)), **loss.keywords})
        loss = loss.func
    if isinstance(loss, nn.Module):
        of_modules = [_plain(vars(module)) for module in loss.modules()]
        yield "attributes of the loss", "\n".join([*of_modules, *map(str, map(_settings_of_torch, loss.modules()))])
    elif isinstance(loss, FunctionType):
        yield "variables that the loss names", _plain(_closure(loss) | dict(enumerate(loss.__defaults__ or ())))
    elif not isinstance(loss, MethodType) and hasattr(loss, "__dict__"):  # that of a method is often a trainer
        yield "attributes of the loss", _plain(vars(loss))


def _closure(function: FunctionType) -> dict[Any, Any]:
    """Returns what a function finds in those around it, as far as that is set by now."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _plain(values: dict[Any, Any]) -> str:
    """Returns a text of numbers and texts by name, also of those in tuples and lists; without all else."""
    kept = {str(name): value for name, value in values.items() if _is_plain(value)}
    return str(sorted((name, repr(kept[name])) for name in kept if not name.startswith("_") and name != "training"))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_of_a_library(definition: Any) -> bool:
    name = str(getattr(definition, "__module__", ""))
    return name.partition(".")[0] in _LIBRARIES or is_installed(sys.modules.get(name))


class _Code:
    """Digests of the user's code: of classes and functions, and of functions that those name, each once."""

    def __init__(self) -> None:
        self._of_files: dict[str, dict[str, bytes]] = {}
        self._of_classes: dict[type, bytes] = {}

    def of(self, root: nn.Module, loss: Any) -> dict[str, bytes]:
        """Returns the digest of each module's class, and of the loss, by name."""
        found = {}
        for path, module in root.named_modules():
            kind = type(module)
            if kind not in self._of_classes:
                self._of_classes[kind] = self._digest(kind)
            found[_in_words(path, module)] = self._of_classes[kind]
        found["the loss"] = self._digest(loss)
        return found

    def _digest(self, start: Any) -> bytes:
        left, seen, digests = [start], set[int](), list[bytes]()
        while left:
            one = inspect.unwrap(left.pop()) if isinstance(left[-1], FunctionType) else left.pop()
            if id(one) in seen or (_is_of_a_library(one) and not isinstance(one, partial | MethodType)):
                continue
            seen.add(id(one))
            if isinstance(one, partial):
                left.append(one.func)
            elif isinstance(one, MethodType):
                left.append(one.__func__)
            elif isinstance(one, FunctionType):
                digests.append(self._written(one, one.__code__.co_firstlineno))
                named = {name: one.__globals__.get(name) for name in one.__code__.co_names} | _closure(one)
                left += [value for value in named.values() if isinstance(value, FunctionType)]
            elif isinstance(one, type):
                digests.append(self._written(one, 0))
                left += [*one.__bases__, *(value for value in vars(one).values() if isinstance(value, FunctionType))]
            elif isinstance(one, nn.Module):
                left += [type(module) for module in one.modules()]
            else:
                left.append(type(one))
        return hashlib.sha256(b"".join(digests)).digest()[:8]

    def _written(self, definition: Any, line: int) -> bytes:
        """Returns the digest of a class, a function or the lambdas on its line; nothing where no source can be read."""
        try:
            file = inspect.getsourcefile(definition)
            if file is not None and file not in self._of_files:
                self._of_files[file] = _definitions(Path(file).read_bytes())
        except (OSError, TypeError, SyntaxError):
            return b""
        name = definition.__qualname__
        is_lambda = name.endswith("<lambda>")
        return b"" if file is None else self._of_files[file].get(f"<lambda>{line}" if is_lambda else name, b"")


def _definitions(source: bytes) -> dict[str, bytes]:
    """Returns the digest of each class, function and line with lambdas of a file, by its qualified name."""
    found: dict[str, bytes] = {}

    def add(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            inner = prefix
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                name = f"<lambda>{node.lineno}" if isinstance(node, ast.Lambda) else prefix + node.name
                found[name] = found.get(name, b"") + _digest(ast.dump(node))
                if not isinstance(node, ast.Lambda):
                    inner = f"{name}." + "<locals>." * (not isinstance(node, ast.ClassDef))
            add(node, inner)

    add(_Bare().visit(ast.parse(source)), "")
    return found


class _Bare(ast.NodeTransformer):
    """Leaves out docstrings and annotations, which do not change what code does."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if ast.get_docstring(node, clean=False) is not None:
                    node.body = node.body[1:]
        for name in {"annotation", "returns"} & {*node._fields}:
            setattr(node, name, None)
        return super().generic_visit(node)
